"""Answers of a teacher that fail or do not fit their questions: masked and counted, or refused; never replaced."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sdpo_core.backends.base import TeacherScores
from sdpo_core.errors import CellError, DataError
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.sdpo_core.algorithms.groups import Setting, batch_bytes, make_group, make_setting
from tests.sdpo_core.algorithms.teachers import Answer, Spoil, WireTeacher, failing
from tests.sdpo_core.micro import ARMS, Base

TAUGHT = ("sdpo-static", "sdpo-full", "blend", "opsd", "opd", "opd-k2", "opd-student", "opd-teacher", "opd-union")
FIELDS = ("teacher_logps", "teacher_states", "teacher_own_logps", "support_ids")


def taught_groups(base: Base) -> list[Group]:
    """Three groups whose 12 rollouts of 32 tokens have a teacher context each."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 0, 0, 0), lengths=(2, 2, 4, 1)),
        make_group(base, position=2, scores=(1, 0, 1, 0), lengths=(1, 6, 2, 3)),
    ]


def make(cell_spec: CellSpec, base: Base, *, arm: str, allowed: float = 0.0) -> Setting:
    """The arm with a teacher that may fail."""
    settings: dict[str, Any] = {}
    declared = {"schedule": "static", **(ARMS[arm].get("teacher") or {}), "max_failed_fraction": allowed}
    if "opd" in ARMS[arm]:
        settings["opd"] = {**ARMS[arm]["opd"], "teacher": declared}
    else:
        settings["teacher"] = declared
    return make_setting(cell_spec, base, arm=arm, is_moved=True, **settings)


def nan_in(*places: int) -> Spoil:
    """NaN somewhere in the answers at `places`, each time in another field that is there."""

    def spoil(answers: tuple[TeacherScores, ...]) -> tuple[Answer, ...]:
        spoiled: list[Answer] = list(answers)
        for place in places:
            answer = answers[place]
            names = [name for name in ("table", "states", "logps") if getattr(answer, name) is not None]
            name = names[place % len(names)]
            array = getattr(answer, name).copy()
            array[-1, ...] = np.nan
            spoiled[place] = replace(answer, **{name: array})
        return tuple(spoiled)

    return spoil


@pytest.mark.parametrize("arm", TAUGHT)
@pytest.mark.parametrize(("spoil", "why"), [(failing(5), "timeout"), (nan_in(5), "NaN in its")])
def test_failed_answer_ends_a_cell_that_allows_none(
    cell_spec: CellSpec, base: Base, arm: str, spoil: Spoil, why: str
) -> None:
    setting = make(cell_spec, base, arm=arm)
    with pytest.raises(CellError, match=rf"got no scores for 1 of 12 rollouts \(the first: {why}.*fraction of 0.0"):
        setting.with_teacher(WireTeacher(setting.workers.teacher, spoil)).build(taught_groups(base))


@pytest.mark.parametrize("arm", TAUGHT)
@pytest.mark.parametrize("spoil", [failing(1, 4, 10), nan_in(1, 4, 10)])
def test_failed_answers_leave_numerator_and_denominator(
    cell_spec: CellSpec, base: Base, arm: str, spoil: Spoil
) -> None:
    """Contract 18: the rows that are left are those of the step without failures, reweighed; the failures counted."""
    setting = make(cell_spec, base, arm=arm, allowed=0.25)
    groups = taught_groups(base)
    whole = setting.build(groups)
    batch = setting.with_teacher(WireTeacher(setting.workers.teacher, spoil)).build(groups)
    (before,) = whole.minibatches
    failed = {before[place].row.response_ids for place in (1, 4, 10)}
    left = sum(len(row.row.response_ids) for row in before if row.row.response_ids not in failed)
    assert 0 < left < 32
    # Of an arm with a task beside it, the rows that failed still carry the task's term.
    has_task = arm == "blend" or arm.startswith("opd-")
    term = "weight" if arm == "opd" else "distill_weight"
    expected = []
    for row in before:
        assert not has_task or row.weight == 1 / 32
        if row.row.response_ids not in failed:
            changes: dict[str, Any] = {term: 1 / left}
        else:
            changes = {"distill_weight": 0.0, **dict.fromkeys(FIELDS)}
        if has_task or row.row.response_ids not in failed:
            expected.append(replace(row, **changes))
    assert batch_bytes(batch) == batch_bytes(replace(batch, minibatches=(tuple(expected),)))
    assert batch.metrics["teacher/failed_fraction"] == 0.25
    assert batch.metrics["cost/teacher_forwards"] == 12
    stats = setting.update(batch)
    metrics = setting.arm.after_update([stats], tools=setting.tools())
    assert {**batch.metrics, **metrics}["distill/tokens"] == left


def test_failed_answer_takes_its_term_off_an_advantage_not_the_task(cell_spec: CellSpec, base: Base) -> None:
    """Distillation as an advantage beside a task: the rollout keeps its task's advantage, and nothing stands in."""
    opd = {"teacher": {"schedule": "static", "max_failed_fraction": 0.5}, "coefficient": 0.5}
    setting = make_setting(cell_spec, base, arm="grpo", is_moved=True, opd=opd)
    groups = taught_groups(base)
    (whole,) = setting.build(groups).minibatches
    batch = setting.with_teacher(WireTeacher(setting.workers.teacher, failing(0))).build(groups)
    (rows,) = batch.minibatches
    assert rows[0].advantages is not None
    assert rows[0].advantages.tolist() == [0.5] * 3
    assert whole[0].advantages is not None
    assert abs(whole[0].advantages - 0.5).max() > 1e-3
    assert batch_bytes(replace(batch, minibatches=(rows[1:],))) == batch_bytes(replace(batch, minibatches=(whole[1:],)))


@pytest.mark.parametrize("arm", ["sdpo-static", "opd", "opd-k2", "opd-full"])
def test_step_whose_answers_all_fail_is_left_out(cell_spec: CellSpec, base: Base, arm: str) -> None:
    """Contract 21: nothing is left to learn, no optimizer step is taken; the means are over nothing."""
    setting = make(cell_spec, base, arm=arm, allowed=1.0)
    if "opd" in ARMS[arm]:
        opd = setting.spec.algorithm.model_dump(mode="json")["opd"]
        setting = make_setting(cell_spec, base, arm=arm, opd={**opd, "only": True})
    batch = setting.with_teacher(WireTeacher(setting.workers.teacher, failing(*range(12)))).build(taught_groups(base))
    assert batch.minibatches == ((),)
    metrics = {**batch.metrics, **setting.arm.after_update([], tools=setting.tools())}
    assert metrics["teacher/failed_fraction"] == 1.0
    assert metrics["distill/tokens"] == 0
    means = [name for name in metrics if name.startswith("distill/") and name != "distill/tokens"]
    assert len(means) >= 2
    assert {metrics[name] for name in means} == {None}


def test_measurements_are_over_the_answers_there_are(cell_spec: CellSpec, base: Base) -> None:
    """Contract 20: a failed rollout changes no mean but by its absence."""
    setting = make(cell_spec, base, arm="opd", allowed=0.5)
    teacher = WireTeacher(setting.workers.teacher)
    groups = taught_groups(base)
    setting.with_teacher(teacher).build(groups)
    rows = [one.row for one in teacher.asked[0].questions]
    student, other = setting.dense(), setting.start()
    gaps = [a - b for row in rows[1:] for a, b in zip(student.own(row), other.own(row), strict=True)]
    entropies = [-sum(m * np.log(m) for m in masses) for row in rows[1:] for masses in other.masses(row)]
    batch = setting.with_teacher(WireTeacher(setting.workers.teacher, failing(0))).build(groups)
    assert batch.metrics["distill/tokens"] == len(gaps) == 29
    assert batch.metrics["distill/sampled_kl"] == pytest.approx(sum(gaps) / 29, abs=1e-5)
    assert batch.metrics["distill/teacher_entropy"] == pytest.approx(sum(entropies) / 29, rel=1e-5)


def change(name: str, how: Callable[[np.ndarray], np.ndarray | None]) -> Spoil:
    """One field of the first answer, changed behind the back of the shape checker, which no run has."""

    def spoil(answers: tuple[TeacherScores, ...]) -> tuple[Answer, ...]:
        first = copy.copy(answers[0])
        object.__setattr__(first, name, how(getattr(first, name)))
        return (first, *answers[1:])

    return spoil


def swap_ids(ids: np.ndarray) -> np.ndarray:
    return np.roll(ids, 1, axis=1)


def narrower(answers: tuple[TeacherScores, ...]) -> tuple[Answer, ...]:
    """A table of one id fewer, which agrees with itself."""
    first = answers[0]
    assert first.support_ids is not None
    assert first.table is not None
    table = np.concatenate([first.table[:, :-2], np.logaddexp(first.table[:, -2:-1], first.table[:, -1:])], axis=1)
    return (replace(first, support_ids=first.support_ids[:, :-1], table=table), *answers[1:])


DAMAGES: dict[str, tuple[str, Spoil, str]] = {
    "too few rows": ("sdpo-static", change("table", lambda a: a[:-1]), r"table of shape \(2, 6\) for 3 tokens"),
    "too many rows": (
        "sdpo-static",
        change("table", lambda a: np.concatenate([a, a[:1]])),
        r"table of shape \(4, 6\) for 3 tokens",
    ),
    "no tail": ("sdpo-static", change("table", lambda a: a[:, :-1]), r"table of shape \(3, 5\) for 5 ids"),
    "other ids": ("sdpo-static", change("support_ids", swap_ids), "at other ids than the student's"),
    "fewer ids": ("sdpo-static", narrower, "at other ids than the student's"),
    "other ids in a union": (
        "opd-union",
        change("support_ids", lambda a: (a + 1) * (a >= 0) + a * (a < 0)),
        "other ids",
    ),
    "fewer ids of a teacher": ("opd-teacher", narrower, r"got 3 ids a token, expected 4"),
    "no table": ("sdpo-static", change("table", lambda _: None), "got no table"),
    "no ids": ("opd-teacher", change("support_ids", lambda _: None), "got no support_ids"),
    "no states": ("opsd", change("states", lambda _: None), "got no states"),
    "short states": ("opsd", change("states", lambda a: a[1:]), r"states of shape \(2, 32\) for 3 tokens"),
    "short log-probabilities": ("opd", change("logps", lambda a: a[1:]), r"logps of shape \(2,\) for 3 tokens"),
    "long entropies": ("opd", change("entropies", lambda a: np.append(a, 0)), r"entropies of shape \(4,\) for 3"),
    "short overlap": ("sdpo-static", change("overlap", lambda a: a[1:]), r"overlap of shape \(2,\) for 3 tokens"),
    "an answer too few": ("opd", lambda answers: answers[:-1], "got 11 answers to 12 questions"),
    "an answer too many": ("opd-full", lambda answers: (*answers, answers[0]), "got 13 answers to 12 questions"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_answer_that_does_not_fit_is_refused(cell_spec: CellSpec, base: Base, damage: str) -> None:
    """Contracts 3 and 33: also where failures are allowed, since this is no failure but another teacher."""
    arm, spoil, message = DAMAGES[damage]
    setting = make(cell_spec, base, arm=arm, allowed=1.0)
    with pytest.raises(DataError, match=message):
        setting.with_teacher(WireTeacher(setting.workers.teacher, spoil)).build(taught_groups(base))


def test_table_without_whole_mass_stops_the_update(cell_spec: CellSpec, base: Base) -> None:
    """A renormalised payload has the right shape and is still no distribution."""
    setting = make(cell_spec, base, arm="sdpo-static")
    teacher = WireTeacher(setting.workers.teacher, change("table", lambda a: a - np.float32(0.1)))
    batch = setting.with_teacher(teacher).build(taught_groups(base))
    before = setting.workers.student.facts().weights_sha256
    with pytest.raises(DataError, match=r"got mass 0\.90.* in teacher row"):
        setting.update(batch)
    assert setting.workers.student.facts().weights_sha256 == before


@pytest.mark.parametrize("arm", ["sdpo-static", "opsd", "opd", "opd-full"])
def test_missing_teacher_is_refused(cell_spec: CellSpec, base: Base, arm: str) -> None:
    """Contract 33: an arm that asks for a teacher does not train without one."""
    with pytest.raises(DataError, match="teacher: got none, expected one"):
        make(cell_spec, base, arm=arm).with_teacher(None).build(taught_groups(base))
