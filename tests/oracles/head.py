"""Numbers of a head's distribution from their definitions, on whole logits in float64, and slopes by the complex step.

Every function takes complex arrays as well: f(x + ih) has the slope times h as its imaginary part, without the
cancellation of a difference, so slopes are exact to float64's rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def logits(
    hidden: Array,
    weight: Array,
    *,
    vocab: int,
    temperature: float,
    bias: Array | None = None,
    scale: float = 1.0,
    cap: float | None = None,
) -> Array:
    """[token, vocab]: cap * tanh(scale (h W^T + b) / cap) / T over the valid ids."""
    z = hidden @ weight[:vocab].T
    z = scale * (z if bias is None else z + bias[:vocab])
    if cap is not None:
        z = cap * np.tanh(z / cap)
    scaled: Array = z / temperature
    return scaled


def logp(z: Array) -> Array:
    """z less the logarithm of the sum of its exponentials, of each row."""
    z = z - z.real.max(axis=1, keepdims=True)
    result: Array = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return result


def ranked_ids(z: Array, *, k: int) -> list[list[int]]:
    """The k best ids of each row; of equals the lowest first."""
    return [sorted(range(len(row)), key=lambda index: (-row[index].real, index))[:k] for row in z]


def cells(log_p: Array, ids: Sequence[Sequence[int]]) -> Array:
    """[token, k + 1]: log-probabilities of the ids (-1: an empty cell), then of everything else added up."""
    table = np.full((len(log_p), len(ids[0]) + 1), -np.inf, dtype=log_p.dtype)
    for row, kept in enumerate(ids):
        for cell, index in enumerate(kept):
            if index >= 0:
                table[row, cell] = log_p[row, index]
        rest = [index for index in range(log_p.shape[1]) if index not in kept]
        if rest:
            highest = log_p[row, rest].real.max()
            table[row, -1] = highest + np.log(np.exp(log_p[row, rest] - highest).sum())
    return table


def entropy(log_p: Array) -> Array:
    """[token]: minus the sum of p log p."""
    result: Array = -(np.exp(log_p) * log_p).sum(axis=1)
    return result


def divergence(log_p: Array, log_q: Array, *, alpha: float, clip: float | None = None) -> Array:
    """[token]: over the whole vocabulary, each entry's term held at the clip.

    The term is q log(q/p) - q + p at 0, p log(p/q) - p + q at 1, (1-a) p log(p/m) + a q log(q/m) between.
    """
    p, q = np.exp(log_p), np.exp(log_q)
    if alpha == 0:
        terms = q * (log_q - log_p) - q + p
    elif alpha == 1:
        terms = p * (log_p - log_q) - p + q
    else:
        log_m = np.log((1 - alpha) * p + alpha * q)
        terms = (1 - alpha) * p * (log_p - log_m) + alpha * q * (log_q - log_m)
    if clip is not None:
        terms = np.where(terms.real > clip, clip, terms)
    total: Array = terms.sum(axis=1)
    return total


def slopes(function: Callable[[Array], Any], at: Array, *, step: float = 1e-30) -> Array:
    """The gradient of a real function that takes complex arrays, one coordinate at a time."""
    result = np.zeros(at.shape)
    for place in np.ndindex(at.shape):
        moved = at.astype(complex)
        moved[place] += 1j * step
        result[place] = function(moved).imag / step
    return result
