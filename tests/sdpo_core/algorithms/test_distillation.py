"""On-policy distillation: divergences of whole distributions under the plain prompt, and nothing else that is seen."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sdpo_core.backends.base import TrainRow
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.dense import DenseModel, clipped, divergence_terms, weighed
from tests.sdpo_core.algorithms.groups import (
    RowLoss,
    Setting,
    assert_step,
    batch_bytes,
    make_setting,
    three_groups,
    token_mean,
)
from tests.sdpo_core.algorithms.teachers import WireTeacher
from tests.sdpo_core.algorithms.test_policy_gradient import GRPO_CLIPS, opd, task_advantages
from tests.sdpo_core.micro import ARMS, Base

FULL = {"support": "full", "top_k": None}


def support_of(
    support: str, k: int, *, student: DenseModel, teacher: DenseModel, row: TrainRow
) -> list[list[int]] | None:
    """The cells of each token, from whole distributions."""
    if support == "full":
        return None
    own, other = (model.best_ids(row.row, k=k) for model in (student, teacher))
    chosen = {"student": own, "teacher": other}
    return chosen.get(support) or [sorted({*a, *b}) for a, b in zip(own, other, strict=True)]


DIVERGENCES: Mapping[str, Mapping[str, Any]] = {
    "student": {"support": "student", "top_k": 4},
    "student, token clip": {"support": "student", "top_k": 4, "alpha": 1.0, "token_clip": 0.01},
    "teacher": {"support": "teacher", "top_k": 4, "alpha": 0.25},
    "teacher, bregman": {"support": "teacher", "top_k": 4, "alpha": 1.0, "truncation": "bregman"},
    "union": {"support": "union", "top_k": 4, "alpha": 0.0},
    "union, renormalised": {"support": "union", "top_k": 4, "truncation": "renormalised"},
    "union, entry clip": {"support": "union", "top_k": 4, "alpha": 1.0, "entry_clip": 5e-3},
    "full": FULL,
    "full, forward": {**FULL, "alpha": 0.0},
    "full, reverse": {**FULL, "alpha": 1.0, "token_clip": 0.02},
    "full, entry clip": {**FULL, "alpha": 1.0, "entry_clip": 1e-3},
}


def divergence_loss(
    setting: Setting, *, start: DenseModel, task: Mapping[tuple[int, ...], float] | None, weight: float
) -> RowLoss:
    """0.6 x divergence, weighed down by the clip and by min(p / p_old, 2), beside GRPO's surrogate."""
    spec, teacher = setting.spec.divergence, setting.start()
    assert spec is not None

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        logps, now, before = dense.logps(row.row), dense.own_logps(row.row), start.own(row.row)
        ids = support_of(spec.support, spec.top_k or 0, student=start, teacher=teacher, row=row)
        terms, values = divergence_terms(
            logps,
            teacher.masses(row.row),
            ids,
            alpha=spec.alpha,
            truncation=spec.truncation,
            entry_clip=spec.entry_clip,
        )
        shares = [
            weight * 0.6 * min(policy.ratio(new, old), 2.0) * min(1.0, (spec.token_clip or value) / value)
            for new, old, value in zip(now.tolist(), before, values, strict=True)
        ]
        loss = weighed(shares, terms)
        total = sum(share * value for share, value in zip(shares, values, strict=True))
        if task is not None:
            gains = [task[row.row.response_ids]] * len(before)
            losses, slopes = clipped(now.tolist(), before, gains, **GRPO_CLIPS)
            loss = loss + weight * weighed(slopes, now)
            total += weight * sum(losses)
        return loss, total

    return row_loss


@pytest.mark.parametrize(
    ("case", "only"),
    [*((case, False) for case in DIVERGENCES), *((case, True) for case in ("student", "union", "full"))],
)
def test_divergence_is_that_of_the_whole_distributions(cell_spec: CellSpec, base: Base, case: str, only: bool) -> None:
    """Both mini-batches, on the cells that student and teacher chose before the step, beside the surrogate or alone."""
    settings = opd(estimator="divergence", placement="loss", divergence=DIVERGENCES[case], only=only)
    setting = make_setting(cell_spec, base, arm="grpo", minibatches=2, is_moved=True, **settings)
    groups, start = three_groups(base), setting.dense()
    batch = setting.build(groups)
    clipped = 0.0
    for minibatch, rows in enumerate(batch.minibatches):
        task = None if only else task_advantages(groups)
        loss = divergence_loss(setting, start=start, task=task, weight=token_mean(rows)(rows[0]))
        stats = assert_step(setting, batch, loss, minibatch=minibatch, learning_rate=1e-3)
        clipped += stats.sums["clipped_fraction"]
    assert (clipped > 0) == ("token clip" in case or case == "full, reverse")


def test_union_rows_are_ragged_and_pad_with_nothing(cell_spec: CellSpec, base: Base) -> None:
    """Contract 14: a cell that pads a row holds no mass and changes neither loss nor gradient."""
    settings = opd(estimator="divergence", placement="loss", divergence=DIVERGENCES["union"])
    stats = []
    for extra in (0, 3):
        setting = make_setting(cell_spec, base, arm="grpo", is_moved=True, **settings)
        batch = setting.build(three_groups(base))
        rows = []
        for row in batch.minibatches[0]:
            assert row.support_ids is not None
            assert row.teacher_logps is not None
            is_pad = row.support_ids < 0
            assert is_pad.any()
            assert np.array_equal(is_pad, np.isneginf(row.teacher_logps[:, :-1]))
            ids = np.pad(row.support_ids, ((0, 0), (0, extra)), constant_values=-1)
            table = np.insert(row.teacher_logps, [is_pad.shape[1]] * extra, -np.inf, axis=1)
            rows.append(replace(row, support_ids=ids, teacher_logps=table))
        stats.append(setting.update(replace(batch, minibatches=(tuple(rows),))))
        assert np.isfinite(stats[-1].grad_norm)
    assert stats[0].loss == pytest.approx(stats[1].loss, rel=1e-6)
    assert stats[0].grad_norm == pytest.approx(stats[1].grad_norm, rel=1e-5)


def stripped(group: Group) -> Group:
    """The same responses, without feedback, success or privileged text."""
    members = tuple(
        replace(member, verdict=replace(member.verdict, feedback="", score=0.0)) for member in group.members
    )
    return replace(group, problem=replace(group.problem, privileged=None), members=members)


@pytest.mark.parametrize("arm", ["opd", "opd-k2", "opd-student", "opd-teacher", "opd-union", "opd-full"])
def test_plain_distillation_sees_nothing_but_responses(cell_spec: CellSpec, base: Base, arm: str) -> None:
    """Feedback, successes and privileged text change no byte of what is asked and trained on."""
    alone = {"opd": {**ARMS[arm]["opd"], "only": True}}
    setting = make_setting(cell_spec, base, arm=arm, is_moved=True, **alone)
    groups = three_groups(base)
    assert any(member.verdict.feedback for member in groups[0].members)
    found = []
    for shown in (groups, [stripped(group) for group in groups]):
        teacher = WireTeacher(setting.workers.teacher)
        batch = setting.with_teacher(teacher).build(shown)
        (asked,) = teacher.asked
        questions = [
            (one.row, None if one.student_ids is None else one.student_ids.tobytes()) for one in asked.questions
        ]
        found.append((questions, batch_bytes(batch), batch.objective, batch.metrics, batch.notes))
    assert found[0] == found[1]
    prompts = {one[0].prompt_ids for one in found[0][0]}
    assert prompts == {base.text.prompt_ids(group.problem.prompt) for group in groups}
