"""Divergence of the student's table from the teacher's, whole or over the support alone, and the tail's part of it.

Source: notation.md, "Divergence" and "Truncation". Both tables are on the same ids and temperature, the tail last.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.algorithm_specs import Truncation
from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.inputs import check_finite

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
    return support_divergence(student_logp, teacher_logp, alpha=alpha, truncation="tail")


def support_divergence(
    student_logp: Float[Tensor, "token cell"],
    teacher_logp: Float[Tensor, "token cell"],
    *,
    alpha: float,
    truncation: Truncation,
    entry_clip: float | None = None,
) -> Float[Tensor, " token"]:
    """Divergence of each token in nats over the cells that `truncation` leaves; the gradient reaches the student only.

    "tail": all cells, `bucket_divergence`. "renormalised": both sides divided by their mass on the K ids; says nothing
    about that mass. "bregman": the Bregman terms of the K ids; at least 0, and least where p = q on the ids, while a
    plain sum of p log(p/q) over the ids is least at p = q/e. No truncation is negative.

    A cell that is empty (-inf) on both sides, such as the padding of a ragged row, gives value 0 and gradient 0.

    Args:
        student_logp: [token, cell] log-probabilities in nats that sum to mass 1, the tail last; -inf is an empty cell.
        teacher_logp: [token, cell] the same for the teacher.
        alpha: in [0, 1].
        truncation: what becomes of the tail.
        entry_clip: bound of each cell's Bregman term before the sum; a cell above it gives no gradient of its own.

    Raises:
        SpecError: alpha or entry_clip out of range.
        DataError: NaN, a row without mass 1, an infinite KL (a cell that is empty on one side only), or ids that one
            side alone leaves without any mass.
    """
    _check_alpha(alpha)
    if entry_clip is not None and not entry_clip > 0.0:
        raise SpecError(f"support_divergence: got entry_clip {entry_clip}, expected a positive number, or None.")
    _check_mass(student_logp, teacher_logp)
    student, teacher = student_logp.double(), teacher_logp.detach().double()
    if truncation != "tail":
        student, teacher = student[:, :-1], teacher[:, :-1]
    if truncation == "renormalised":
        _check_both_have_mass(student, teacher)
        student, teacher = _renormalised(student), _renormalised(teacher)
    _check_finite_kl(student, teacher, alpha=alpha)
    terms = _cell_terms(student, teacher, alpha=alpha)
    if entry_clip is not None:
        terms = terms.clamp(max=entry_clip)
    return terms.sum(dim=1).to(student_logp.dtype)


def token_clip_weight(divergence: Float[Tensor, " token"], *, limit: float) -> Float[Tensor, " token"]:
    """min(1, limit / D) of each token, without gradient: a token of large divergence counts less, but still counts.

    Weight times D is held at `limit`, and the gradient keeps its direction; clipping D itself would drop it. Below 1
    exactly where D exceeds the limit, so `weight < 1` counts the clipped tokens.

    Raises:
        SpecError: limit is not positive.
        DataError: a divergence is not finite.
    """
    if not limit > 0.0:
        raise SpecError(f"token_clip_weight: got limit {limit}, expected a positive number.")
    check_finite({"divergence": divergence}, where="token_clip_weight")
    # Divided this way round: limit / D is taken as limit times 1/D, which need not be 1 where they are equal.
    return (divergence.detach() / limit).clamp(min=1.0).reciprocal()


def topk_overlap(a: Int[Tensor, "token k"], b: Int[Tensor, "token k"]) -> Float[Tensor, " token"]:
    """Share of the k ids that both rows hold, in any order, in [0, 1].

    Raises:
        DataError: k is 0, an id is negative, or stands twice in one row.
    """
    if a.shape[1] < 1:
        raise DataError("topk_overlap: got 0 ids a token, expected at least 1.")
    for ids in (a, b):
        if (ids < 0).any() or _num_repeats(ids).any():
            raise DataError("topk_overlap: got a negative id or one twice in one row, expected the ids of top_ids.")
    # Within a row ids are distinct, so in the two rows together a repeat is an id of both.
    return _num_repeats(torch.cat([a, b], dim=1)) / a.shape[1]


def tail_share(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> TailShare:
    """What the last cell carries of `bucket_divergence`, and the whole, summed over the tokens in float64."""
    _check_alpha(alpha)
    _check_mass(student_logp, teacher_logp)
    _check_finite_kl(student_logp, teacher_logp, alpha=alpha)
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


def _renormalised(logp: Float[Tensor, "token k"]) -> Float[Tensor, "token k"]:
    """Log-probabilities within the cells, -inf staying -inf with gradient 0; a row of nothing but padding stays so."""
    is_empty = logp.detach() == -torch.inf
    is_void = is_empty.all(dim=1, keepdim=True)
    # log-softmax of nothing is NaN: such rows get a filler first and lose it afterwards.
    return logp.masked_fill(is_void, 0.0).log_softmax(dim=1).masked_fill(is_empty, -torch.inf)


def _num_repeats(ids: Int[Tensor, "token k"]) -> Int[Tensor, " token"]:
    ordered = ids.sort(dim=1).values
    return (ordered[:, 1:] == ordered[:, :-1]).sum(dim=1)


def _check_alpha(alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise SpecError(f"divergence: got alpha {alpha}, expected 0 to 1.")


def _check_mass(student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"]) -> None:
    for side, table in (("student", student_logp), ("teacher", teacher_logp)):
        mass = table.detach().exp().sum(dim=1)
        # Written so that NaN fails too.
        is_whole = (mass - 1.0).abs() <= MASS_TOLERANCE
        if not is_whole.all():
            row = int((~is_whole).nonzero()[0])
            raise DataError(
                f"divergence: got mass {float(mass[row]):.6f} in {side} row {row}, expected 1. "
                "Pass full-vocabulary log-probabilities with the tail, of response tokens only."
            )


def _check_both_have_mass(student_logp: Float[Tensor, "token k"], teacher_logp: Float[Tensor, "token k"]) -> None:
    is_void, is_other_void = ((logp == -torch.inf).all(dim=1) for logp in (student_logp, teacher_logp))
    if (is_void != is_other_void).any():
        row = int((is_void != is_other_void).nonzero()[0])
        raise DataError(
            f"divergence: got no mass on the ids of row {row} from the {'student' if is_void[row] else 'teacher'} "
            "alone, expected some to renormalise. Check that both sides exclude the same columns."
        )


def _check_finite_kl(
    student_logp: Float[Tensor, "token cell"], teacher_logp: Float[Tensor, "token cell"], *, alpha: float
) -> None:
    if 0.0 < alpha < 1.0:
        return
    weighing, other = (teacher_logp, student_logp) if alpha == 0.0 else (student_logp, teacher_logp)
    is_infinite = (weighing != -torch.inf) & (other == -torch.inf)
    if is_infinite.any():
        row, cell = (int(place) for place in is_infinite.nonzero()[0])
        raise DataError(
            f"divergence: got an infinite KL at alpha {alpha} in row {row}, cell {cell}, expected no cell that is "
            "empty on one side only. Check that both sides exclude the same columns."
        )
