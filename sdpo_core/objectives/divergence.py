"""Divergence of the student's table from the teacher's, and the part of it that the tail carries.

Source: notation.md, "Divergence". Tables come from `support.bucket_logps`, on the same ids and temperature.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import DataError, SpecError

# Stands for log 0 inside the arithmetic: finite, so that 0 * log 0 is 0 and not NaN, and so low that its exponential
# is exactly 0 in float64 (below -746).
LOG_OF_ZERO = -1e4

# A float32 softmax over 152k entries sums to 1 within 2e-5. More than this is another kind of table: renormalised,
# cut without a tail, or in half precision.
MASS_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class TailShare:
    """Sums over tokens in nats, without gradient: micro-batches are added first, then tail / total is in [0, 1]."""

    tail: Float[Tensor, ""]
    total: Float[Tensor, ""]


def bucket_divergence(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> Float[Tensor, " token"]:
    """Divergence of each token in nats, 0 where the rows are equal; the gradient reaches the student only.

    With p the student and q the teacher: alpha 0 is KL(q||p), 1 is KL(p||q), between it is
    (1 - alpha) KL(p||m) + alpha KL(q||m) with m = (1 - alpha) p + alpha q. The ends are not limits of the inside, which
    vanishes towards both (notation.md, "Endpoints").

    Each cell gives its Bregman term, for instance p log(p/q) - p + q, in float64. The added terms sum to 0 over a row;
    with them no cell is negative, and the 1e-7 by which float32 rows miss mass 1 cancels to first order: where logits
    agree to 1e-4 (a divergence of 2e-9) the error is 7e-12, that of a plain float32 sum 2e-7.

    Args:
        student_logp: [token, cell] log-probabilities in nats that sum to mass 1; -inf is an empty cell.
        teacher_logp: [token, cell] the same for the teacher.
        alpha: in [0, 1].

    Raises:
        SpecError: alpha out of range.
        DataError: NaN, a row without mass 1, or an infinite KL (a cell that is empty on one side only).
    """
    _check(student_logp, teacher_logp, alpha=alpha)
    terms = _cell_terms(student_logp.double(), teacher_logp.detach().double(), alpha=alpha)
    return terms.sum(dim=1).to(student_logp.dtype)


def tail_share(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> TailShare:
    """What the last cell carries of `bucket_divergence`, and the whole, summed over the tokens in float64."""
    _check(student_logp, teacher_logp, alpha=alpha)
    terms = _cell_terms(student_logp.detach().double(), teacher_logp.detach().double(), alpha=alpha)
    # Rounding leaves up to -1e-16 in a cell where the two sides are equal.
    terms = terms.clamp(min=0.0)
    return TailShare(tail=terms[:, -1].sum(), total=terms.sum())


def _cell_terms(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> Float[Tensor, "token cell"]:
    """Non-negative terms that sum to the divergence; a cell that is empty on both sides gives 0 with gradient 0."""
    p_log = student_logp.masked_fill(student_logp == -torch.inf, LOG_OF_ZERO)
    q_log = teacher_logp.masked_fill(teacher_logp == -torch.inf, LOG_OF_ZERO)
    p, q = p_log.exp(), q_log.exp()
    if alpha == 0.0:
        return q * (q_log - p_log) + (p - q)
    if alpha == 1.0:
        return p * (p_log - q_log) + (q - p)
    # m only enters through its logarithm, whose derivative cancels within each cell: (1 - alpha) p + alpha q = m.
    # Without it the gradient of a cell is (1 - alpha) p log(p/m), and exactly 0 where p = q.
    gap = (q_log - p_log).detach()
    # log(m/p) and log(m/q), each cell from the larger of p and q: the other form overflows.
    from_p = torch.log1p(alpha * torch.expm1(gap))
    from_q = torch.log1p((1.0 - alpha) * torch.expm1(-gap))
    m_over_p = torch.where(gap <= 0, from_p, gap + from_q)
    m_over_q = torch.where(gap <= 0, from_p - gap, from_q)
    return -(1.0 - alpha) * p * m_over_p - alpha * q * m_over_q


def _check(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise SpecError(f"bucket_divergence: got alpha {alpha}, expected 0 to 1.")
    for side, table in (("student", student_logp), ("teacher", teacher_logp)):
        mass = table.detach().exp().sum(dim=1)
        # Written so that NaN fails too.
        is_whole = (mass - 1.0).abs() <= MASS_TOLERANCE
        if not is_whole.all():
            row = int((~is_whole).nonzero()[0])
            raise DataError(
                f"bucket_divergence: got mass {float(mass[row]):.6f} in {side} row {row}, expected 1. "
                "Pass full-vocabulary log-probabilities with the tail, of response tokens only."
            )
    if alpha in (0.0, 1.0):
        weighing, other = (teacher_logp, student_logp) if alpha == 0.0 else (student_logp, teacher_logp)
        is_infinite = (weighing != -torch.inf) & (other == -torch.inf)
        if is_infinite.any():
            row, cell = (int(place) for place in is_infinite.nonzero()[0])
            raise DataError(
                f"bucket_divergence: got an infinite KL at alpha {alpha} in row {row}, cell {cell}, expected no cell "
                "that is empty on one side only. Check that both sides exclude the same columns."
            )
