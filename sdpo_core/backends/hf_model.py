"""A Hugging Face causal model seen as rows of hidden states: prompts run once and shared by their responses.

A group's rollouts share one prompt, and its teacher prompts often coincide, so the keys and values of each distinct
prompt are computed once and expanded over its responses; gradients flow through them. On groups of 8 with short answers
that is about a quarter of the tokens of running every row whole.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sdpo_core.backends.base import Projection, TokenRow, WorkerFacts
from sdpo_core.backends.memory import memory_kind
from sdpo_core.backends.row_model import HeldStates
from sdpo_core.backends.weight_files import WEIGHTS_FILE, read_weights
from sdpo_core.errors import DataError
from sdpo_core.objectives.head import Head

# Values of a tensor that are in memory as float32 at once while a digest is taken: 64 MiB.
_DIGEST_VALUES = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Keys and values of prompts without their last token, one row a response, and what continuing them needs."""

    cache: DynamicCache
    last_ids: Int[Tensor, "row 1"]
    mask: Bool[Tensor, "row prompt"]
    last_positions: Int[Tensor, "row 1"]


class HfModel:
    """A causal model of a Hugging Face folder on one device, dropout off.

    `weights_version` counts how often this object's weights have changed. `value_head`: see `add_value_head`.
    """

    # One process holds all tokens.
    counts_whole_rows = True

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device, valid_vocab: int) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
        )
        torch.nn.Module.to(self.model, device).train(False)
        # torch gives the embedding of the padding id no gradient, but a response may hold that id like any other.
        self.model.get_input_embeddings().padding_idx = None  # type: ignore[assignment]
        self.device = device
        self.weights_version = 0
        self.value_head: torch.nn.Linear | None = None
        if valid_vocab > len(self.head):
            raise DataError(
                f"HfModel: got a tokenizer of {valid_vocab} ids and a head of {len(self.head)} rows in {folder}, "
                "expected a row for each id. Tokenizer and weights are not of one model."
            )
        self._valid_vocab = valid_vocab
        self._max_positions = int(self.model.config.max_position_embeddings)

    def add_value_head(self) -> None:
        """A linear map of the states. Values start at 0, the same for every seed."""
        self.value_head = torch.nn.Linear(self.head.shape[1], 1, device=self.device, dtype=self.head.dtype)
        for parameter in self.value_head.parameters():
            torch.nn.init.zeros_(parameter)

    @property
    def soft_cap(self) -> float | None:
        """Bound of the logits, for models that have one."""
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return None if cap is None else float(cap)

    def projection_head(self, *, temperature: float) -> Head:
        """The output projection as objectives see it."""
        return Head(
            weight=self.head,
            bias=getattr(self.model.get_output_embeddings(), "bias", None),  # type: ignore[no-untyped-call]
            temperature=temperature,
            vocab=self._valid_vocab,
            logit_scale=float(getattr(self.model.config, "logit_scale", None) or 1.0),
            soft_cap=self.soft_cap,
        )

    def whole_projection(self) -> Projection:
        head = self.projection_head(temperature=1.0)
        # A copy: in one process it would change under its holder with the next commit, at the version it had.
        return Projection(
            weight=head.weight.detach().to("cpu", copy=True),
            bias=None if head.bias is None else head.bias.detach().to("cpu", copy=True),
            logit_scale=head.logit_scale,
            soft_cap=head.soft_cap,
            vocab=head.vocab,
            version=self.weights_version,
        )

    def head_of(self, projection: Projection, *, temperature: float) -> Head:
        return Head(
            weight=projection.weight.to(self.device),
            bias=None if projection.bias is None else projection.bias.to(self.device),
            temperature=temperature,
            vocab=projection.vocab,
            logit_scale=projection.logit_scale,
            soft_cap=projection.soft_cap,
        )

    @property
    def head(self) -> Float[Tensor, "vocab hidden"]:
        weight: Tensor = self.model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return weight

    def logits(self, hidden: Float[Tensor, "token hidden"]) -> Float[Tensor, "token vocab"]:
        """Logits of the valid ids, projected in float32 (float64 for a float64 model)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        head = self.projection_head(temperature=1.0)
        logits = hidden.to(dtype) @ head.weight[: head.vocab].to(dtype).T
        if head.bias is not None:
            logits = logits + head.bias[: head.vocab].to(dtype)
        if head.logit_scale != 1.0:
            logits = logits * head.logit_scale
        return logits if head.soft_cap is None else head.soft_cap * torch.tanh(logits / head.soft_cap)

    def prefix(self, prompts: Sequence[tuple[int, ...]], owners: Sequence[int]) -> Prefix:
        """Run each of `prompts` once; row i of the result continues prompt `owners[i]`. `owners` is sorted."""
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for index, prompt in enumerate(prompts):
            ids[index, width - len(prompt) :] = torch.tensor(prompt)
            mask[index, width - len(prompt) :] = True
        ids, mask = ids.to(self.device), mask.to(self.device)
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        run = self.model.model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=positions[:, :-1],
            cache=DynamicCache(config=self.model.config),
            use_cache=True,
        ).cache
        counts = torch.bincount(torch.tensor(owners), minlength=len(prompts)).tolist()
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(run.layers):
            cache.update(_expand(layer.keys, counts), _expand(layer.values, counts), index)
        picked = torch.tensor(owners, device=self.device)
        return Prefix(cache=cache, last_ids=ids[picked, -1:], mask=mask[picked], last_positions=positions[picked, -1:])

    def extend(
        self, prefix: Prefix, ids: Int[Tensor, "row new"], *, mask: Bool[Tensor, "row seen"], positions: Tensor
    ) -> Float[Tensor, "row new hidden"]:
        """Hidden states of `ids` after what `prefix.cache` holds; the cache grows by them."""
        states: Tensor = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=prefix.cache,
            use_cache=True,
        ).last_hidden_state
        return states

    def response_states(self, rows: Sequence[TokenRow]) -> Float[Tensor, "token hidden"]:
        """Hidden states that predict the response tokens of `rows`, flattened in row order.

        Rows must be sorted by prompt (see `microbatches`).
        """
        longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        self.check_length(longest, where="HfModel.response_states")
        prompts, owners = _distinct(rows)
        prefix = self.prefix(prompts, owners)
        lengths = [len(row.response_ids) for row in rows]
        inputs = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for index, row in enumerate(rows):
            inputs[index, 1 : lengths[index]] = torch.tensor(row.response_ids[:-1], dtype=torch.long)
        inputs = inputs.to(self.device)
        inputs[:, :1] = prefix.last_ids
        steps = torch.arange(inputs.shape[1], device=self.device)
        # Padding stands right of every real token, so causality alone keeps it out of sight.
        seen = torch.cat([prefix.mask, prefix.mask.new_ones(len(rows), inputs.shape[1] - 1)], dim=1)
        hidden = self.extend(prefix, inputs, mask=seen, positions=prefix.last_positions + steps)
        is_response = steps < torch.tensor(lengths, device=self.device)[:, None]
        return hidden[is_response]

    def plan(self, rows: Sequence[TokenRow], *, max_tokens: int) -> list[list[int]]:
        return list(microbatches(rows, max_tokens=max_tokens))

    def held_states(self, rows: Sequence[TokenRow], *, replicated: bool = False) -> HeldStates:
        states = self.response_states(rows)
        tokens = torch.arange(len(states), device=self.device)
        return HeldStates(hidden=states, tokens=tokens, replicated=states if replicated else None)

    def whole_rows(self, columns: Mapping[str, Tensor], *, held: Int[Tensor, " held"], total: int) -> dict[str, Tensor]:
        return dict(columns)

    def gathered(
        self, columns: Mapping[str, Tensor], *, numbers: Int[Tensor, " held"], total: int
    ) -> dict[str, Tensor]:
        order = numbers.argsort()
        return {name: column[order] for name, column in columns.items()}

    def added(self, amounts: Mapping[str, float]) -> dict[str, float]:
        return dict(amounts)

    def check_length(self, tokens: int, *, where: str) -> None:
        """Raise DataError when a sequence does not fit the model's positions."""
        if tokens > self._max_positions:
            raise DataError(
                f"{where}: got a sequence of {tokens} tokens, expected at most {self._max_positions}. "
                "Shorten the prompts or the responses in the profile."
            )

    def weights(self) -> dict[str, Tensor]:
        """Parameters by name on the CPU; tied ones once."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        """parameter <- (1 - rate) * parameter + rate * weights: an EMA commit, or a copy at rate 1."""
        own = dict(self.model.named_parameters())
        shapes, others = ({name: value.shape for name, value in side.items()} for side in (own, weights))
        if shapes != others:
            different = sorted(name for name in own.keys() | weights.keys() if shapes.get(name) != others.get(name))
            raise DataError(
                f"HfModel.blend: got other shapes of {different}, expected the same model. "
                "Student and teacher must share their architecture."
            )
        for name, parameter in own.items():
            if rate == 1.0:
                # Interpolation would turn -0.0 into 0.0, and a damaged parameter would stay damaged.
                parameter.copy_(weights[name])
            else:
                parameter.lerp_(weights[name].to(parameter), rate)
        self.weights_version += 1

    def save_weights(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights(), folder / WEIGHTS_FILE)

    def load_weights(self, folder: Path) -> None:
        """Weights that this backend or another has saved."""
        self.blend(read_weights(folder), rate=1.0)

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            pid=os.getpid(),
            weights_sha256=weights_sha256(self.weights()),
            memory_kind=memory_kind(self.device),
        )


def microbatches(rows: Sequence[TokenRow], *, max_tokens: int) -> Iterator[list[int]]:
    """Indices of `rows`, sorted by prompt, cut so that a micro-batch runs at most `max_tokens` padded tokens.

    A row that alone exceeds the budget gets a micro-batch of its own.
    """
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index].prompt_ids), rows[index].prompt_ids, index))
    batch: list[int] = []
    for index in order:
        if batch and _padded_tokens([rows[i] for i in (*batch, index)]) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and values, in name order, one tensor at a time.

    Values narrower than float32 count as the float32 they equal, so that weights have one digest in every dtype that
    holds them.
    """
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode())
        tensor = weights[name]
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        for part in torch.split(tensor.reshape(-1), _DIGEST_VALUES):
            total.update(part.to(dtype).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _expand(values: Float[Tensor, "prompt head position dim"], counts: Sequence[int]) -> Tensor:
    """Repeat row i `counts[i]` times; the backward of an expand is a sum, that of an index a slow scatter."""
    return torch.cat(
        [values[index : index + 1].expand(count, -1, -1, -1) for index, count in enumerate(counts) if count]
    )


def _distinct(rows: Sequence[TokenRow]) -> tuple[list[tuple[int, ...]], list[int]]:
    prompts: list[tuple[int, ...]] = []
    owners = []
    for row in rows:
        if not prompts or prompts[-1] != row.prompt_ids:
            prompts.append(row.prompt_ids)
        owners.append(len(prompts) - 1)
    return prompts, owners


def _padded_tokens(rows: Sequence[TokenRow]) -> int:
    prompts, _ = _distinct(rows)
    width = max(len(prompt) for prompt in prompts)
    return len(prompts) * width + len(rows) * max(len(row.response_ids) for row in rows)
