"""Probabilities, cells and divergences from their definitions, on lists of Python floats (float64)."""

import math
from collections.abc import Callable, Sequence


def softmax(logits: Sequence[float], *, temperature: float) -> list[float]:
    """exp(z/T) over its sum."""
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def ranked_ids(logits: Sequence[float], *, k: int) -> list[int]:
    """The k best ids; of equals the lowest first."""
    return sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:k]


def cell_masses(probabilities: Sequence[float], ids: Sequence[int]) -> list[float]:
    """Masses of the ids, then of everything else, added up one token at a time."""
    rest = [mass for index, mass in enumerate(probabilities) if index not in ids]
    return [probabilities[index] for index in ids] + [math.fsum(rest)]


def kl(first: Sequence[float], second: Sequence[float]) -> float:
    """Sum of a log(a/b), with 0 log 0 = 0."""
    return math.fsum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)


def divergence(student: Sequence[float], teacher: Sequence[float], *, alpha: float) -> float:
    """KL(q||p) at 0, KL(p||q) at 1, and the two-sided divergence to the mixture between."""
    if alpha == 0:
        return kl(teacher, student)
    if alpha == 1:
        return kl(student, teacher)
    mixture = [(1 - alpha) * p + alpha * q for p, q in zip(student, teacher, strict=True)]
    return (1 - alpha) * kl(student, mixture) + alpha * kl(teacher, mixture)


def implied_advantage(p: float, q: float, *, alpha: float) -> float:
    """A of one cell: the gradient on the student's logit z_v is -p_v (A_v - sum p A)."""
    if alpha == 0:
        return q / p
    if alpha == 1:
        return math.log(q / p)
    return (1 - alpha) * math.log((1 - alpha) + alpha * q / p)


def divergence_gradient(
    student_logits: Sequence[float],
    teacher_logits: Sequence[float],
    ids: Sequence[int],
    *,
    alpha: float,
    temperature: float,
) -> list[float]:
    """Closed form of d divergence / d student logit; all tokens of the tail share the tail's advantage."""
    p = softmax(student_logits, temperature=temperature)
    student = cell_masses(p, ids)
    teacher = cell_masses(softmax(teacher_logits, temperature=temperature), ids)
    cells = [implied_advantage(a, b, alpha=alpha) if a > 0 else 0.0 for a, b in zip(student, teacher, strict=True)]
    mean = math.fsum(a * advantage for a, advantage in zip(student, cells, strict=True))
    by_token = [cells[ids.index(index)] if index in ids else cells[-1] for index in range(len(p))]
    return [-mass * (advantage - mean) / temperature for mass, advantage in zip(p, by_token, strict=True)]


def finite_differences(function: Callable[[list[float]], float], at: Sequence[float], *, step: float) -> list[float]:
    """Central differences of `function` in each coordinate."""
    slopes = []
    for index in range(len(at)):
        up, down = list(at), list(at)
        up[index] += step
        down[index] -= step
        slopes.append((function(up) - function(down)) / (2 * step))
    return slopes


def bregman_terms(student: Sequence[float], teacher: Sequence[float], *, alpha: float) -> list[float]:
    """Each cell's non-negative part: a log(a/b) - a + b for each KL the divergence is made of."""

    def term(a: float, b: float) -> float:
        return (a * math.log(a / b) if a > 0 else 0.0) - a + b

    pairs = list(zip(student, teacher, strict=True))
    if alpha == 0:
        return [term(q, p) for p, q in pairs]
    if alpha == 1:
        return [term(p, q) for p, q in pairs]
    mixed = [(p, q, (1 - alpha) * p + alpha * q) for p, q in pairs]
    return [(1 - alpha) * term(p, m) + alpha * term(q, m) for p, q, m in mixed]


def kept_masses(masses: Sequence[float], *, truncation: str) -> list[float]:
    """What a truncation leaves of a row, the tail last: all cells, the ids over their sum, or the ids as they are."""
    if truncation == "tail":
        return list(masses)
    total = math.fsum(masses[:-1])
    if truncation == "renormalised" and total > 0:
        return [mass / total for mass in masses[:-1]]
    return list(masses[:-1])


def support_divergence(
    student: Sequence[float],
    teacher: Sequence[float],
    *,
    alpha: float,
    truncation: str,
    entry_clip: float | None = None,
) -> float:
    """Sum of the kept cells' non-negative parts, each at most the clip."""
    p, q = (kept_masses(masses, truncation=truncation) for masses in (student, teacher))
    highest = math.inf if entry_clip is None else entry_clip
    return math.fsum(min(term, highest) for term in bregman_terms(p, q, alpha=alpha))


def support_divergence_gradient(
    student: Sequence[float],
    teacher: Sequence[float],
    *,
    alpha: float,
    truncation: str,
    entry_clip: float | None = None,
) -> list[float]:
    """d support_divergence / d log p of each cell, by hand: no gradient from a clipped cell, none for a dropped one."""

    def slope(p: float, q: float) -> float:
        if alpha == 0:
            return p - q
        other = q if alpha == 1 else (1 - alpha) * p + alpha * q
        return (1 if alpha == 1 else 1 - alpha) * p * math.log(p / other) if p > 0 else 0.0

    p, q = (kept_masses(masses, truncation=truncation) for masses in (student, teacher))
    highest = math.inf if entry_clip is None else entry_clip
    terms = bregman_terms(p, q, alpha=alpha)
    slopes = [slope(a, b) if term <= highest else 0.0 for a, b, term in zip(p, q, terms, strict=True)]
    if truncation == "renormalised":
        total = math.fsum(slopes)
        slopes = [part - mass * total for part, mass in zip(slopes, p, strict=True)]
    return slopes if truncation == "tail" else [*slopes, 0.0]
