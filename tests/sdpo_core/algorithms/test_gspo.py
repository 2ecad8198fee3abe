"""GSPO: one ratio a sequence, each token's own advantage under it, against the formula by cases."""

from typing import Any

import pytest

from sdpo_core.algorithm_specs import GspoSpec
from sdpo_core.backends.base import TrainRow
from sdpo_core.specs import CellSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.groups import (
    Setting,
    assert_policy_step,
    by_response,
    make_setting,
    scores_of,
    sequence_mean,
    three_groups,
)
from tests.sdpo_core.micro import ARMS, Base

CLIPS: dict[str, Any] = {"clip_low": 0.15, "clip_high": 0.1}


def run_steps(setting: Setting, base: Base, *, coefficient: float = 0.0) -> tuple[int, int, float]:
    """Two optimizer steps against the oracle: sequences held by the clip, free ones, spread of a row's advantages."""
    spec = setting.spec.algorithm
    assert isinstance(spec, GspoSpec)
    groups, start, teacher = three_groups(base), setting.dense(), setting.start()
    values = [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=True)]
    task = by_response(groups, values)
    batch = setting.build(groups)
    held, free, spread = 0, 0, 0.0

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        nonlocal held, free, spread
        before = start.own(row.row)
        taught = before if not coefficient else teacher.own(row.row)
        own = [
            task[row.row.response_ids] - coefficient * (old - other) for old, other in zip(before, taught, strict=True)
        ]
        losses, slopes = policy.sequence_surrogate(now, before, own, low=spec.clip_low, high=spec.clip_high)
        held += any(own) and not any(slopes)
        free += all(slopes)
        spread = max(spread, max(own) - min(own))
        return losses, slopes

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=sequence_mean(rows), minibatch=minibatch, learning_rate=3e-3)
    return held, free, spread


def test_gradient_is_that_of_the_sequence_ratio(cell_spec: CellSpec, base: Base) -> None:
    """Two mini-batches: in the second some sequences are held by the clip, whole, and others are free."""
    held, free, spread = run_steps(make_setting(cell_spec, base, arm="gspo", minibatches=2, **CLIPS), base)
    assert held >= 1
    assert free >= 3
    assert spread == 0


def test_distillation_keeps_its_tokens_under_a_sequence_ratio(cell_spec: CellSpec, base: Base) -> None:
    """Contract 15: each token's slope is its own log-ratio's, not the sequence's mean."""
    opd = {**ARMS["opd"]["opd"], "only": False, "coefficient": 2.0}
    setting = make_setting(cell_spec, base, arm="gspo", minibatches=2, is_moved=True, opd=opd, **CLIPS)
    _, free, spread = run_steps(setting, base, coefficient=2.0)
    assert free >= 3
    assert spread > 0.1


def test_sequences_are_never_cut_into_parts(cell_spec: CellSpec, base: Base) -> None:
    """Contract 19: a micro-batch holds whole responses, so its size changes neither loss nor gradient."""
    stats = []
    for budget in (1, 600):
        setting = make_setting(cell_spec, base, arm="gspo", minibatches=2, training={"microbatch_tokens": budget})
        batch = setting.build(three_groups(base))
        assert batch.objective.needs_whole_sequences
        setting.update(batch, minibatch=0, learning_rate=3e-3)
        stats.append(setting.update(batch, minibatch=1))
    assert stats[0].loss == pytest.approx(stats[1].loss, rel=1e-4)
    assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-4)
