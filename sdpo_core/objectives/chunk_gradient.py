"""Gradient of the small per-row numbers with respect to the logits of a chunk, written over those logits.

Source: notation.md, "Fused head".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from sdpo_core.objectives.chunks import LOG_OF_ZERO, RowStats, row_blocks
from sdpo_core.objectives.full_divergence import FullDivergence, Side, full_gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGradients:
    """Incoming gradients of each row's numbers; None: the number was not asked for, or nothing depends on it."""

    own: Float64[Tensor, " row"]
    cells: Float64[Tensor, "row cell"]
    entropy: Float64[Tensor, " row"] | None
    divergence: Float64[Tensor, " row"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSlope:
    """What the whole-vocabulary divergence adds: the teacher's side, and the sum of u of each row."""

    full: FullDivergence
    teacher: Side
    slope: Float64[Tensor, " row"]


def write_gradient(
    logits: Float[Tensor, "row wide"],
    gradients: RowGradients,
    *,
    width: int,
    stats: RowStats,
    support: Int[Tensor, "row k"],
    own: Int[Tensor, "row one"],
    full: FullSlope | None,
    cap: float | None,
) -> None:
    """Turn the logits into d(sum of gradient x number) / dz, times the slope of the cap.

    `support` and `own` are columns (see `columns_of`); `cap` is soft_cap / temperature.
    """
    dtype = logits.dtype
    # The mass that flows off all columns in proportion to p, and back to the support's cells, the tail, the own id.
    total = gradients.own + gradients.cells.sum(dim=1)
    at_support = (gradients.cells[:, :-1] - total[:, None] * stats.cells[:, :-1].exp()).to(dtype)
    # Of the tail's columns: p_j / P_tail (g_tail - P_tail total), which neither overflows nor vanishes with P_tail.
    is_empty = stats.tail == -torch.inf
    near = stats.tail.masked_fill(is_empty, 0.0).to(dtype)
    rounded = (near - stats.tail).masked_fill(is_empty, 0.0).exp()
    at_tail = (rounded * (gradients.cells[:, -1] - total * stats.cells[:, -1].exp())).to(dtype)
    side = Side(logits=logits, normaliser=stats.normaliser, width=width)
    for rows in row_blocks(len(logits), width):
        part = logits[rows]
        live = part[:, :width]
        bend = None if cap is None else _cap_slope(live, cap=cap)
        extra = _extra(side, gradients, stats, rows=rows, full=full)
        live.sub_(near[rows, None]).exp_().mul_(at_tail[rows, None])
        part.scatter_(1, support[rows], at_support[rows])
        part.scatter_add_(1, own[rows], gradients.own[rows, None].to(dtype).expand(own[rows].shape))
        if extra is not None:
            live.add_(extra)
        if bend is not None:
            live.mul_(bend)


def _extra(
    side: Side, gradients: RowGradients, stats: RowStats, *, rows: slice, full: FullSlope | None
) -> Float[Tensor, "block column"] | None:
    """What the entropy and the whole-vocabulary divergence add, from the logits as they still are."""
    extra = None
    if gradients.entropy is not None:
        logp = side.logp(rows).clamp_(min=LOG_OF_ZERO)
        extra = logp.exp().mul_(logp.add_(stats.entropy[rows, None].to(logp.dtype)))
        extra.mul_(-gradients.entropy[rows, None].to(logp.dtype))
    if full is not None and gradients.divergence is not None:
        slopes = full_gradient(side, full.teacher, full.full, rows=rows, slope=full.slope)
        slopes.mul_(gradients.divergence[rows, None].to(slopes.dtype))
        extra = slopes if extra is None else extra.add_(slopes)
    return extra


def _cap_slope(live: Float[Tensor, "block column"], *, cap: float) -> Float[Tensor, "block column"]:
    """1 - tanh^2, from z = cap * tanh."""
    bent = live / cap
    return bent.mul_(bent).neg_().add_(1.0)
