"""Advantages: of a group's rollouts from their scores, of a sequence's tokens from rewards and values.

Nothing here carries a gradient. Source: notation.md, "Advantage". Functions of all tokens of a step take sequences one
behind the other, `lengths` saying where each ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.inputs import check_finite, check_lengths

# Keeps the quotient finite in a group of equal scores. Value of the reference implementation.
STD_FLOOR = 1e-6

# Added to the variance by `whiten`, as in the usual implementations: values that agree but for float32 residues of
# 1e-7 come out at 1e-3, not at 1.
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneralisedAdvantages:
    """Advantage of each token, and the return its value is trained towards: advantage + value."""

    advantages: Float[Tensor, " token"]
    returns: Float[Tensor, " token"]


def group_advantages(scores: Float[Tensor, "group rollout"], *, normalise_std: bool) -> Float[Tensor, "group rollout"]:
    """Score minus the group's mean, exactly 0 throughout a group of equal scores, without gradient.

    Source: notation.md, "Advantage".

    Args:
        scores: [group, rollout] one row for each problem.
        normalise_std: also divide by the group's sample standard deviation (n - 1 in its denominator) + 1e-6.

    Raises:
        DataError: a score is not finite, or a standard deviation of fewer than 2 rollouts is asked for.
    """
    centred = _centred(scores, where="group_advantages")
    if not normalise_std:
        return centred
    if scores.shape[1] < 2:
        raise DataError(
            f"group_advantages: got {scores.shape[1]} rollout a group, expected at least 2 for a standard deviation. "
            "Sample more rollouts or turn normalise_std off."
        )
    return centred / (centred.std(dim=1, keepdim=True, correction=1) + STD_FLOOR)


def leave_one_out_advantages(scores: Float[Tensor, "group rollout"]) -> Float[Tensor, "group rollout"]:
    """Score minus the mean of the group's other rollouts, exactly 0 throughout a group of equal scores.

    The baseline does not depend on the rollout's own score, so the policy gradient stays unbiased.

    Raises:
        DataError: a score is not finite, or a group has fewer than 2 rollouts.
    """
    size = scores.shape[1]
    if size < 2:
        raise DataError(
            f"leave_one_out_advantages: got {size} rollout a group, expected at least 2. Sample more rollouts."
        )
    # r - (sum - r) / (G - 1) = (r - mean) G / (G - 1)
    return _centred(scores, where="leave_one_out_advantages") * (size / (size - 1))


def whiten(values: Float[Tensor, " token"], *, shift_mean: bool = True) -> Float[Tensor, " token"]:
    """Values over their standard deviation, of mean 0 (or of the mean they had, without `shift_mean`).

    Pass the tokens of all sequences of the step: mean and deviation are those of the call. Whiten the task's advantage
    alone and add other terms afterwards, or their coefficients lose their meaning. Equal values, and a single one, give
    exactly 0 (their mean).

    Raises:
        DataError: a value is not finite.
    """
    check_finite({"values": values}, where="whiten")
    if not len(values):
        return values.detach().clone()
    exact = values.detach().double()
    # Shifted by the first value, so that equal values leave no residue.
    shifted = exact - exact[0]
    offset = shifted.mean()
    centred = shifted - offset
    variance = centred.square().sum() / max(len(values) - 1, 1)
    scaled = centred / (variance + VARIANCE_FLOOR).sqrt()
    return (scaled if shift_mean else scaled + offset + exact[0]).to(values.dtype)


def discounted_returns(
    rewards: Float[Tensor, " token"], lengths: Sequence[int], *, discount: float
) -> Float[Tensor, " token"]:
    """Sum of a token's reward and the discounted rewards after it in its own sequence.

    R_t = sum over t' >= t of discount^(t' - t) r_t'. Discount 0 leaves the rewards; 1 sums to the end.

    Args:
        rewards: [token] the sequences one behind the other.
        lengths: tokens of each sequence.
        discount: in [0, 1].

    Raises:
        SpecError: discount out of range.
        DataError: lengths do not add up to the tokens, or a reward is not finite.
    """
    _check_fractions({"discount": discount}, where="discounted_returns")
    check_lengths(len(rewards), lengths, where="discounted_returns")
    check_finite({"rewards": rewards}, where="discounted_returns")
    exact = rewards.detach().double()
    return _sum_backwards(exact, lengths, decay=discount).to(rewards.dtype)


def generalised_advantages(
    rewards: Float[Tensor, " token"],
    values: Float[Tensor, " token"],
    lengths: Sequence[int],
    *,
    discount: float,
    trace_decay: float,
) -> GeneralisedAdvantages:
    """Generalised advantage estimates of each sequence; the value after its last token is 0.

    A_t = sum over t' >= t of (discount trace_decay)^(t' - t) (r_t' + discount b_{t'+1} - b_t'), b the values.

    Args:
        rewards: [token] the sequences one behind the other.
        values: [token] value of the state in which the token was chosen.
        lengths: tokens of each sequence.
        discount: in [0, 1].
        trace_decay: in [0, 1]; 0 is one step of lookahead, 1 the return minus the value.

    Raises:
        SpecError: discount or trace_decay out of range.
        DataError: lengths do not add up to the tokens, or a number is not finite.
    """
    where = "generalised_advantages"
    _check_fractions({"discount": discount, "trace_decay": trace_decay}, where=where)
    check_lengths(len(rewards), lengths, where=where)
    check_finite({"rewards": rewards, "values": values}, where=where)
    exact, value = rewards.detach().double(), values.detach().double()
    following = torch.zeros_like(value)
    following[:-1] = value[1:]
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    following[ends[ends > 0] - 1] = 0.0
    surprise = exact + discount * following - value
    advantages = _sum_backwards(surprise, lengths, decay=discount * trace_decay)
    return GeneralisedAdvantages(
        advantages=advantages.to(rewards.dtype), returns=(advantages + value).to(rewards.dtype)
    )


def _centred(scores: Float[Tensor, "group rollout"], *, where: str) -> Float[Tensor, "group rollout"]:
    if not torch.isfinite(scores).all():
        raise DataError(f"{where}: got a score that is not finite, expected numbers. Check the grader.")
    # Shifted by the first score: the mean of equal float32 scores may differ from them by a rounding error, which the
    # division by a deviation of the same size would blow up.
    shifted = scores.detach() - scores.detach()[:, :1]
    return shifted - shifted.mean(dim=1, keepdim=True)


def _sum_backwards(values: Float[Tensor, " token"], lengths: Sequence[int], *, decay: float) -> Float[Tensor, " token"]:
    """S_t = v_t + decay S_{t+1} within each sequence, one step for all sequences at a time."""
    if not len(values):
        return values.clone()
    # The zeros behind a shorter sequence leave its sum at 0 until its last token is reached.
    columns = pad_sequence(list(torch.split(values, list(lengths))))
    total = torch.zeros_like(columns[0])
    for row in reversed(range(len(columns))):
        total = columns[row] + decay * total
        columns[row] = total
    return torch.cat([columns[:length, place] for place, length in enumerate(lengths)])


def _check_fractions(fractions: Mapping[str, float], *, where: str) -> None:
    for name, fraction in fractions.items():
        if not 0.0 <= fraction <= 1.0:
            raise SpecError(f"{where}: got {name} {fraction}, expected 0 to 1.")
