"""Advantage, surrogate and weights from their definitions, on Python floats (float64)."""

import math
import statistics
from collections.abc import Sequence
from decimal import Decimal, localcontext
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


def mean_loss(losses: Sequence[Sequence[float]], active: Sequence[bool], *, reduction: str) -> Fraction:
    """The mean over the active sequences' tokens, over their means, or of their means over all sequences, exactly."""
    kept = [[Fraction(loss) for loss in row] for row, is_active in zip(losses, active, strict=True) if is_active]
    if reduction != "token_mean":
        number = len(losses) if reduction == "sequence_mean_of_all" else len(kept)
        return sum((sum(row, Fraction(0)) / len(row) for row in kept), Fraction(0)) / number
    return sum((sum(row, Fraction(0)) for row in kept), Fraction(0)) / sum(len(row) for row in kept)


def sequence_surrogate(
    logp: Sequence[float], old_logp: Sequence[float], advantage: Sequence[float], *, low: float, high: float
) -> tuple[list[float], list[float]]:
    """Token losses of one sequence under its geometric mean ratio, and their slopes in the tokens' own logp."""
    s = math.exp(
        min(max(math.fsum(new - old for new, old in zip(logp, old_logp, strict=True)) / len(logp), -20.0), 20.0)
    )
    losses, slopes = [], []
    for gain in advantage:
        is_held = s > 1 + high if gain >= 0 else s < 1 - low
        losses.append(-gain * ((1 + high if gain >= 0 else 1 - low) if is_held else s))
        slopes.append(0.0 if is_held else -gain * s)
    return losses, slopes


def soft_gate(logp: float, old_logp: float, advantage: float, *, temperature: float) -> float:
    """-A (4 / tau) / (1 + exp(-tau (u - 1)))."""
    exponent = -temperature * (ratio(logp, old_logp) - 1)
    return -advantage * 4 / temperature / (1 + math.exp(exponent)) if exponent < 700 else 0.0


def soft_gate_slope(logp: float, old_logp: float, advantage: float, *, temperature: float) -> float:
    """-A u / cosh(tau (u - 1) / 2)^2: 4 s (1 - s) of the sigmoid written with exponentials of both signs."""
    u = ratio(logp, old_logp)
    half = temperature * (u - 1) / 2
    is_free = abs(logp - old_logp) <= 20 and abs(half) < 350
    return -advantage * u / math.cosh(half) ** 2 if is_free else 0.0


def kl_estimates(logp: float, reference_logp: float) -> tuple[float, float, float]:
    """r, r^2 / 2 and e^-r - 1 + r with 50 digits, since its parts cancel; the exponent held at 20."""
    with localcontext(prec=50):
        r = Decimal(logp) - Decimal(reference_logp)
        k3 = min(-r, Decimal(20)).exp() - 1 + r
    return float(r), float(r) ** 2 / 2, float(k3)


def value_loss(value: float, old_value: float, target: float, *, clip: float | None) -> tuple[float, float]:
    """The loss by cases, and its slope in the value."""
    free = (value - target) ** 2 / 2
    if clip is None or abs(value - old_value) <= clip:
        return free, value - target
    held = (old_value + math.copysign(clip, value - old_value) - target) ** 2 / 2
    return (held, 0.0) if held > free else (free, value - target)
