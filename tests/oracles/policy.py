"""Advantage, surrogate and weights from their definitions, on Python floats (float64)."""

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction


def advantages(scores: Sequence[float], *, normalise_std: bool) -> list[float]:
    """Score minus mean, optionally over the sample standard deviation + 1e-6."""
    mean = math.fsum(scores) / len(scores)
    scale = statistics.stdev(scores) + 1e-6 if normalise_std else 1.0
    return [(score - mean) / scale for score in scores]


def ratio(logp: float, old_logp: float) -> float:
    """p / p_old, its logarithm held within 20."""
    return math.exp(min(max(logp - old_logp, -20.0), 20.0))


def surrogate(
    logp: float, old_logp: float, advantage: float, *, low: float, high: float, dual_clip: float | None
) -> float:
    """The clipped surrogate by cases."""
    u = ratio(logp, old_logp)
    if advantage >= 0:
        return -advantage * min(u, 1 + high)
    size = -advantage * max(u, 1 - low)
    return size if dual_clip is None else min(size, -advantage * dual_clip)


def surrogate_slope(
    logp: float, old_logp: float, advantage: float, *, low: float, high: float, dual_clip: float | None
) -> float:
    """d surrogate / d logp: -A u where the ratio is free, 0 where it is held."""
    u = ratio(logp, old_logp)
    highest = 1 + high if advantage >= 0 else dual_clip or math.inf
    lowest = 0.0 if advantage >= 0 else 1 - low
    is_free = lowest <= u <= highest and abs(logp - old_logp) <= 20
    return -advantage * u if is_free else 0.0


def mean_loss(losses: Sequence[Sequence[float]], active: Sequence[bool], *, by_sequence: bool) -> Fraction:
    """The mean over the active sequences' tokens, or over their means, exactly."""
    kept = [[Fraction(loss) for loss in row] for row, is_active in zip(losses, active, strict=True) if is_active]
    if by_sequence:
        return sum((sum(row, Fraction(0)) / len(row) for row in kept), Fraction(0)) / len(kept)
    return sum((sum(row, Fraction(0)) for row in kept), Fraction(0)) / sum(len(row) for row in kept)
