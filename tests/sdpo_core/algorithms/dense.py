"""Given weights in float64, and losses on them whose gradients are written down: what workers are held against."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sdpo_core.backends.base import TokenRow
from tests.oracles import distributions, policy
from tests.sdpo_core.micro import Base, load_model

# Gradients of float32 workers against float64 oracles: share of a parameter's largest entry.
GRADIENT_TOLERANCE = 3e-5
TEMPERATURE = 0.8
VOCAB = 259


@cache
def _double_model(folder: Path) -> PreTrainedModel:
    return load_model(folder, dtype=torch.float64).model


class DenseModel:
    """Given weights in float64, run row by row without cache: what workers are held against."""

    def __init__(self, base: Base, weights: Mapping[str, Tensor]) -> None:
        self.model = copy.deepcopy(_double_model(base.folder))
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)

    def states(self, row: TokenRow) -> Tensor:
        """[token, hidden] the states that predict the response."""
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        states: Tensor = self.model.model(input_ids=ids).last_hidden_state[0]
        first = len(row.prompt_ids) - 1
        return states[first : first + len(row.response_ids)]

    def logits(self, row: TokenRow) -> Tensor:
        head: Tensor = self.model.get_output_embeddings().weight
        return self.states(row) @ head[:VOCAB].T

    def logps(self, row: TokenRow, *, temperature: float = TEMPERATURE) -> Tensor:
        """[token, vocabulary] log-probabilities, with gradient."""
        return (self.logits(row) / temperature).log_softmax(dim=1)

    def own_logps(self, row: TokenRow, *, temperature: float = TEMPERATURE) -> Tensor:
        """[token] of the response's own tokens."""
        return self.logps(row, temperature=temperature).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]

    def own(self, row: TokenRow) -> list[float]:
        with torch.no_grad():
            values: list[float] = self.own_logps(row).tolist()
        return values

    def masses(self, row: TokenRow) -> list[list[float]]:
        """[token, vocabulary] probabilities, as numbers."""
        with torch.no_grad():
            values: list[list[float]] = self.logps(row).exp().tolist()
        return values

    def best_ids(self, row: TokenRow, *, k: int) -> list[list[int]]:
        return [distributions.ranked_ids(masses, k=k) for masses in self.masses(row)]

    def gradients(self, loss: Tensor, *, also: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Of every parameter, and of the named tensors beside them."""
        named = {**dict(self.model.named_parameters()), **(also or {})}
        return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def assert_gradients(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal but for the rounding of float32, parameter by parameter, and none of them zero."""
    for name, slope in expected.items():
        size = float(slope.abs().max())
        assert size > 1e-6, name
        atol = GRADIENT_TOLERANCE * size
        torch.testing.assert_close(found[name].double(), slope.double(), rtol=0, atol=atol, msg=name)


def clipped(
    now: Sequence[float],
    before: Sequence[float],
    gains: Sequence[float],
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[list[float], list[float]]:
    """The clipped surrogate of each token of a row and its slope, by the oracle."""
    triples = list(zip(now, before, gains, strict=True))
    losses = [policy.surrogate(*triple, low=low, high=high, dual_clip=dual_clip) for triple in triples]
    slopes = [policy.surrogate_slope(*triple, low=low, high=high, dual_clip=dual_clip) for triple in triples]
    return losses, slopes


def weighed(slopes: Sequence[float], values: Tensor) -> Tensor:
    """A number whose gradient in each value is the slope."""
    return (torch.tensor(slopes, dtype=torch.float64) * values).sum()


def divergence_terms(
    logps: Tensor, teacher: Sequence[Sequence[float]], ids: Sequence[Sequence[int]] | None, **settings: Any
) -> tuple[Tensor, list[float]]:
    """`cell_terms` from whole distributions, at the ids and the tail; `ids` None: every id is a cell."""
    if ids is None:
        return cell_terms(logps.exp(), teacher, **settings)
    others = [distributions.cell_masses(masses, chosen) for masses, chosen in zip(teacher, ids, strict=True)]
    return cell_terms(cells_at(logps, ids), others, **settings)


def cells_at(logps: Tensor, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each token, the masses of the ids and of all others, with gradient."""
    kept = [token.exp()[list(chosen)] for token, chosen in zip(logps, ids, strict=True)]
    return [torch.cat([token, 1 - token.sum(dim=0, keepdim=True)]) for token in kept]


def cell_terms(
    student: Sequence[Tensor] | Tensor,
    teacher: Sequence[Sequence[float]],
    *,
    alpha: float,
    truncation: str = "tail",
    entry_clip: float | None = None,
) -> tuple[Tensor, list[float]]:
    """Of each token of a row: a number with the gradient of the divergence, and the divergence itself.

    By the closed form of the slopes in the cells' log-probabilities.
    """
    terms, values = [], []
    for p, q in zip(student, teacher, strict=True):
        settings: dict[str, Any] = {"alpha": alpha, "truncation": truncation, "entry_clip": entry_clip}
        values.append(distributions.support_divergence(p.tolist(), q, **settings))
        terms.append(weighed(distributions.support_divergence_gradient(p.tolist(), q, **settings), p.log()))
    return torch.stack(terms), values
