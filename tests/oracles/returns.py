"""Baselines, returns and advantages of sequences from their sums, on Python floats (float64)."""

import math
import statistics
from collections.abc import Sequence


def leave_one_out(scores: Sequence[float]) -> list[float]:
    """Each score minus the mean of the others."""
    others = [[other for place, other in enumerate(scores) if place != index] for index in range(len(scores))]
    return [score - math.fsum(rest) / len(rest) for score, rest in zip(scores, others, strict=True)]


def whitened(values: Sequence[float], *, shift_mean: bool) -> list[float]:
    """Value minus mean over the root of (sample variance + 1e-8), the mean added again without `shift_mean`."""
    mean = statistics.fmean(values)
    scale = math.sqrt((statistics.variance(values) if len(values) > 1 else 0.0) + 1e-8)
    return [(value - mean) / scale + (0.0 if shift_mean else mean) for value in values]


def split(values: Sequence[float], lengths: Sequence[int]) -> list[list[float]]:
    """The sequences of a flat list."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return [list(values[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


def returns(rewards: Sequence[float], *, discount: float) -> list[float]:
    """The double sum of one sequence, term by term."""
    size = len(rewards)
    return [
        math.fsum(discount ** (later - token) * rewards[later] for later in range(token, size)) for token in range(size)
    ]


def generalised_advantages(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, trace_decay: float
) -> list[float]:
    """Mean of the n-step advantages of one sequence with weights (1 - l) l^(n-1), the rest of the weight on the last.

    Another way to the same number than the sum of discounted surprises.
    """
    size = len(rewards)

    def n_step(token: int, n: int) -> float:
        collected = [discount**step * rewards[token + step] for step in range(n)]
        end = [discount**n * values[token + n]] if token + n < size else []
        return math.fsum([*collected, *end, -values[token]])

    results = []
    for token in range(size):
        left = size - token
        weights = [(1 - trace_decay) * trace_decay ** (n - 1) for n in range(1, left)] + [trace_decay ** (left - 1)]
        results.append(math.fsum(weight * n_step(token, n) for n, weight in enumerate(weights, start=1)))
    return results
