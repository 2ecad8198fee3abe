"""The `hf` backend: student and teacher as Hugging Face models on one device."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdpo_core.backends.base import (
    Objective,
    Projection,
    RowScores,
    TokenBatch,
    TokenRow,
    TrainRow,
    UpdateStats,
    WeightsAt,
    WholeVocabulary,
    WorkerFacts,
)
from sdpo_core.backends.hf_model import HfModel, microbatches, own_ids, peak_memory_bytes, split_rows
from sdpo_core.backends.hf_scorer import HfScorer, Part
from sdpo_core.errors import CellError, DataError
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates
from sdpo_core.specs import CellSpec, OptimizerSpec
from sdpo_core.text import ChatTokenizer

OPTIMIZER_FILE = "optimizer.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"
# Field of `TrainRow` to field of `TokenBatch`.
_COLUMNS = {
    "advantages": "advantage",
    "old_logps": "old_logp",
    "sampling_logps": "sampling_logp",
    "teacher_logps": "teacher_logp",
    "teacher_own_logps": "teacher_own_logp",
    "anchor_logps": "anchor_logp",
    "old_values": "old_value",
    "returns": "returns",
}


def load_policy(spec: CellSpec, *, folder: Path, device: str) -> "HfPolicy":
    """The student of a cell, with the weights in `folder`."""
    training = spec.training
    return HfPolicy(
        load_model(spec, folder=folder, device=device),
        optimizer=spec.optimizer,
        temperature=training.temperature,
        max_tokens=training.microbatch_tokens,
        has_value_head="value" in spec.traits,
    )


def load_scorer(spec: CellSpec, *, at: WeightsAt, device: str, shares: Sequence[float]) -> HfScorer:
    """A scoring model of a cell: one copy of the weights a share."""
    parts = [Part(model=load_model(spec, folder=at.folder, device=device), share=share) for share in shares]
    for part in parts:
        if at.weights is not None:
            part.model.load_weights(at.weights)
    return HfScorer(parts, temperature=spec.training.temperature, max_tokens=spec.training.microbatch_tokens)


def load_model(spec: CellSpec, *, folder: Path, device: str) -> HfModel:
    """The model of a Hugging Face folder in the cell's dtype."""
    vocab = ChatTokenizer.load(folder).vocab_size
    return HfModel(folder, dtype=getattr(torch, spec.dtype), device=torch.device(device), valid_vocab=vocab)


class HfPolicy:
    """The student: AdamW with clipping over one model; weight decay spares vectors (norms)."""

    def __init__(
        self,
        model: HfModel,
        *,
        optimizer: OptimizerSpec,
        temperature: float,
        max_tokens: int,
        has_value_head: bool = False,
    ) -> None:
        self.model = model
        self._spec = optimizer
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._teacher_head: Head | None = None
        self._parameters = dict(model.model.named_parameters())
        self._value_head: torch.nn.Linear | None = None
        if has_value_head:
            # Values start at 0, the same for every seed.
            self._value_head = torch.nn.Linear(model.head.shape[1], 1, device=model.device, dtype=model.head.dtype)
            for name, parameter in self._value_head.named_parameters():
                torch.nn.init.zeros_(parameter)
                self._parameters[f"value_head.{name}"] = parameter
        groups = (
            {"params": [p for p in self._parameters.values() if p.dim() > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self._parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        )
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
        )

    @torch.inference_mode()
    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        """Log-probabilities of each row's own tokens, and the table at the `top_k` ids the policy ranks highest."""
        scores: dict[int, RowScores] = {}
        head = self.model.projection_head(temperature=self._temperature)
        for batch in microbatches(rows, max_tokens=self._max_tokens):
            chosen = [rows[index] for index in batch]
            states = self.model.response_states(chosen)
            request = TableRequest(own_ids=own_ids(chosen, device=states.device), top_k=top_k)
            found = score_tables(states, head, request)
            columns = {"logps": found.logp}
            if found.support_ids is not None and found.support_logp is not None:
                columns |= {"support_ids": found.support_ids, "table": found.support_logp}
            if self._value_head is not None:
                columns["values"] = self._value_head(states)[:, 0]
            lengths = [len(row.response_ids) for row in chosen]
            for index, fields in zip(batch, split_rows(columns, lengths), strict=True):
                scores[index] = RowScores(**fields)
        return tuple(scores[index] for index in range(len(rows)))

    def hold_projection(self, projection: Projection) -> None:
        """Keep the teacher's output projection for divergences over the whole vocabulary."""
        device = self.model.device
        self._teacher_head = Head(
            weight=projection.weight.to(device),
            bias=None if projection.bias is None else projection.bias.to(device),
            temperature=self._temperature,
            vocab=projection.vocab,
            logit_scale=projection.logit_scale,
            soft_cap=projection.soft_cap,
        )

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        """One optimizer step on the sum over tokens of their shares of the loss, accumulated over micro-batches.

        Raises:
            CellError: the gradient norm is not finite; the weights are left as they were.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss, sums = 0.0, dict[str, float]()
        for batch in _microbatches(rows, max_tokens=self._max_tokens):
            part, part_sums = self._backward(batch, objective)
            loss += part
            for name, value in part_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._spec.max_grad_norm)
        if not torch.isfinite(norm):
            raise CellError(
                f"HfPolicy.update: got gradient norm {float(norm)} with loss {loss}, expected finite numbers. "
                "Lower the learning rate, or look at the last samples of the journal."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.model.weights_version += 1
        return UpdateStats(loss=loss, grad_norm=float(norm), sums=sums)

    def _backward(self, rows: Sequence[TrainRow], objective: Objective) -> tuple[float, dict[str, float]]:
        """Add the gradient of one micro-batch to the parameters; its loss and sums."""
        states = self.model.response_states([row.row for row in rows])
        head = self.model.projection_head(temperature=self._temperature)
        request = self._request(rows, whole=objective.whole_vocabulary, device=states.device)
        columns = _columns(rows, like=states)
        sums: dict[str, float] = {}

        def loss_of(found: Tables, part: slice, value: Tensor | None) -> Tensor:
            losses = objective.token_losses(_token_batch(columns, found, part=part, value=value))
            for name, amount in losses.sums.items():
                sums[name] = sums.get(name, 0.0) + amount
            return losses.loss.sum()

        if objective.needs_whole_sequences or self._value_head is not None:
            value = None if self._value_head is None else self._value_head(states)[:, 0]
            total = loss_of(tables(states, head, request), slice(None), value)
            total.backward()  # type: ignore[no-untyped-call]
            return float(total.detach()), sums
        result = loss_and_gradient(
            states.detach(),
            head,
            request,
            lambda found, part: loss_of(found, part, None),
            weight_gradient=_gradient_of(self.model.head),
            bias_gradient=None if head.bias is None else _gradient_of(head.bias),
        )
        states.backward(result.hidden_gradient)  # type: ignore[no-untyped-call]
        return float(result.loss), sums

    def _request(
        self, rows: Sequence[TrainRow], *, whole: WholeVocabulary | None, device: torch.device
    ) -> TableRequest:
        own = own_ids([row.row for row in rows], device=device)
        ids = _stacked(rows, "support_ids")
        states = _stacked(rows, "teacher_states")
        if states is None:
            return TableRequest(own_ids=own, support_ids=None if ids is None else ids.to(device), entropy=True)
        if self._teacher_head is None or whole is None:
            raise DataError(
                "HfPolicy.update: got a teacher's states without its projection or without a divergence, expected all "
                "three. Call hold_projection first, and give the objective a divergence over the whole vocabulary."
            )
        return TableRequest(
            own_ids=own,
            entropy=True,
            teacher=TeacherStates(hidden=states.to(device), head=self._teacher_head),
            full=FullDivergence(alpha=whole.alpha, entry_clip=whole.entry_clip),
        )

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def save(self, folder: Path) -> None:
        """Weights, value head and optimizer state, as safetensors."""
        self.model.save_weights(folder)
        if self._value_head is not None:
            save_file(self._value_head.state_dict(), folder / VALUE_HEAD_FILE)
        tensors = {
            f"{name}/{key}": torch.as_tensor(value).cpu().clone()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.model.load_weights(folder)
        if self._value_head is not None:
            self._value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
        self._optimizer.state.clear()
        for key, value in load_file(folder / OPTIMIZER_FILE).items():
            name, entry = key.rsplit("/", 1)
            state = self._optimizer.state[self._parameters[name]]
            state[entry] = value if entry == "step" else value.to(self.model.device)

    def load_weights(self, folder: Path) -> None:
        """The weights alone: to evaluate an earlier step."""
        self.model.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self.model.facts()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.model.device)


def _microbatches(rows: Sequence[TrainRow], *, max_tokens: int) -> Iterator[list[TrainRow]]:
    """Micro-batches of rows that have the same fields, so that each field is there for all tokens or for none."""
    kinds: dict[tuple[str, ...], list[TrainRow]] = {}
    for row in rows:
        kinds.setdefault(tuple(sorted(row.arrays())), []).append(row)
    for kind in sorted(kinds):
        alike = kinds[kind]
        for batch in microbatches([row.row for row in alike], max_tokens=max_tokens):
            yield [alike[index] for index in batch]


def _stacked(rows: Sequence[TrainRow], name: str) -> Tensor | None:
    """One field of all rows, token after token; None where rows of this kind do not have it."""
    arrays = [row.arrays()[name] for row in rows if name in row.arrays()]
    return torch.cat([torch.from_numpy(array) for array in arrays]) if arrays else None


def _columns(rows: Sequence[TrainRow], *, like: Float[Tensor, "token hidden"]) -> dict[str, Tensor]:
    """The constant fields of a `TokenBatch`, one entry a token."""
    lengths = torch.tensor([len(row.row.response_ids) for row in rows])

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths).to(like.device)

    columns = {
        "weight": spread([row.weight for row in rows]),
        "distill_weight": spread([row.distill_weight for row in rows]),
        "sequence": torch.arange(len(rows)).repeat_interleave(lengths).to(like.device),
    }
    for field, column in _COLUMNS.items():
        stacked = _stacked(rows, field)
        if stacked is not None:
            columns[column] = stacked.to(like.device)
    task = [row.task_advantage for row in rows if row.task_advantage is not None]
    if task:
        columns["task_advantage"] = spread(task)
    return columns


def _token_batch(columns: Mapping[str, Tensor], found: Tables, *, part: slice, value: Tensor | None) -> TokenBatch:
    assert found.entropy is not None
    fields = {name: column[part] for name, column in columns.items()}
    fields.setdefault("old_logp", found.logp.detach())
    return TokenBatch(
        logp=found.logp,
        entropy=found.entropy.detach(),
        student_logp=found.support_logp,
        divergence=found.divergence,
        value=value,
        **fields,
    )


def _gradient_of(parameter: Tensor) -> Tensor:
    """The parameter's gradient, zero at first: the head's share is added to it in place."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
