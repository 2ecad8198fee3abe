"""Cases of the fused head: random weights with what the oracle says of them, the same for every process of a group."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates
from tests.oracles import head as oracle

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, settings and numbers; the loss weighs every number of the tables with weights of its own."""

    tokens: int = 7
    vocab: int = 11
    padded: int = 11
    width: int = 3
    top_k: int = 0
    support: list[list[int]] | None = None
    best: int = 0
    has_entropy: bool = False
    has_teacher: bool = False
    full: FullDivergence | None = None
    temperature: float = 0.8
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None
    spread: float = 1.0
    seed: int = 0
    numbers: dict[str, Array] = field(default_factory=dict)

    def filled(self) -> "Case":
        """With its random numbers drawn."""
        rng = np.random.default_rng(self.seed)
        cells = (self.top_k or len((self.support or [[]])[0])) + 1
        shapes = {
            "hidden": (self.tokens, self.width),
            "weight": (self.padded, self.width),
            "bias": (self.padded,),
            "teacher_hidden": (self.tokens, self.width + 1),
            "teacher_weight": (self.padded, self.width + 1),
            "on_logp": (self.tokens,),
            "on_cells": (self.tokens, cells),
            "on_entropy": (self.tokens,),
            "on_divergence": (self.tokens,),
        }
        numbers: dict[str, Array] = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        numbers["hidden"] *= self.spread
        # What padding rows hold must not matter.
        for name in ("weight", "bias", "teacher_weight"):
            numbers[name][self.vocab :] = np.nan
        numbers["own"] = rng.integers(self.vocab, size=self.tokens)
        return replace(self, numbers=numbers)

    @property
    def has_support(self) -> bool:
        return self.support is not None or self.top_k > 0

    def oracle_tables(self, hidden: Array, weight: Array, bias: Array) -> dict[str, Any]:
        """Every table as the definitions give it; `hidden`, `weight`, `bias` may be complex."""
        z = oracle.logits(
            hidden,
            weight,
            vocab=self.vocab,
            temperature=self.temperature,
            bias=bias if self.bias else None,
            scale=self.scale,
            cap=self.cap,
        )
        p = oracle.logp(z)
        teacher = oracle.logits(
            self.numbers["teacher_hidden"],
            self.numbers["teacher_weight"],
            vocab=self.vocab,
            temperature=self.temperature,
        )
        q = oracle.logp(teacher)
        found: dict[str, Any] = {"logp": p[np.arange(self.tokens), self.numbers["own"]]}
        if self.has_support:
            ids = self.support if self.support is not None else oracle.ranked_ids(z, k=self.top_k)
            found |= {"support_ids": ids, "support_logp": oracle.cells(p, ids)}
            if self.best:
                found["best_ids"] = oracle.ranked_ids(z, k=self.best)
            if self.has_teacher or self.full:
                found["teacher_logp"] = oracle.cells(q, ids)
        if self.has_entropy:
            found["entropy"] = oracle.entropy(p)
        if self.full is not None:
            found["divergence"] = oracle.divergence(p, q, alpha=self.full.alpha, clip=self.full.entry_clip)
        return found

    def oracle_loss(self, hidden: Array, weight: Array, bias: Array) -> Any:
        """The weighted sum of all numbers that are not -inf."""
        found = self.oracle_tables(hidden, weight, bias)
        total = (self.numbers["on_logp"] * found["logp"]).sum()
        if "support_logp" in found:
            is_empty = np.isneginf(found["support_logp"].real)
            total += (self.numbers["on_cells"] * np.where(is_empty, 0, found["support_logp"])).sum()
        for name in ("entropy", "divergence"):
            if name in found:
                total += (self.numbers[f"on_{name}"] * found[name]).sum()
        return total

    def oracle_gradients(self) -> dict[str, Array]:
        """Slopes of the loss at hidden states, weight and bias; padding rows have slope 0."""
        numbers = {name: self.numbers[name] for name in ("hidden", "weight", "bias")}

        def slopes(name: str) -> Array:
            return oracle.slopes(lambda moved: self.oracle_loss(**{**numbers, name: moved}), numbers[name])

        return {name: slopes(name) for name in numbers}

    def head(self, *, dtype: torch.dtype = torch.float64, group: ProcessGroup | None = None) -> Head:
        """The student's head, or this process's share of it; weight and bias are leaves with gradient."""
        return Head(
            weight=self.tensor("weight", dtype=dtype, group=group).requires_grad_(),
            bias=self.tensor("bias", dtype=dtype, group=group).requires_grad_() if self.bias else None,
            temperature=self.temperature,
            vocab=self.vocab,
            logit_scale=self.scale,
            soft_cap=self.cap,
            group=group,
        )

    def request(self, *, dtype: torch.dtype = torch.float64, group: ProcessGroup | None = None) -> TableRequest:
        teacher = TeacherStates(
            hidden=self.tensor("teacher_hidden", dtype=dtype),
            head=Head(
                weight=self.tensor("teacher_weight", dtype=dtype, group=group),
                temperature=self.temperature,
                vocab=self.vocab,
                group=group,
            ),
        )
        return TableRequest(
            own_ids=torch.from_numpy(self.numbers["own"]),
            support_ids=None if self.support is None else torch.tensor(self.support),
            top_k=self.top_k or self.best,
            entropy=self.has_entropy,
            teacher=teacher if self.has_teacher or self.full else None,
            full=self.full,
        )

    def loss(self, tables: Tables, rows: slice) -> Tensor:
        """`oracle_loss` of some rows."""
        on = {
            name: self.tensor(f"on_{name}", dtype=tables.logp.dtype)[rows]
            for name in ("logp", "cells", "entropy", "divergence")
        }
        total = (on["logp"] * tables.logp).sum()
        if tables.support_logp is not None:
            total = (
                total + (on["cells"] * tables.support_logp.masked_fill(tables.support_logp == -torch.inf, 0.0)).sum()
            )
        if tables.entropy is not None:
            total = total + (on["entropy"] * tables.entropy).sum()
        if tables.divergence is not None:
            total = total + (on["divergence"] * tables.divergence).sum()
        return total

    def tensor(self, name: str, *, dtype: torch.dtype = torch.float64, group: ProcessGroup | None = None) -> Tensor:
        """Numbers as a tensor, or this process's share of them."""
        whole = torch.from_numpy(self.numbers[name]).to(dtype)
        if group is None:
            return whole
        return whole.view(group.size(), -1, *whole.shape[1:])[group.rank()].clone()


def agree(found: Tensor | None, expected: object, *, relative: float) -> None:
    """Equal within `relative` of the largest finite expected number; -inf where -inf is expected."""
    assert found is not None
    wanted = torch.tensor(np.asarray(expected))
    is_number = wanted != -torch.inf
    assert torch.equal(found != -torch.inf, is_number)
    scale = max(1.0, float(wanted[is_number].abs().max())) if is_number.any() else 1.0
    assert (found.double() - wanted)[is_number].abs().le(relative * scale).all()


def agree_all(found: Tables, expected: dict[str, object], *, relative: float) -> None:
    """Every table is there exactly when it is expected, and as expected."""
    for name in Tables.__slots__:
        value = getattr(found, name)
        if name.endswith("_ids") and value is not None:
            assert value.tolist() == expected[name]
        elif name in expected:
            agree(value, expected[name], relative=relative)
        else:
            assert value is None
