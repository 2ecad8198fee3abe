"""From hidden states to tables and gradients without the logits of all tokens: one chunk of tokens at a time.

`loss_and_gradient` takes three products with the head, for a loss that is a sum over tokens; `tables` takes four (it
projects anew for the backward pass) and leaves the loss to autograd. Source: notation.md, "Fused head".

Rows are independent in every value and in the hidden gradient. The head's gradient is a sum over rows: a NaN or an
infinity in one row's hidden state makes all of it NaN. Select the response rows before the call; masking afterwards is
no substitute.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from sdpo_core.objectives.chunk_gradient import RowGradients
from sdpo_core.objectives.chunk_reader import ChunkReader, Reading
from sdpo_core.objectives.head import Head, hidden_slope
from sdpo_core.objectives.row_records import join
from sdpo_core.objectives.tables import TableRequest, Tables, check_request
from sdpo_core.objectives.tile_backward import Targets, TileBackward

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
    return join([reader.tables(reader.read(rows)) for rows in reader.chunks()])


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
    reader = ChunkReader(hidden, head, request, keeps_logits=True)
    sums = _HeadGradient(head, reader.dtype, weight=weight_gradient, bias=bias_gradient)
    hidden_gradient = torch.empty_like(hidden)
    total = torch.zeros((), dtype=reader.dtype, device=hidden.device)
    for rows in reader.chunks():
        reading = reader.read(rows)
        value, gradients = _small_gradient(reader.tables(reading), reading, loss, rows=rows)
        total += value
        slope = reader.logit_gradient(reading, gradients, rows=rows)
        hidden_gradient[rows] = hidden_slope(slope, head)
        sums.add(slope, reader.hidden(rows))
    sums.finish()
    return LossAndGradient(loss=total, hidden_gradient=hidden_gradient)


class _FusedTables(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, request: TableRequest
    ) -> tuple[Tensor | None, ...]:
        reader = ChunkReader(hidden, head, request)
        readings = [reader.read(rows) for rows in reader.chunks()]
        found = join([reader.tables(reading) for reading in readings])
        ctx.head, ctx.request, ctx.reading = head, request, join(readings)
        # What is projected anew is saved, so that a change of it before the backward pass is noticed.
        teacher = request.teacher if request.full is not None else None
        seen = () if teacher is None else (teacher.hidden, teacher.head.weight, teacher.head.bias)
        ctx.save_for_backward(hidden, weight, bias, *seen)
        constants = [found.support_ids, found.teacher_logp, found.best_ids]
        ctx.mark_non_differentiable(*[part for part in constants if part is not None])
        ctx.set_materialize_grads(False)
        return tuple(getattr(found, name) for name in Tables.__slots__)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors[:3]
        needs = ctx.needs_input_grad[:3]
        targets = [torch.empty_like(part) if wanted else None for part, wanted in zip(saved, needs, strict=True)]
        named = dict(zip(Tables.__slots__, incoming, strict=True))
        gradients = _row_gradients(ctx.reading, **{name: named[name] for name in DIFFERENTIABLE})
        to = Targets(hidden=targets[0], weight=targets[1], bias=targets[2])
        TileBackward(saved[0], ctx.head, ctx.request, ctx.reading).write(gradients, to=to)
        return *targets, None, None


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
    small: Tables, reading: Reading, loss: Callable[[Tables, slice], Tensor], *, rows: slice
) -> tuple[Float[Tensor, ""], RowGradients]:
    """The chunk's loss, and its gradient on the chunk's tables."""
    named = {name: getattr(small, name) for name in DIFFERENTIABLE}
    leaves = {name: value.detach().requires_grad_() for name, value in named.items() if value is not None}
    with torch.enable_grad():
        value = loss(replace(small, **leaves), rows)
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
