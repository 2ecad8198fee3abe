"""From hidden states to tables and gradients without the logits of all tokens: one chunk of tokens at a time.

`loss_and_gradient` takes three products with the head, for a loss that is a sum over tokens; `tables` takes four (it
projects anew for the backward pass) and leaves the loss to autograd. Source: notation.md, "Fused head".

Rows are independent in every value and in the hidden gradient. The head's gradient is a sum over rows: a NaN or an
infinity in one row's hidden state makes all of it NaN. Select the response rows before the call; masking afterwards is
no substitute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from sdpo_core.objectives.chunk_gradient import RowGradients
from sdpo_core.objectives.chunk_reader import ChunkReader, Reading
from sdpo_core.objectives.head import Head, add_hidden_gradient
from sdpo_core.objectives.tables import TableRequest, Tables, check_request

# The fields of Tables that carry gradient.
DIFFERENTIABLE = ("logp", "support_logp", "entropy", "divergence")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAndGradient:
    """The loss summed over the chunks, and its gradient on the hidden states; in a group this process's part of it."""

    loss: Float[Tensor, ""]
    hidden_gradient: Float[Tensor, "token hidden"]


@torch.no_grad()
def score_tables(hidden: Float[Tensor, "token hidden"], head: Head, request: TableRequest) -> Tables:
    """Tables of constants."""
    check_request(request, head, tokens=len(hidden))
    reader = ChunkReader(hidden, head, request)
    return _joined([reader.tables(reader.read(rows)) for rows in reader.chunks()])


def tables(hidden: Float[Tensor, "token hidden"], head: Head, request: TableRequest) -> Tables:
    """Tables with a gradient to `hidden`, and to weight and bias of the head where they require one.

    The backward pass projects each chunk a second time. In a group the hidden gradient is this process's part: pass
    `copy_to_group(hidden)`, or what else sums it.
    """
    check_request(request, head, tokens=len(hidden))
    columns = _FusedTables.apply(hidden, head.weight, head.bias, head, request)  # type: ignore[no-untyped-call]
    return Tables(**dict(zip(Tables.__slots__, columns, strict=True)))


@torch.no_grad()
def loss_and_gradient(
    hidden: Float[Tensor, "token hidden"],
    head: Head,
    request: TableRequest,
    loss: Callable[[Tables, slice], Tensor],
    *,
    weight_gradient: Float[Tensor, "shard hidden"] | None,
    bias_gradient: Float[Tensor, " shard"] | None = None,
) -> LossAndGradient:
    """Value and gradient of a loss that is a sum over tokens, each chunk's from one projection.

    Args:
        hidden: final hidden states; their graph is not followed. The caller goes on with
            `hidden.backward(result.hidden_gradient)`.
        head: the projection.
        request: what the loss is made of.
        loss: called for each chunk with its tables (leaves of a graph of their own) and its rows; returns the sum of
            its tokens' weighted losses.
        weight_gradient: added to; None for a frozen head. Sums are taken in the dtype of the projection whatever its
            own.
        bias_gradient: the same for the bias.
    """
    check_request(request, head, tokens=len(hidden))
    reader = ChunkReader(hidden, head, request)
    sums = _HeadGradient(head, reader.dtype, weight=weight_gradient, bias=bias_gradient)
    hidden_gradient = torch.empty_like(hidden)
    total = torch.zeros((), dtype=reader.dtype, device=hidden.device)
    for rows in reader.chunks():
        reading = reader.read(rows)
        value, gradients = _small_gradient(reader.tables(reading), reading, loss)
        total += value
        slope = reader.logit_gradient(reading, gradients)
        hidden_gradient[rows] = _hidden_gradient(slope, head)
        sums.add(slope, reader.hidden(rows))
    sums.finish()
    return LossAndGradient(loss=total, hidden_gradient=hidden_gradient)


class _FusedTables(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, request: TableRequest
    ) -> tuple[Tensor | None, ...]:
        reader = ChunkReader(hidden, head, request)
        ctx.readings = [reader.read(rows) for rows in reader.chunks()]
        ctx.head, ctx.request = head, request
        joined = _joined([reader.tables(reading) for reading in ctx.readings])
        # Saved, so that a change of either before the backward pass is noticed.
        ctx.save_for_backward(hidden, weight, bias)
        constants = [joined.support_ids, joined.teacher_logp, joined.best_ids]
        ctx.mark_non_differentiable(*[part for part in constants if part is not None])
        ctx.set_materialize_grads(False)
        return tuple(getattr(joined, name) for name in Tables.__slots__)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        named = dict(zip(Tables.__slots__, incoming, strict=True))
        named = {name: named[name] for name in DIFFERENTIABLE}
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head: Head = ctx.head
        reader = ChunkReader(hidden, head, ctx.request)
        weight_gradient = torch.zeros_like(weight) if needs_weight else None
        bias_gradient = torch.zeros_like(bias) if needs_bias else None
        sums = _HeadGradient(head, reader.dtype, weight=weight_gradient, bias=bias_gradient)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        for reading in ctx.readings:
            reader.project_again(reading)
            rows = reading.rows
            gradients = _row_gradients(
                reading, **{name: part[rows] for name, part in named.items() if part is not None}
            )
            slope = reader.logit_gradient(reading, gradients)
            if hidden_gradient is not None:
                hidden_gradient[rows] = _hidden_gradient(slope, head)
            sums.add(slope, reader.hidden(rows))
        sums.finish()
        return hidden_gradient, weight_gradient, bias_gradient, None, None


class _HeadGradient:
    """Sums of the head's gradient over chunks, in the dtype of the projection."""

    def __init__(self, head: Head, dtype: torch.dtype, *, weight: Tensor | None, bias: Tensor | None) -> None:
        self._head = head
        self._targets = (weight, bias)
        # A bfloat16 sum over chunks would lose what is below 1/256 of it.
        self._weight, self._bias = (
            target if target is None or target.dtype == dtype else torch.zeros_like(target, dtype=dtype)
            for target in self._targets
        )

    def add(self, slope: Float[Tensor, "row column"], hidden: Float[Tensor, "row hidden"]) -> None:
        if self._weight is not None:
            self._weight[: self._head.width].addmm_(slope.T, hidden, alpha=self._head.slope)
        if self._bias is not None:
            self._bias[: self._head.width].add_(slope.sum(dim=0), alpha=self._head.slope)

    def finish(self) -> None:
        for target, total in zip(self._targets, (self._weight, self._bias), strict=True):
            if target is not None and total is not None and total is not target:
                target.add_(total)


def _small_gradient(
    small: Tables, reading: Reading, loss: Callable[[Tables, slice], Tensor]
) -> tuple[Float[Tensor, ""], RowGradients]:
    """The chunk's loss, and its gradient on the chunk's tables."""
    named = {name: getattr(small, name) for name in DIFFERENTIABLE}
    leaves = {name: value.detach().requires_grad_() for name, value in named.items() if value is not None}
    with torch.enable_grad():
        value = loss(replace(small, **leaves), reading.rows)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value.detach(), _row_gradients(reading, **dict(zip(leaves, found, strict=True)))


def _row_gradients(
    reading: Reading,
    *,
    logp: Tensor | None = None,
    support_logp: Tensor | None = None,
    entropy: Tensor | None = None,
    divergence: Tensor | None = None,
) -> RowGradients:
    stats = reading.stats
    cells = torch.zeros_like(stats.cells)
    if support_logp is not None:
        # An empty cell holds nothing that could change, whatever comes in for it.
        cells = support_logp.double().masked_fill(stats.cells == -torch.inf, 0.0)
    return RowGradients(
        own=torch.zeros_like(stats.own) if logp is None else logp.double(),
        cells=cells,
        entropy=None if entropy is None else entropy.double(),
        divergence=None if divergence is None else divergence.double(),
    )


def _hidden_gradient(slope: Float[Tensor, "row column"], head: Head) -> Float[Tensor, "row hidden"]:
    gradient = slope.new_zeros(len(slope), head.weight.shape[1])
    add_hidden_gradient(slope, head, out=gradient)
    return gradient


def _joined(parts: Sequence[Tables]) -> Tables:
    """The tables of all chunks, in order."""
    columns = {name: [getattr(part, name) for part in parts] for name in Tables.__slots__}
    joined: dict[str, Any] = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return Tables(**joined)
