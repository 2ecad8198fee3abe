"""Divergence over the whole vocabulary, between the logits of two chunks.

Source: notation.md, "Fused head". Each entry gives a term f that is at least 0, and u = df/d log p; the gradient on the
student's logit is u - p * (sum of u). An entry above the clip gives the clip, and u = 0.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.errors import SpecError
from sdpo_core.objectives.chunks import row_blocks
from sdpo_core.objectives.vocab_parallel import all_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class FullDivergence:
    """Whole-vocabulary divergence from the teacher. alpha as in `bucket_divergence`.

    `entry_clip` bounds each entry's term before the sum; None: no bound. Logits must be finite: where a bias of -inf
    excludes a column, the row comes out as NaN.
    """

    alpha: float
    entry_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise SpecError(f"FullDivergence: got alpha {self.alpha}, expected 0 to 1.")
        if self.entry_clip is not None and not self.entry_clip > 0.0:
            raise SpecError(f"FullDivergence: got entry_clip {self.entry_clip}, expected a positive number or None.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """Logits of one model, `width` columns and spare ones, and the log-sum-exp of each row over all columns."""

    logits: Float[Tensor, "row wide"]
    normaliser: Float64[Tensor, " row"]
    width: int

    def logp(self, rows: slice) -> Float[Tensor, "block column"]:
        """Log-probabilities of some rows."""
        exact = self.normaliser[rows, None]
        near = exact.to(self.logits.dtype)
        # In two steps: the first is exact for large logits, the second is what rounding the normaliser lost.
        return (self.logits[rows, : self.width] - near).sub_((exact - near).to(near.dtype))


@dataclass(frozen=True, kw_only=True, slots=True)
class FullStats:
    """Of each row, over all columns: the divergence, and the sum of u."""

    divergence: Float64[Tensor, " row"]
    slope: Float64[Tensor, " row"]


def full_stats(student: Side, teacher: Side, full: FullDivergence, *, group: ProcessGroup | None) -> FullStats:
    """The divergence of each row; one SUM."""
    sums = student.normaliser.new_zeros(len(student.normaliser), 2)
    for rows in row_blocks(len(sums), student.width):
        term, slope, _ = _terms(student.logp(rows), teacher.logp(rows), full)
        sums[rows, 0], sums[rows, 1] = term.sum(dim=1), slope.sum(dim=1)
    sums = all_sum(sums, group=group)
    return FullStats(divergence=sums[:, 0], slope=sums[:, 1])


def full_gradient(
    student: Side, teacher: Side, full: FullDivergence, *, rows: slice, slope: Float64[Tensor, " row"]
) -> Float[Tensor, "block column"]:
    """d divergence / d logit of some rows; `slope` is that of `FullStats`."""
    _, u, p = _terms(student.logp(rows), teacher.logp(rows), full)
    return u.sub_(p.mul_(slope[rows, None].to(p.dtype)))


def _terms(
    p_log: Float[Tensor, "row column"], q_log: Float[Tensor, "row column"], full: FullDivergence
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms f, the slopes u and p; `q_log` is used up."""
    gap = q_log.sub_(p_log)
    q, p = (gap + p_log).exp_(), p_log.exp()
    if full.alpha in (0.0, 1.0):
        # q - p from the larger of the two, so that equal rows give exactly 0.
        change = torch.expm1(-gap.abs()).mul_(torch.maximum(p, q)).mul_(-gap.sign())
        if full.alpha == 0.0:
            term, slope = q.mul_(gap).sub_(change), change.neg()
        else:
            slope = gap.mul_(p).neg_()
            term = slope + change
    else:
        alpha = full.alpha
        # log m less the larger of log p and log q; the weight is that of the smaller: alpha where q is.
        weight = gap.sign().mul_(0.5 - alpha).add_(0.5)
        over = torch.expm1(-gap.abs()).mul_(weight).log1p_()
        slope = (over + gap.relu()).mul_(p).mul_(-(1.0 - alpha))
        term = slope - over.sub_(gap.clamp_(max=0.0)).mul_(q).mul_(alpha)
    if full.entry_clip is not None:
        slope.masked_fill_(term > full.entry_clip, 0.0)
        term.clamp_(max=full.entry_clip)
    return term, slope, p
