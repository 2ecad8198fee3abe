"""What SDPO and OPSD share: denominators, importance weights, rollouts without context, blending, measurements."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sdpo_core.backends.base import TrainRow, UpdateStats
from sdpo_core.errors import CellError
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.oracles import distributions, policy
from tests.sdpo_core.algorithms.dense import DenseModel, cell_terms, cells_at, clipped, weighed
from tests.sdpo_core.algorithms.groups import Setting, assert_step, by_response, make_group, make_setting, scores_of
from tests.sdpo_core.algorithms.teachers import WireTeacher
from tests.sdpo_core.micro import Base

Make = Callable[..., Setting]


@pytest.fixture
def make(cell_spec: CellSpec, base: Base) -> Make:
    def build(*, arm: str = "sdpo-ema", **settings: Any) -> Setting:
        return make_setting(cell_spec, base, arm=arm, **settings)

    return build


def mixed(base: Base) -> list[Group]:
    """Demonstrations, feedback, and one rollout (the lone success) without context: 8 rollouts, 7 with context."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 1, 0, 0), lengths=(2, 4, 1, 3)),
    ]


def silent_group(base: Base) -> Group:
    """Neither a success nor feedback."""
    return make_group(base, position=2, scores=(0, 0, 0, 0), feedback="")


def masses(row: TrainRow) -> list[list[float]]:
    """The teacher's cells as the row carries them."""
    assert row.teacher_logps is not None
    values: list[list[float]] = np.exp(np.float64(row.teacher_logps)).tolist()
    return values


def own_cells(row: TrainRow, student: DenseModel) -> list[Tensor]:
    """The student's masses on the row's support and tail, from whole distributions."""
    assert row.support_ids is not None
    return cells_at(student.logps(row.row), row.support_ids.tolist())


@pytest.mark.parametrize("arm", ["sdpo-ema", "sdpo-full"])
def test_teacher_prompts_end_like_student_prompts(make: Make, base: Base, arm: str) -> None:
    """Contracts 2 and 4: one generation header, and the very ids of the response after it."""
    setting = make(arm=arm)
    teacher = WireTeacher(setting.workers.teacher)
    (rows,) = setting.with_teacher(teacher).build(mixed(base)).minibatches
    (asked,) = teacher.asked
    for row, question in zip(rows, asked.questions, strict=True):
        assert question.row.response_ids == row.row.response_ids
        assert question.row.prompt_ids[-11:] == row.row.prompt_ids[-11:]
        assert len(question.row.prompt_ids) > len(row.row.prompt_ids) + 60
    assert (asked.support, asked.top_k) == (("full", 0) if arm == "sdpo-full" else ("student", 5))


def test_support_is_the_students_before_the_step(make: Make, base: Base) -> None:
    setting = make(divergence={"top_k": 3}, minibatches=2)
    batch, student = setting.build(mixed(base)), setting.dense()
    setting.update(batch, learning_rate=1e-2)
    for row in (row for part in batch.minibatches for row in part):
        assert row.support_ids is not None
        assert row.support_ids.tolist() == student.best_ids(row.row, k=3)


@pytest.mark.parametrize("truncation", ["tail", "renormalised", "bregman"])
def test_later_minibatches_carry_importance_weights(make: Make, base: Base, truncation: str) -> None:
    """The second optimizer step weighs each token by min(p / p_old, cap), a constant, on the first step's support."""
    divergence = {"top_k": 5, "truncation": truncation}
    setting = make(minibatches=2, importance_clip=1.05, divergence=divergence)
    batch, start = setting.build(mixed(base)), setting.dense()
    assert [len(rows) for rows in batch.minibatches] == [4, 3]
    setting.update(batch, learning_rate=1e-3)
    tokens = sum(len(row.row.response_ids) for row in batch.minibatches[1])
    weights: list[float] = []

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        terms, values = cell_terms(own_cells(row, dense), masses(row), alpha=0.5, truncation=truncation)
        pairs = zip(dense.own(row.row), start.own(row.row), strict=True)
        own = [min(policy.ratio(new, old), 1.05) for new, old in pairs]
        weights.extend(own)
        return weighed(own, terms) / tokens, sum(w * d for w, d in zip(own, values, strict=True)) / tokens

    assert_step(setting, batch, row_loss, minibatch=1)
    assert 0 < weights.count(1.05) < len(weights)


@pytest.mark.parametrize("arm", ["sdpo-ema", "sdpo-full"])
def test_dropped_rows_change_neither_numerator_nor_denominator(make: Make, base: Base, arm: str) -> None:
    """Contract 18: loss and weights equal those of the step without the groups that have no context."""
    first, second = make(arm=arm), make(arm=arm)
    whole, without = first.build([*mixed(base), silent_group(base)]), second.build(mixed(base))
    stats = [one.update(batch, learning_rate=1e-2) for one, batch in ((first, whole), (second, without))]
    assert stats[0] == stats[1]
    assert first.workers.checksums() == second.workers.checksums()
    assert whole.metrics["feedback/effective_fraction"] == pytest.approx(7 / 12)
    assert whole.metrics["feedback/no_context_fraction"] == pytest.approx(5 / 12)
    assert whole.metrics["feedback/from_demo_fraction"] == pytest.approx(7 / 12)
    assert whole.metrics["feedback/skipped_prompts"] == 1
    assert without.metrics["feedback/skipped_prompts"] == 0
    assert whole.metrics["cost/teacher_forwards"] == 7


def test_rows_without_context_can_be_kept_in_the_denominator(make: Make, base: Base) -> None:
    """The published reduction: 7 rollouts with context, each weighed as one of 12."""
    setting = make(reduction="sequence_mean_of_all")
    (rows,) = setting.build([*mixed(base), silent_group(base)]).minibatches
    assert [row.distill_weight * len(row.row.response_ids) for row in rows] == pytest.approx([1 / 12] * 7)


def test_feedback_counts_as_context_but_not_as_demonstration(make: Make, base: Base) -> None:
    batch = make().build([make_group(base, position=0, scores=(0, 0, 1))], num_rejected=3)
    assert batch.metrics["feedback/effective_fraction"] == pytest.approx(2 / 3)
    assert batch.metrics["feedback/from_demo_fraction"] == pytest.approx(2 / 3)
    assert batch.metrics["feedback/skipped_prompts"] == 3
    alone = make().build([make_group(base, position=0, scores=(0, 0, 0))])
    assert alone.metrics["feedback/from_demo_fraction"] == 0
    assert alone.metrics["feedback/effective_fraction"] == 1
    assert [note.demonstrator for note in alone.notes.values()] == [None] * 3


def test_error_policy_names_the_problem(make: Make, base: Base) -> None:
    message = r"sdpo: got no teacher context for rollout 1 of train-1, expected a teacher context"
    with pytest.raises(CellError, match=message):
        make(no_context="error").build(mixed(base))
    make(no_context="error").build([mixed(base)[0]])


def test_too_long_context_is_cut_and_one_without_room_is_none(make: Make, base: Base) -> None:
    """A long text loses its middle; where its least does not fit either the rollout has no context."""
    groups = [replace(group, members=tuple(long_feedback(group))) for group in [silent_group(base)]]
    whole = make(training={"max_teacher_prompt_tokens": 240}).build(groups)
    cut = make(training={"max_teacher_prompt_tokens": 150}).build(groups)
    assert (whole.metrics["feedback/cut_fraction"], cut.metrics["feedback/cut_fraction"]) == (0, 1)
    assert cut.metrics["feedback/effective_fraction"] == 1
    shown = next(iter(cut.notes.values())).teacher_prompt
    assert "xx ... xx" in shown
    assert len(base.text.rendered_ids(shown)) <= 150
    training = {"max_teacher_prompt_tokens": 90}
    batch = make(training=training).build(groups)
    assert batch.minibatches == ((),)
    assert batch.metrics["feedback/effective_fraction"] == 0
    assert batch.metrics["feedback/skipped_prompts"] == 1
    with pytest.raises(CellError, match=r"a problem that leaves no room in 90 tokens for rollout 0 of train-2"):
        make(training=training, no_context="error").build(groups)
    setting = make(training=training, no_context="poll")
    assert setting.arm.accepts(groups[0], tools=setting.tools()) is False


def long_feedback(group: Group) -> Sequence[Any]:
    return [replace(one, verdict=replace(one.verdict, feedback="x" * 80)) for one in group.members]


@pytest.mark.parametrize(
    ("no_context", "silent", "accepted"), [("poll", True, False), ("poll", False, True), ("drop", True, True)]
)
def test_accepts_sends_back_only_under_poll(
    make: Make, base: Base, no_context: str, silent: bool, accepted: bool
) -> None:
    setting = make(no_context=no_context)
    group = make_group(base, position=0, scores=(0, 0), feedback="" if silent else "odd")
    assert setting.arm.accepts(group, tools=setting.tools()) is accepted


def test_step_without_context_trains_and_commits_nothing(make: Make, base: Base) -> None:
    """Contract 21: no row, no optimizer step, no commit; the means of the step are null, its counts 0."""
    setting = make()
    batch = setting.build([silent_group(base)])
    assert batch.minibatches == ((),)
    assert batch.metrics["teacher/failed_fraction"] == 0
    assert setting.workers.teacher is not None
    before = setting.workers.teacher.facts().weights_sha256
    metrics = setting.arm.after_update([], tools=setting.tools())
    assert metrics["distill/tokens"] == 0
    assert metrics["distill/divergence"] is None
    assert metrics["distill/tail_share"] is None
    assert metrics["train/entropy"] is None
    assert metrics["cost/ema_updates"] == 0
    assert setting.workers.teacher.facts().weights_sha256 == before


def test_metrics_are_sums_over_tokens_not_means_of_means(make: Make) -> None:
    """Contract 20: two optimizer steps of unlike sizes add up token by token."""
    setting = make()
    sums = {"tokens": 1.0, "cells": 4.0, "tail": 0.5, "trained_tokens": 1.0, "entropy": 6.0, "clipped_fraction": 1.0}
    names = ("divergence", "kl_reverse", "kl_forward", "student_coverage", "teacher_coverage")
    updates = [
        UpdateStats(loss=0.0, grad_norm=1.0, sums=sums | dict.fromkeys(names, 4.0)),
        UpdateStats(
            loss=0.0, grad_norm=1.0, sums={**sums, "tokens": 3.0, "trained_tokens": 5.0} | dict.fromkeys(names, 2.0)
        ),
    ]
    metrics = setting.arm.after_update(updates, tools=setting.tools())
    assert metrics["distill/tokens"] == 4
    assert metrics["distill/divergence"] == 1.5
    assert metrics["distill/teacher_coverage"] == 1.5
    assert metrics["distill/clipped_fraction"] == 0.5
    assert metrics["distill/tail_share"] == 0.125
    assert metrics["train/entropy"] == 2.0
    assert metrics["cost/ema_updates"] == 1


def test_objective_measures_both_directions_whatever_it_trains(make: Make, base: Base) -> None:
    """Sums over tokens by the oracle, from the tables the rows carry."""
    setting = make(divergence={"alpha": 0.25, "top_k": 4, "token_clip": 0.2})
    batch, student = setting.build(mixed(base)), setting.dense()
    expected = dict.fromkeys(("kl_forward", "kl_reverse", "divergence", "student_coverage", "teacher_coverage"), 0.0)
    tail = whole = clips = 0.0
    for row in batch.minibatches[0]:
        own: list[list[float]] = [token.tolist() for token in own_cells(row, student)]
        for p, q in zip(own, masses(row), strict=True):
            trained = distributions.divergence(p, q, alpha=0.25)
            expected["kl_forward"] += distributions.kl(q, p)
            expected["kl_reverse"] += distributions.kl(p, q)
            expected["divergence"] += trained
            expected["student_coverage"] += 1 - p[-1]
            expected["teacher_coverage"] += 1 - q[-1]
            terms = distributions.bregman_terms(p, q, alpha=0.25)
            tail, whole, clips = tail + terms[-1], whole + sum(terms), clips + (trained > 0.2)
    stats = setting.update(batch)
    for name, value in {**expected, "tail": tail, "cells": whole}.items():
        assert stats.sums[name] == pytest.approx(value, rel=1e-4), name
    assert 0 < clips < stats.sums["tokens"]
    assert stats.sums["clipped_fraction"] == clips


@pytest.mark.parametrize("minibatches", [1, 2])
def test_blend_adds_the_policy_term_to_rows_with_and_without_context(make: Make, base: Base, minibatches: int) -> None:
    """0.3 GRPO over all 12 rollouts, 0.7 divergence over the 7 with a context; each has its own denominator."""
    setting = make(arm="blend", divergence={"top_k": 5}, blend={"weight": 0.3}, minibatches=minibatches)
    groups, start = [*mixed(base), silent_group(base)], setting.dense()
    values = [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=False)]
    advantages, batch = by_response(groups, values), setting.build(groups)
    assert sum(len(rows) for rows in batch.minibatches) == 12
    contexts = {row.row.response_ids for part in batch.minibatches for row in part if row.teacher_logps is not None}
    assert len(contexts) == 7

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        now, before = dense.own_logps(row.row), start.own(row.row)
        gains = [advantages[row.row.response_ids]] * len(before)
        losses, slopes = clipped(now.tolist(), before, gains, low=0.2, high=0.28, dual_clip=3.0)
        loss, total = 0.3 * weighed(slopes, now) / all_tokens, 0.3 * sum(losses) / all_tokens
        if row.row.response_ids not in contexts:
            return loss, total
        terms, values = cell_terms(own_cells(row, dense), masses(row), alpha=0.5)
        pairs = zip(now.tolist(), before, strict=True)
        shares = [0.7 * min(policy.ratio(*pair), 2.0) / taught_tokens for pair in pairs]
        total += sum(share * value for share, value in zip(shares, values, strict=True))
        return loss + weighed(shares, terms), total

    for minibatch, rows in enumerate(batch.minibatches):
        all_tokens = sum(len(row.row.response_ids) for row in rows)
        taught_tokens = sum(len(row.row.response_ids) for row in rows if row.row.response_ids in contexts)
        assert 0 < taught_tokens < all_tokens
        assert_step(setting, batch, row_loss, minibatch=minibatch, learning_rate=2e-3)


def test_blend_learns_from_the_task_where_no_rollout_has_a_context(make: Make, base: Base) -> None:
    setting = make(arm="blend", include_feedback=False)
    batch = setting.build([make_group(base, position=1, scores=(0, 0.5, 0, 0))])
    (rows,) = batch.minibatches
    assert [row.distill_weight for row in rows] == [0.0] * 4
    stats = setting.update(batch)
    metrics = setting.arm.after_update([stats], tools=setting.tools())
    assert stats.grad_norm > 0
    assert (metrics["distill/tokens"], metrics["distill/divergence"]) == (0, None)
    assert metrics["train/entropy"] is not None
