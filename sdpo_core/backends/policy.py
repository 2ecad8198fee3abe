"""The student on any `RowModel`: scores its own responses, and one optimizer step a mini-batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from sdpo_core.backends.amounts import put_together
from sdpo_core.backends.base import (
    Objective,
    Projection,
    RowScores,
    TokenRow,
    TrainRow,
    UpdateStats,
    WholeVocabulary,
    WorkerFacts,
)
from sdpo_core.backends.memory import peak_memory_bytes
from sdpo_core.backends.row_model import HeldStates, ModelOptimizer, RowModel
from sdpo_core.backends.rows import constant_columns, kinds, own_ids, split_rows, stacked, token_batch, token_numbers
from sdpo_core.errors import CellError, DataError
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import DIFFERENTIABLE, loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates

_LOSS = "loss"


class ModelPolicy:
    """A trainable model. `max_tokens`: padded tokens of a micro-batch at most."""

    def __init__(self, model: RowModel, optimizer: ModelOptimizer, *, temperature: float, max_tokens: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._teacher_head: Head | None = None

    # Not inference_mode: megatron-core keeps buffers from one call for the next, which may be one of training.
    @torch.no_grad()
    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        """Log-probabilities of each row's own tokens, and the table at the `top_k` ids the policy ranks highest."""
        if not rows:
            return ()
        head = self.model.projection_head(temperature=self._temperature)
        parts: list[dict[str, Tensor]] = []
        for batch in self.model.plan(rows, max_tokens=self._max_tokens):
            chosen = [rows[index] for index in batch]
            held = self._held(chosen)
            request = TableRequest(own_ids=_own_ids(chosen, held), top_k=top_k)
            found = score_tables(held.hidden, head, request)
            columns = {"logps": found.logp}
            if found.support_ids is not None and found.support_logp is not None:
                columns |= {"support_ids": found.support_ids, "table": found.support_logp}
            if held.replicated is not None and self.model.value_head is not None:
                columns["values"] = self.model.value_head(held.replicated)[:, 0]
            parts.append({**columns, NUMBERS: token_numbers(rows, batch, device=self.model.device)[held.tokens]})
        return tuple(RowScores(**fields) for fields in split_rows(gather(self.model, parts, rows=rows), rows))

    def hold_projection(self, projection: Projection) -> None:
        """Keep the teacher's output projection for divergences over the whole vocabulary."""
        self._teacher_head = self.model.head_of(projection, temperature=self._temperature)

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        """One optimizer step on the sum over tokens of their shares of the loss, accumulated over micro-batches.

        Raises:
            CellError: the gradient norm is not finite; the weights are left as they were.
        """
        self.optimizer.zero_gradients()
        sums = {_LOSS: 0.0}
        for alike in kinds(rows):
            for batch in self.model.plan([row.row for row in alike], max_tokens=self._max_tokens):
                put_together(sums, self._backward([alike[index] for index in batch], objective))
        sums = self.model.added(sums)
        loss, norm = sums.pop(_LOSS), self.optimizer.gradient_norm()
        if not abs(norm) < float("inf"):
            raise CellError(
                f"policy update: got gradient norm {norm} with loss {loss}, expected finite numbers. "
                "Lower the learning rate, or look at the last samples of the journal."
            )
        self.optimizer.step(learning_rate=learning_rate)
        self.model.weights_version += 1
        return UpdateStats(loss=loss, grad_norm=norm, sums=sums)

    def _held(self, rows: Sequence[TokenRow]) -> HeldStates:
        return self.model.held_states(rows, replicated=self.model.value_head is not None)

    def _backward(self, rows: Sequence[TrainRow], objective: Objective) -> dict[str, float]:
        """Add the gradient of one micro-batch to the parameters; its loss and sums."""
        held = self._held([row.row for row in rows])
        if not rows:
            # The processes that share a model out meet in its backward pass too.
            held.hidden.backward(torch.zeros_like(held.hidden))  # type: ignore[no-untyped-call]
            return {}
        constants = {name: column.to(self.model.device) for name, column in constant_columns(rows).items()}
        request = self._request(rows, held, whole=objective.whole_vocabulary)
        if objective.needs_whole_sequences or self.model.value_head is not None:
            return self._backward_through_tables(held, constants, request, objective)
        constants = {name: column[held.tokens] for name, column in constants.items()}
        head = self.model.projection_head(temperature=self._temperature)
        sums: dict[str, float] = {}

        def loss_of(found: Tables, part: slice) -> Tensor:
            losses = objective.token_losses(token_batch(constants, _columns(found), part=part))
            put_together(sums, losses.sums)
            return losses.loss.sum()

        result = loss_and_gradient(
            held.hidden.detach(),
            head,
            request,
            loss_of,
            weight_gradient=self.optimizer.gradient_of(head.weight),
            bias_gradient=None if head.bias is None else self.optimizer.gradient_of(head.bias),
        )
        held.hidden.backward(result.hidden_gradient)  # type: ignore[no-untyped-call]
        return {**sums, _LOSS: float(result.loss)}

    def _backward_through_tables(
        self, held: HeldStates, constants: Mapping[str, Tensor], request: TableRequest, objective: Objective
    ) -> dict[str, float]:
        """For losses that see all tokens of a row at once, or values: autograd, over tables of all tokens."""
        head = self.model.projection_head(temperature=self._temperature)
        columns = _columns(tables(held.hidden, head, request))
        if held.replicated is not None and self.model.value_head is not None:
            columns["value"] = self.model.value_head(held.replicated)[:, 0]
        columns = self.model.whole_rows(columns, held=held.tokens, total=len(constants["weight"]))
        losses = objective.token_losses(token_batch(constants, columns, part=slice(None)))
        total = losses.loss.sum()
        total.backward()  # type: ignore[no-untyped-call]
        return {**losses.sums, _LOSS: float(total.detach())} if self.model.counts_whole_rows else {}

    def _request(self, rows: Sequence[TrainRow], held: HeldStates, *, whole: WholeVocabulary | None) -> TableRequest:
        own = _own_ids([row.row for row in rows], held)
        ids, states = (_held_part(stacked(rows, name), held) for name in ("support_ids", "teacher_states"))
        if states is None:
            return TableRequest(own_ids=own, support_ids=ids, entropy=True)
        if self._teacher_head is None or whole is None:
            raise DataError(
                "policy update: got a teacher's states without its projection or without a divergence, expected all "
                "three. Call hold_projection first, and give the objective a divergence over the whole vocabulary."
            )
        return TableRequest(
            own_ids=own,
            entropy=True,
            teacher=TeacherStates(hidden=states, head=self._teacher_head),
            full=FullDivergence(alpha=whole.alpha, entry_clip=whole.entry_clip),
        )

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def weights_version(self) -> int:
        return self.model.weights_version

    def save(self, folder: Path) -> None:
        """Weights and optimizer state, the value head's included, as safetensors."""
        self.model.save_weights(folder)
        self.optimizer.save(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.model.load_weights(folder)
        self.optimizer.load(folder)

    def load_weights(self, folder: Path) -> None:
        """The weights alone: to evaluate an earlier step."""
        self.model.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self.model.facts()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.model.device)


# The column that says which tokens of a call the others are of.
NUMBERS = "numbers"


def gather(model: RowModel, parts: Sequence[Mapping[str, Tensor]], *, rows: Sequence[TokenRow]) -> dict[str, Tensor]:
    """Columns of all tokens of `rows` from those of this process's micro-batches and the others'."""
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    numbers = columns.pop(NUMBERS)
    return model.gathered(columns, numbers=numbers, total=sum(len(row.response_ids) for row in rows))


def _columns(found: Tables) -> dict[str, Tensor]:
    """The fields that carry gradient."""
    named = {name: getattr(found, name) for name in DIFFERENTIABLE}
    return {name: value for name, value in named.items() if value is not None}


def _own_ids(rows: Sequence[TokenRow], held: HeldStates) -> Int[Tensor, " held"]:
    return own_ids(rows, device=held.hidden.device)[held.tokens]


def _held_part(column: Tensor | None, held: HeldStates) -> Tensor | None:
    return None if column is None else column.to(held.hidden.device)[held.tokens]
