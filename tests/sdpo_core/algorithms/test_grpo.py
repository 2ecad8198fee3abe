"""GRPO: batches and gradients against a float64 formula, on-policy and over several optimizer steps."""

import math

import pytest

from sdpo_core.backends.base import TrainRow
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.dense import clipped
from tests.sdpo_core.algorithms.groups import (
    assert_policy_step,
    by_response,
    make_setting,
    scores_of,
    sequence_mean,
    three_groups,
    token_mean,
)
from tests.sdpo_core.micro import Base


def advantages(groups: list[Group], *, normalise_std: bool) -> dict[tuple[int, ...], float]:
    """By the oracle, under each response."""
    values = [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=normalise_std)]
    return by_response(groups, values)


@pytest.mark.parametrize("normalise_std", [False, True])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_on_policy_gradient_is_the_policy_gradient(
    cell_spec: CellSpec, base: Base, normalise_std: bool, reduction: str
) -> None:
    """-mean of A log p, the group of equal scores in the denominator; the value is -mean A, since every ratio is 1."""
    setting = make_setting(cell_spec, base, arm="grpo", normalise_std=normalise_std, reduction=reduction)
    groups = three_groups(base)
    expected = advantages(groups, normalise_std=normalise_std)
    batch = setting.build(groups)
    (rows,) = batch.minibatches
    assert len(rows) == 12
    assert all(row.old_logps is None for row in rows)

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        each = [-expected[row.row.response_ids]] * len(now)
        return each, each

    weights = (token_mean if reduction == "token_mean" else sequence_mean)(rows)
    assert_policy_step(setting, batch, truth, weights=weights)


@pytest.mark.parametrize("dual_clip", [3.0, None])
def test_later_minibatches_are_off_policy_and_clipped(cell_spec: CellSpec, base: Base, dual_clip: float | None) -> None:
    """Three optimizer steps at a rate that moves ratios past the clips; old log-probabilities are those before all."""
    setting = make_setting(cell_spec, base, arm="grpo", minibatches=3, clip_high=0.25, dual_clip=dual_clip)
    groups = three_groups(base)
    expected, start = advantages(groups, normalise_std=False), setting.dense()
    batch = setting.build(groups)
    assert [len(rows) for rows in batch.minibatches] == [4, 4, 4]
    held, free, beyond = 0, 0, 0

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        nonlocal held, free, beyond
        before, advantage = start.own(row.row), expected[row.row.response_ids]
        assert row.old_logps is not None
        assert row.old_logps.tolist() == pytest.approx(before, abs=1e-5)
        losses, slopes = clipped(now, before, [advantage] * len(now), low=0.2, high=0.25, dual_clip=dual_clip)
        held += slopes.count(0.0) if advantage else 0
        free += sum(slope != 0 for slope in slopes)
        is_beyond = [new - old > math.log(3.0) for new, old in zip(now, before, strict=True)]
        beyond += sum(is_beyond) if advantage < 0 else 0
        return losses, slopes

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=token_mean(rows), minibatch=minibatch, learning_rate=4e-3)
    assert held >= 3
    assert free > 3
    assert beyond > 0


def test_batch_of_grpo_measures_nothing_of_its_own(cell_spec: CellSpec, base: Base) -> None:
    setting = make_setting(cell_spec, base, arm="grpo")
    groups = three_groups(base)
    batch = setting.build(groups)
    assert (batch.metrics, dict(batch.notes)) == ({}, {})
    stats = setting.update(batch)
    found = setting.arm.after_update([stats], tools=setting.tools())
    assert found == {"train/entropy": pytest.approx(stats.sums["entropy"] / 32)}
    assert setting.arm.after_update([], tools=setting.tools()) == {"train/entropy": None}
    assert setting.arm.accepts(groups[1], tools=setting.tools()) is True


def test_entropy_is_that_of_the_student_over_the_trained_tokens(cell_spec: CellSpec, base: Base) -> None:
    setting = make_setting(cell_spec, base, arm="grpo")
    batch, dense = setting.build(three_groups(base)), setting.dense()
    expected = [
        -sum(mass * math.log(mass) for mass in masses if mass)
        for row in batch.minibatches[0]
        for masses in dense.masses(row.row)
    ]
    assert setting.update(batch).sums["entropy"] == pytest.approx(sum(expected), rel=1e-5)
