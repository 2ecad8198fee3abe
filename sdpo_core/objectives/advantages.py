"""Advantages of a group's rollouts from their scores."""

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import DataError

# Keeps the quotient finite in a group of equal scores. Value of the reference implementation.
STD_FLOOR = 1e-6


def group_advantages(scores: Float[Tensor, "group rollout"], *, normalise_std: bool) -> Float[Tensor, "group rollout"]:
    """Score minus the group's mean, exactly 0 throughout a group of equal scores, without gradient.

    Source: notation.md, "Advantage".

    Args:
        scores: [group, rollout] one row for each problem.
        normalise_std: also divide by the group's sample standard deviation (n - 1 in its denominator) + 1e-6.

    Raises:
        DataError: a score is not finite, or a standard deviation of fewer than 2 rollouts is asked for.
    """
    if not torch.isfinite(scores).all():
        raise DataError("group_advantages: got a score that is not finite, expected numbers. Check the grader.")
    # Shifted by the first score: the mean of equal float32 scores may differ from them by a rounding error, which the
    # division by a deviation of the same size would blow up.
    shifted = scores.detach() - scores.detach()[:, :1]
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    if not normalise_std:
        return centred
    if scores.shape[1] < 2:
        raise DataError(
            f"group_advantages: got {scores.shape[1]} rollout a group, expected at least 2 for a standard deviation. "
            "Sample more rollouts or turn normalise_std off."
        )
    return centred / (centred.std(dim=1, keepdim=True, correction=1) + STD_FLOOR)
