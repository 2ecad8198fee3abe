"""A tiny model cut over processes beside the same one whole, from Hugging Face: forward, backward and one step.

Runs in the processes of `processes.py`; each compares its share of every number, and the largest difference counts.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sdpo_core.backends.megatron.build import RowGPT, build_model
from sdpo_core.backends.megatron.compat import cpu_guard
from sdpo_core.backends.megatron.names import to_hf, to_shard
from sdpo_core.backends.megatron.shape import model_shape
from sdpo_core.layout import LayoutSpec
from sdpo_core.objectives.context_parallel import Zigzag
from sdpo_core.objectives.fused import score_tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest
from tests.sdpo_core.backends.megatron.tiny import llama_config, qwen3_config, tiny_model

# Odd, so that `tensor` 2 pads the vocabulary.
VOCAB = 251
LENGTH = 48
CLIP, LEARNING_RATE, DECAY = 0.05, 1e-3, 0.01
CPU = torch.device("cpu")

CONFIGS: Mapping[str, PretrainedConfig] = {
    "tied": qwen3_config(vocab_size=VOCAB),
    "untied": qwen3_config(vocab_size=VOCAB, tie_word_embeddings=False),
    "llama 9q/3kv": llama_config(vocab_size=VOCAB),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout; `lengths` are those of its rows, which are padded, or stand in one where it packs them."""

    layout: LayoutSpec
    config: str = "tied"
    has_value_head: bool = False
    lengths: tuple[int, ...] = (48, 7, 30, 21)

    @property
    def name(self) -> str:
        layout = self.layout
        flags = [flag for flag in ("sequence", "recompute", "packed") if getattr(layout, flag)]
        sizes = [
            f"{side} {getattr(layout, side)}" for side in ("tensor", "context", "data") if getattr(layout, side) > 1
        ]
        values = ["value head"] if self.has_value_head else []
        return ", ".join([*(sizes or ["1 process"]), *flags, self.config, *values])


def _cases(*layouts: Mapping[str, int | bool]) -> Iterator[Case]:
    for layout in layouts:
        yield Case(layout=LayoutSpec.model_validate(layout))


SEQUENCE = {"tensor": 2, "sequence": True}
CASES: Mapping[int, tuple[Case, ...]] = {
    1: (
        *_cases({}, {"recompute": True}, {"packed": True}),
        Case(layout=LayoutSpec(), config="untied"),
        Case(layout=LayoutSpec(), config="llama 9q/3kv"),
        Case(layout=LayoutSpec(), has_value_head=True),
    ),
    2: (
        *_cases({"tensor": 2}, SEQUENCE, {"tensor": 2, "packed": True}, {**SEQUENCE, "packed": True}),
        *_cases({"context": 2}, {"data": 2}, {**SEQUENCE, "recompute": True}, {"context": 2, "recompute": True}),
        Case(layout=LayoutSpec(tensor=2), config="untied"),
        Case(layout=LayoutSpec(tensor=2), config="llama 9q/3kv"),
        Case(layout=LayoutSpec(tensor=2, sequence=True), config="llama 9q/3kv"),
        Case(layout=LayoutSpec(tensor=2), has_value_head=True),
    ),
    4: (
        *_cases({"tensor": 2, "context": 2}, {**SEQUENCE, "context": 2}, {"tensor": 2, "data": 2}),
        *_cases({"context": 2, "data": 2}),
        Case(layout=LayoutSpec(tensor=2, context=2, sequence=True), config="untied"),
        Case(layout=LayoutSpec(tensor=2, context=2, sequence=True), has_value_head=True),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded on the right, what follows each token, its weight in the loss, and the value it should have."""

    ids: Tensor
    labels: Tensor
    weights: Tensor
    returns: Tensor

    def part(self, rows: slice, positions: Tensor) -> "Batch":
        """Labels stand beside their tokens, so that any positions of them may be taken."""
        return Batch(
            **{
                name: getattr(self, name)[rows][:, positions].contiguous()
                for name in ("ids", "labels", "weights", "returns")
            }
        )


def measure_all(folder: Path) -> list[dict[str, float | str]]:
    """The differences of every case for as many processes as there are."""
    warnings.filterwarnings("ignore")
    found: list[dict[str, float | str]] = []
    for index, case in enumerate(CASES[dist.get_world_size()]):
        found.append({"case": case.name, **measure(case, folder=folder / str(index))})
        parallel_state.destroy_model_parallel()
    return found


def measure(case: Case, *, folder: Path) -> dict[str, float]:
    """The largest differences over all processes, and how large the gradients are."""
    whole = Whole(case)
    model = loaded(case, whole.model)
    found = {"weights": back_and_forth(model, whole.model, folder=folder), "order": out_of_order(model)}
    for epsilon in (1e-5, 1e-8):
        model = loaded(case, whole.model)
        with cpu_guard():
            ddp = DistributedDataParallel(model.config, DDP_CONFIG, model)
            optimizer = get_megatron_optimizer(optimizer_config(epsilon), [ddp])
        for group in optimizer.param_groups:
            group["weight_decay"] = DECAY * group["wd_mult"]
        ddp.zero_grad_buffer()
        found |= run(case, whole, ddp)
        with cpu_guard():
            finalize_model_grads([ddp], None)
        found |= gradient_differences(whole, model)
        with cpu_guard():
            is_finite, norm, _ = optimizer.step()
        expected_norm, expected = whole.stepped(epsilon)
        found["norm"] = abs(norm - expected_norm) / expected_norm if is_finite else float("inf")
        found[f"step {epsilon:.0e}"] = largest_difference(parameters_of(model), cut(expected, model))
    return {name: over_processes(value) for name, value in found.items()}


DDP_CONFIG = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)


def optimizer_config(epsilon: float) -> OptimizerConfig:
    return OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, weight_decay=DECAY, adam_eps=epsilon, clip_grad=CLIP)


class Whole:
    """The Hugging Face model with a value head, its loss and its gradients."""

    def __init__(self, case: Case) -> None:
        self.model = tiny_model(CONFIGS[case.config])
        self.value_head = nn.Linear(self.model.config.hidden_size, 1) if case.has_value_head else None
        self.batch = make_batch(case)
        states = self.model.model(input_ids=self.batch.ids).last_hidden_state
        self.logits = self.model.lm_head(states)
        losses = nn.functional.cross_entropy(self.logits.flatten(0, 1), self.batch.labels.flatten(), reduction="none")
        losses = losses.view_as(self.batch.weights)
        if self.value_head is not None:
            losses = losses + (self.value_head(states)[..., 0] - self.batch.returns).square()
        self.loss = (losses * self.batch.weights).sum()
        self.loss.backward()

    def parameters(self) -> dict[str, nn.Parameter]:
        head = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return dict(self.model.named_parameters()) | head

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient(parameter) for name, parameter in self.parameters().items()}

    def stepped(self, epsilon: float) -> tuple[float, dict[str, Tensor]]:
        """The gradient norm, and the weights after clipping and one step of AdamW; norms and biases do not decay."""
        copies = {name: nn.Parameter(value.detach().clone()) for name, value in self.parameters().items()}
        for name, value in self.parameters().items():
            copies[name].grad = gradient(value).clone()
        norm = float(nn.utils.clip_grad_norm_(copies.values(), CLIP))
        groups = [
            {"params": [each for each in copies.values() if each.dim() > 1], "weight_decay": DECAY},
            {"params": [each for each in copies.values() if each.dim() <= 1], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=epsilon).step()
        return norm, {name: value.detach() for name, value in copies.items()}


def make_batch(case: Case) -> Batch:
    """Each row's tokens predict random labels, which a shift of tokens would not."""
    generator = torch.Generator().manual_seed(3)
    size = (len(case.lengths), LENGTH)
    is_real = torch.arange(LENGTH) < torch.tensor(case.lengths)[:, None]
    chosen = (torch.rand(size, generator=generator) < 0.6) & is_real
    return Batch(
        ids=torch.randint(0, VOCAB, size, generator=generator) * is_real,
        labels=torch.randint(0, VOCAB, size, generator=generator),
        weights=chosen / chosen.sum(),
        returns=torch.rand(size, generator=generator),
    )


def loaded(case: Case, whole: PreTrainedModel) -> RowGPT:
    """The case's share of the model."""
    layout = case.layout
    model = build_model(
        model_shape(whole.config), layout, dtype=torch.float32, device=CPU, value_head=case.has_value_head
    )
    weights = dict(whole.named_parameters())
    model.load_shard(to_shard(weights, model.shape, tensor=layout.tensor, rank=model.groups.tensor.rank()))
    return model


def run(case: Case, whole: Whole, ddp: DistributedDataParallel) -> dict[str, float]:
    """Forward and backward of this process's rows and positions."""
    model: RowGPT = ddp.module
    groups, layout = model.groups, case.layout
    count = len(case.lengths) // layout.data
    rows = slice(groups.data.rank() * count, (groups.data.rank() + 1) * count)
    positions = torch.arange(LENGTH)
    if layout.context > 1:
        positions = Zigzag(padded_length=LENGTH, size=layout.context).positions(groups.context.rank())
    batch, expected = whole.batch.part(rows, positions), whole.logits.detach()[rows][:, positions]
    if layout.packed:
        is_real = torch.arange(LENGTH) < torch.tensor(case.lengths)[:, None]
        columns = {name: getattr(batch, name)[is_real][None] for name in ("ids", "labels", "weights", "returns")}
        batch, expected = Batch(**columns), expected[is_real][None]
        states = ddp(batch.ids, case.lengths)
    else:
        states = ddp(batch.ids)
    # The public projection of megatron-core, which gathers a sequence that is cut and sums the gradient over tensor.
    logits, _ = model.output_layer(states, weight=model.head_weight())
    first = groups.tensor.rank() * logits.shape[-1]
    is_padding = torch.arange(first, first + logits.shape[-1]) >= VOCAB
    whole_logits = gather_from_tensor_model_parallel_region(logits.detach())[..., :VOCAB].transpose(0, 1)
    # Filling copies: the loss overwrites what it is given.
    losses = vocab_parallel_cross_entropy(logits.masked_fill(is_padding, -torch.inf), batch.labels.T.contiguous()).T
    if model.value_head is not None and whole.value_head is not None:
        model.value_head.load_state_dict(whole.value_head.state_dict())
        # Every process of a group finds the same loss from it, so that no gradient is summed over tensor.
        if layout.sequence:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        losses = losses + (model.value_head(states)[..., 0].T - batch.returns).square()
    loss = (losses * batch.weights).sum()
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=groups.shared_weights)
    return {
        "logits": float((whole_logits - expected).abs().max()),
        "logp": logp_difference(model, states.detach(), batch.labels, expected),
        "loss": abs(float(total - whole.loss)),
        "unfinished": largest_difference(main_gradients(model), cut(whole.gradients(), model)),
    }


def logp_difference(model: RowGPT, states: Tensor, labels: Tensor, logits: Tensor) -> float:
    """Of the tokens' log-probabilities by our own head, which leaves the padding of the vocabulary out."""
    group = model.groups.tensor if model.layout.tensor > 1 else None
    if model.layout.sequence and states.shape[0] < labels.shape[1]:
        states = gather_from_sequence_parallel_region(states)
    head = Head(weight=model.head_weight(), temperature=1.0, vocab=VOCAB, group=group)
    found = score_tables(states.transpose(0, 1).flatten(0, 1), head, TableRequest(own_ids=labels.flatten())).logp
    expected = logits.log_softmax(dim=-1).gather(-1, labels[..., None])
    return float((found - expected.flatten()).abs().max())


def gradient_differences(whole: Whole, model: RowGPT) -> dict[str, float]:
    expected = cut(whole.gradients(), model)
    return {
        "gradient": largest_difference(main_gradients(model), expected),
        "scale": max(float(each.abs().max()) for each in expected.values()),
    }


def cut(weights: Mapping[str, Tensor], model: RowGPT) -> dict[str, Tensor]:
    """This process's share of the model's numbers, and the value head's."""
    own = {name: value for name, value in weights.items() if not name.startswith("value_head.")}
    values = {name: value for name, value in weights.items() if name.startswith("value_head.")}
    return to_shard(own, model.shape, tensor=model.layout.tensor, rank=model.groups.tensor.rank()) | values


def parameters_of(model: RowGPT) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main_gradients(model: RowGPT) -> dict[str, Tensor]:
    return {name: parameter.main_grad for name, parameter in model.named_parameters()}


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def over_processes(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def out_of_order(model: RowGPT) -> float:
    """0 where neighbours in rank order share a layer, the next ones a sequence, the farthest none; else 1."""
    layout, groups = model.layout, model.groups
    shared = groups.context.rank() + layout.context * groups.data.rank()
    is_in_order = dist.get_rank() == groups.tensor.rank() + layout.tensor * shared
    return float(not (is_in_order and groups.shared_weights.rank() == shared))


def back_and_forth(model: RowGPT, whole: PreTrainedModel, *, folder: Path) -> float:
    """0 if the shares make the same weights again, and a folder of them the same logits; else 1."""
    shards: list[dict[str, Tensor] | None] = [None] * model.layout.tensor
    own = {name: parameter.detach() for name, parameter in model.shard_parameters().items()}
    dist.all_gather_object(shards, own, group=model.groups.tensor)
    weights = to_hf([shard for shard in shards if shard is not None], model.shape)
    expected = dict(whole.named_parameters())
    is_same = weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    if dist.get_rank() == 0:
        folder.mkdir()
        whole.config.to_json_file(folder / "config.json")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        ids = torch.arange(40)[None]
        is_same = is_same and torch.equal(again(ids).logits, whole(ids).logits)
    return 0.0 if is_same else 1.0
