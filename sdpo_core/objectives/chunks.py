"""Kernels over the logits of one chunk of tokens: choice of the support, what a row's table needs, and the gradient.

A chunk is a buffer [row, wide]: `width` columns of logits, then at least one spare column. Where an id lies in another
process's share, or pads a row, the spare column stands for it, so that gathers and scatters need no case of their own.
Small per-row numbers are float64. Rows go through the cache a few at a time, which also bounds the temporaries.

Source: notation.md, "Fused head".
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.objectives.support import ranked_ids
from sdpo_core.objectives.vocab_parallel import all_max, all_sum, gather_columns

# Numbers of a block of rows: 1 MiB in float32, about a second-level cache.
BLOCK_NUMBERS = 2**18
# Columns whose largest is found before the ids themselves are ranked.
LANE = 64
# Stands for log 0 where it multiplies 0; its exponential is exactly 0.
LOG_OF_ZERO = -1e4


@dataclass(frozen=True, kw_only=True, slots=True)
class Partial:
    """What some columns say of each row; `merge` and `over_group` put together what all say.

    Attributes:
        picked: logits at the picked ids; 0 where an id is not among the columns.
        highest: largest logit of the columns that are not support ids, -inf without any.
        mass: sum over those columns of exp(z - highest).
        moment: sum over them of exp(z - highest) (z - highest); 0 unless asked for.
    """

    picked: Float64[Tensor, "row pick"]
    highest: Float64[Tensor, " row"]
    mass: Float64[Tensor, " row"]
    moment: Float64[Tensor, " row"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStats:
    """What all columns say of each row.

    Attributes:
        own: log-probability of the row's own id.
        cells: log-probabilities of the support and the tail; without a support the tail alone, 0.
        tail: log-sum-exp of the logits outside the support.
        normaliser: log-sum-exp of all logits.
        entropy: of the row, 0 unless asked for.
    """

    own: Float64[Tensor, " row"]
    cells: Float64[Tensor, "row cell"]
    tail: Float64[Tensor, " row"]
    normaliser: Float64[Tensor, " row"]
    entropy: Float64[Tensor, " row"]


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """The rows, cut into blocks of about BLOCK_NUMBERS numbers."""
    step = max(1, BLOCK_NUMBERS // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def spare_width(width: int) -> int:
    """Columns of a buffer for `width` logits: one spare at least, in whole lanes."""
    return (width // LANE + 1) * LANE


def columns_of(ids: Int[Tensor, "row pick"], *, first: int, width: int) -> Int[Tensor, "row pick"]:
    """Column of each id in a buffer that starts at the id `first`; the spare column where it is elsewhere."""
    columns = ids - first
    return columns.masked_fill((ids < first) | (columns >= width), width)


def select_support(
    logits: Float[Tensor, "row wide"], *, first: int, width: int, k: int, group: ProcessGroup | None
) -> tuple[Int[Tensor, "row k"], bool]:
    """The k ids with the largest logits over all processes, largest first, of equals the lowest; and if one is NaN.

    Of equal logits the lowest id comes first also across lanes, which are consecutive ids in order, and across
    processes, whose candidates are sorted by id before they are ranked.
    """
    logits[:, width:] = -torch.inf
    ids = logits.new_full((len(logits), k), torch.iinfo(torch.int64).max, dtype=torch.int64)
    values = logits.new_full((len(logits), k), -torch.inf)
    found = min(k, width)
    if found:
        for rows in row_blocks(len(logits), max(logits.shape[1] // 16, found * LANE)):
            columns = _ranked_columns(logits[rows], k=found)
            ids[rows, :found] = columns + first
            values[rows, :found] = logits[rows].gather(1, columns)
    if group is not None:
        ids, values = gather_columns(ids, group=group), gather_columns(values, group=group)
        ids, order = ids.sort(dim=1)
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        ids, values = ids.gather(1, order)[:, :k], values[:, :k]
    return ids, bool(values.isnan().any())


def _ranked_columns(logits: Float[Tensor, "row wide"], *, k: int) -> Int[Tensor, "row k"]:
    """`ranked_ids`, looking only into the k lanes with the largest maxima.

    An id of another lane is behind those k maxima: each is larger, or as large and in an earlier lane.
    """
    lanes = logits.view(len(logits), -1, LANE)
    if k >= lanes.shape[1]:
        return ranked_ids(logits, k=k)
    best = ranked_ids(lanes.amax(dim=2), k=k).sort(dim=1).values
    columns = (best[:, :, None] * LANE + torch.arange(LANE, device=logits.device)).flatten(1)
    return columns.gather(1, ranked_ids(logits.gather(1, columns), k=k))


def scan(
    logits: Float[Tensor, "row wide"],
    *,
    width: int,
    support: Int[Tensor, "row k"],
    own: Int[Tensor, "row one"],
    has_moment: bool = False,
) -> Partial:
    """What the columns say. `logits` are as they were afterwards, spare columns aside.

    Args:
        logits: the chunk.
        width: columns that hold logits.
        support: columns (see `columns_of`) of the ids that stay out of highest, mass and moment.
        own: columns of further ids to pick; `picked` has the support first.
        has_moment: whether `moment` is wanted.
    """
    rows = len(logits)
    picked = logits.new_empty(rows, support.shape[1] + own.shape[1], dtype=torch.float64)
    highest, mass, moment = picked.new_zeros(3, rows).unbind()
    for block in row_blocks(rows, width):
        part, columns = logits[block], support[block]
        live = part[:, :width]
        values = part.gather(1, columns)
        picked[block] = torch.cat([values, part.gather(1, own[block])], dim=1)
        part.scatter_(1, columns, -torch.inf)
        top = live.amax(dim=1, keepdim=True) if width else live.new_full((len(live), 1), -torch.inf)
        # In a row of nothing but support ids the masses are those of -inf, not of NaN.
        gaps = live - _finite(top)
        weights = gaps.exp() if has_moment else gaps.exp_()
        highest[block], mass[block] = top[:, 0], weights.sum(dim=1)
        if has_moment:
            moment[block] = weights.mul_(gaps.clamp_(min=LOG_OF_ZERO)).sum(dim=1)
        part.scatter_(1, columns, values)
    picked.masked_fill_(torch.cat([support, own], dim=1) == width, 0.0)
    return Partial(picked=picked, highest=highest, mass=mass, moment=moment)


def merge(first: Partial, second: Partial) -> Partial:
    """What the columns of both say."""
    highest = torch.maximum(first.highest, second.highest)
    parts = [_at(part, highest) for part in (first, second)]
    return Partial(
        picked=first.picked + second.picked,
        highest=highest,
        mass=parts[0].mass + parts[1].mass,
        moment=parts[0].moment + parts[1].moment,
    )


def over_group(part: Partial, *, group: ProcessGroup | None) -> Partial:
    """What the columns of all processes say: one MAX and one SUM."""
    highest = all_max(part.highest, group=group)
    part = _at(part, highest)
    packed = torch.cat([part.picked, torch.stack([part.mass, part.moment], dim=1)], dim=1)
    total = all_sum(packed, group=group)
    return Partial(picked=total[:, :-2], highest=highest, mass=total[:, -2], moment=total[:, -1])


def _at(part: Partial, highest: Float64[Tensor, " row"]) -> Partial:
    """The same with mass and moment relative to another, higher `highest`."""
    gap = part.highest - _finite(highest)
    factor = gap.exp()
    moment = factor * (part.moment + part.mass * gap.clamp(min=LOG_OF_ZERO))
    return Partial(picked=part.picked, highest=highest, mass=factor * part.mass, moment=moment)


def _finite(highest: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 in place of -inf, which stands for no column."""
    return highest.masked_fill(highest == -torch.inf, 0.0)


def row_stats(whole: Partial, *, support_ids: Int[Tensor, "row k"]) -> RowStats:
    """Log-probabilities from what all columns say; cells of padding ids (-1) are -inf."""
    k = support_ids.shape[1]
    common = _finite(whole.highest)
    tail = common + whole.mass.log()
    support = whole.picked[:, :k].masked_fill(support_ids < 0, -torch.inf)
    cells = torch.cat([support, tail[:, None]], dim=1)
    normaliser = cells.logsumexp(dim=1)
    cells = cells - normaliser[:, None]
    gap = common - normaliser
    outside = gap.exp() * (whole.moment + whole.mass * gap)
    inside = (cells[:, :-1].exp() * cells[:, :-1].clamp(min=LOG_OF_ZERO)).sum(dim=1)
    own = whole.picked[:, k] - normaliser if whole.picked.shape[1] > k else torch.zeros_like(tail)
    return RowStats(own=own, cells=cells, tail=tail, normaliser=normaliser, entropy=-(outside + inside))
