"""Rows of all kinds through one update: split by their fields, cut into chunks of tokens, constants without a graph."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.algorithm_specs import DivergenceSpec
from sdpo_core.algorithms.objective import (
    ClippedSurrogate,
    DivergenceTerm,
    PolicyTerm,
    SampledKlTerm,
    SequenceSurrogate,
    TermSum,
    ValueTerm,
)
from sdpo_core.backends.base import TokenBatch, TokenLosses, TrainRow, WholeVocabulary
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.errors import DataError
from sdpo_core.objectives import chunk_reader
from sdpo_core.objectives.chunks import spare_width
from sdpo_core.specs import OptimizerSpec
from tests.sdpo_core.backends.test_hf import (
    TEMPERATURE,
    WeighedSurprise,
    assert_alike,
    gradient,
    make_policy,
    train_rows,
)
from tests.sdpo_core.micro import Base, load_model

# Seven float32 updates of one row each, added up: share of the largest entry.
ROUNDING_OF_SEVEN = 7e-6


class Watching:
    """An objective that keeps every batch it is shown."""

    def __init__(self, objective: TermSum) -> None:
        self._objective = objective
        self.seen: list[TokenBatch] = []

    @property
    def needs_whole_sequences(self) -> bool:
        return self._objective.needs_whole_sequences

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None:
        return self._objective.whole_vocabulary

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        self.seen.append(batch)
        return self._objective.token_losses(batch)


def full_rows(base: Base) -> tuple[list[TrainRow], ModelScorer]:
    """Rows with every field, of which a third has no teacher's states, and the teacher they are of."""
    rng = np.random.default_rng(7)
    scorer = ModelScorer([Part(model=load_model(base.folder), share=1.0)], temperature=TEMPERATURE, max_tokens=9999)
    rows = []
    for index, row in enumerate(train_rows()):
        size = len(row.row.response_ids)
        columns: dict[str, Any] = {
            name: rng.normal(-1, 0.1, size).astype(np.float32)
            for name in ("old_logps", "sampling_logps", "anchor_logps", "old_values", "returns")
        }
        if index % 3:
            columns["teacher_states"] = rng.normal(0, 1, (size, 32)).astype(np.float32)
            columns["teacher_own_logps"] = rng.normal(-1, 0.1, size).astype(np.float32)
        rows.append(replace(row, distill_weight=0.02 * (index % 3), task_advantage=1.0, **columns))
    return rows, scorer


WHOLE = DivergenceTerm(
    spec=DivergenceSpec(support="full", top_k=None, alpha=0.25, token_clip=0.5), importance_clip=2.0, rollout_cap=2.0
)
CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
OBJECTIVES = {
    "tokens": TermSum(
        terms=(
            PolicyTerm(surrogate=ClippedSurrogate(**CLIPS), rollout_cap=2.0),
            SampledKlTerm(coefficient=0.1, is_anchor=True),
            SampledKlTerm(coefficient=0.1, is_anchor=False),
            WHOLE,
        )
    ),
    "sequences": TermSum(terms=(PolicyTerm(surrogate=SequenceSurrogate(**CLIPS), rollout_cap=2.0), WHOLE)),
    "values": TermSum(terms=(ValueTerm(coefficient=0.5, clip=0.2), WHOLE)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_of_unlike_fields_are_split_by_kind(base: Base, name: str) -> None:
    """Contract 19: rows with and without a teacher give the sum of what each would give alone, in any order."""
    optimizer = OptimizerSpec(learning_rate=1e-2, max_grad_norm=1e6)
    rows, scorer = full_rows(base)

    def update(chosen: Sequence[TrainRow], *, max_tokens: int = 9999) -> tuple[float, dict[str, Tensor]]:
        policy = make_policy(base, optimizer=optimizer, max_tokens=max_tokens, has_value_head=name == "values")
        policy.hold_projection(scorer.projection())
        stats = policy.update(chosen, OBJECTIVES[name], learning_rate=1e-3)
        assert stats.sums["trained_tokens"] == sum(len(row.row.response_ids) for row in chosen)
        return stats.loss, gradient(policy)

    loss, slopes = update(rows)
    parts = [update([row]) for row in rows]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-5)
    total = {key: torch.stack([part[key] for _, part in parts]).sum(dim=0) for key in slopes}
    assert_alike(total, slopes, share=ROUNDING_OF_SEVEN)
    other, turned = update(rows[::-1], max_tokens=50)
    assert other == pytest.approx(loss, rel=1e-5)
    assert_alike(turned, slopes, share=ROUNDING_OF_SEVEN)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_chunks_of_tokens_change_nothing(base: Base, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 19: three tokens' logits at a time; an objective that needs whole sequences is shown them all."""
    optimizer = OptimizerSpec(learning_rate=1e-2, max_grad_norm=1e6)
    rows, scorer = full_rows(base)
    found = []
    for chunk in (chunk_reader.CHUNK_NUMBERS, 3 * 2 * spare_width(262)):
        monkeypatch.setattr(chunk_reader, "CHUNK_NUMBERS", chunk)
        policy = make_policy(base, optimizer=optimizer, has_value_head=name == "values")
        policy.hold_projection(scorer.projection())
        watching = Watching(OBJECTIVES[name])
        stats = policy.update(rows, watching, learning_rate=1e-3)
        found.append((stats, gradient(policy), max(len(batch.logp) for batch in watching.seen)))
    (one, whole, _), (many, parts, longest) = found
    assert (longest <= 6) == (name == "tokens")
    assert many.loss == pytest.approx(one.loss, abs=5e-8)
    assert dict(many.sums) == pytest.approx(dict(one.sums), rel=1e-6)
    assert_alike(parts, whole)


@pytest.mark.parametrize("is_on_policy", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_constants_of_a_batch_carry_no_graph(base: Base, name: str, is_on_policy: bool) -> None:
    """Contract 11: of what an objective sees only the student's own numbers of now have a gradient."""
    rows, scorer = full_rows(base)
    if is_on_policy:
        rows = [replace(row, old_logps=None) for row in rows]
    policy = make_policy(base, has_value_head=name == "values")
    policy.hold_projection(scorer.projection())
    watching = Watching(OBJECTIVES[name])
    policy.update(rows, watching, learning_rate=1e-3)
    assert len(watching.seen) == 2
    for batch in watching.seen:
        assert torch.equal(batch.old_logp, batch.logp) == is_on_policy
        trained = {
            field.name
            for field in fields(batch)
            if isinstance(value := getattr(batch, field.name), Tensor) and value.requires_grad
        }
        expected = {"logp"} | ({"divergence"} if batch.divergence is not None else set())
        assert trained == expected | ({"value"} if name == "values" else set())


def test_states_without_a_projection_are_refused(base: Base) -> None:
    """Contract 33: hidden states of a teacher say nothing without its head."""
    rows, scorer = full_rows(base)
    policy = make_policy(base)
    with pytest.raises(DataError, match="got a teacher's states without its projection"):
        policy.update(rows, OBJECTIVES["tokens"], learning_rate=1e-3)
    policy.hold_projection(scorer.projection())
    with pytest.raises(DataError, match="or without a divergence"):
        policy.update(rows, WeighedSurprise(), learning_rate=1e-3)
