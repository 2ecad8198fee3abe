"""The life of the teacher's weights, on real workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.algorithm_specs import DivergenceSpec, TeacherSpec
from sdpo_core.algorithms.objective import DivergenceTerm, TermSum
from sdpo_core.backends.base import TeacherQuestion, TeacherScores, TokenRow, TrainRow
from sdpo_core.cell import Workers
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.teacher.schedule import commit_rate, logit_shares
from tests.sdpo_core.micro import Base, load_model, make_spec, plain_workers, ragged_rows

SCHEDULES: dict[str, dict[str, Any]] = {
    "static": {"schedule": "static"},
    "ema": {"schedule": "ema", "rate": 0.25},
    "live": {"schedule": "live"},
    "trust_region": {"schedule": "trust_region", "rate": 0.25},
}
FULL = {"support": "full", "top_k": None}


def make_workers(cell_spec: CellSpec, base: Base, *, schedule: str) -> tuple[Workers, Teacher]:
    spec = make_spec(cell_spec, algorithm={"teacher": SCHEDULES[schedule]})
    workers = plain_workers(spec, folder=base.folder)
    assert workers.teacher is not None
    return workers, workers.teacher


def objective(**divergence: Any) -> TermSum:
    spec = DivergenceSpec.model_validate(divergence)
    return TermSum(terms=(DivergenceTerm(spec=spec, importance_clip=2.0, rollout_cap=None),))


def move(workers: Workers) -> dict[str, Tensor]:
    """One real update of the student; its weights."""
    row = TokenRow(prompt_ids=(1, 2, 3), response_ids=(4, 5))
    flat = np.log(np.full((2, 3), 1 / 3, dtype=np.float32))
    trained = TrainRow(row=row, distill_weight=0.5, support_ids=np.array([[0, 1], [2, 3]]), teacher_logps=flat)
    workers.student.update([trained], objective(top_k=2), learning_rate=1e-2)
    return workers.student.weights()


def test_commit_rate_of_each_schedule() -> None:
    specs = {name: TeacherSpec.model_validate(value) for name, value in SCHEDULES.items()}
    rates = {name: commit_rate(spec) for name, spec in specs.items()}
    assert rates == {"static": None, "ema": 0.25, "live": 1.0, "trust_region": 1.0}
    shares = {name: logit_shares(spec) for name, spec in specs.items()}
    assert shares == {"static": (1.0,), "ema": (1.0,), "live": (1.0,), "trust_region": (0.75, 0.25)}


def test_static_teacher_never_changes(cell_spec: CellSpec, base: Base) -> None:
    workers, teacher = make_workers(cell_spec, base, schedule="static")
    start = teacher.facts().weights_sha256
    assert start == workers.student.facts().weights_sha256
    for _ in range(2):
        move(workers)
        assert teacher.follow(workers.student) is False
    assert teacher.facts().weights_sha256 == start
    assert workers.student.facts().weights_sha256 != start


def test_ema_teacher_is_its_formula(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Three commits: t <- 0.75 t + 0.25 s, to float32 rounding."""
    workers, teacher = make_workers(cell_spec, base, schedule="ema")
    expected = {name: value.double() for name, value in workers.student.weights().items()}
    for _ in range(3):
        student = move(workers)
        assert teacher.follow(workers.student) is True
        expected = {name: 0.75 * value + 0.25 * student[name].double() for name, value in expected.items()}
    teacher.save(tmp_path)
    other = plain_workers(make_spec(cell_spec), folder=base.folder).teacher
    assert other is not None
    other.load(tmp_path)
    assert other.facts().weights_sha256 == teacher.facts().weights_sha256
    found = other._scorer.weights()  # type: ignore[attr-defined]
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7, msg=name)
        assert not torch.equal(found[name], student[name]), name


def test_live_teacher_is_the_student(cell_spec: CellSpec, base: Base) -> None:
    workers, teacher = make_workers(cell_spec, base, schedule="live")
    move(workers)
    assert teacher.facts().weights_sha256 != workers.student.facts().weights_sha256
    assert teacher.follow(workers.student) is True
    assert teacher.facts().weights_sha256 == workers.student.facts().weights_sha256


def test_trust_region_teacher_stays_between_start_and_student(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """log q = 0.75 log q_start + 0.25 log q_student + constant, also of workers that come back from a checkpoint."""
    workers, teacher = make_workers(cell_spec, base, schedule="trust_region")
    for _ in range(3):
        move(workers)
        assert teacher.follow(workers.student) is True
    assert teacher.facts().weights_sha256 == workers.student.facts().weights_sha256
    teacher.save(tmp_path)
    again = make_workers(cell_spec, base, schedule="trust_region")[1]
    again.load(tmp_path)
    start, moved = load_model(base.folder, dtype=torch.float64), load_model(base.folder, dtype=torch.float64)
    moved.blend(workers.student.weights(), rate=1.0)
    (row, *_) = ragged_rows()
    with torch.no_grad():
        first, second = (model.logits(model.response_states([row])) for model in (start, moved))
    expected = (0.75 * first + 0.25 * second).log_softmax(dim=1)[range(len(first)), list(row.response_ids)]
    for one in (teacher, again):
        (answer,) = one.score([TeacherQuestion(row=row)], support=None, top_k=0)
        assert isinstance(answer, TeacherScores)
        np.testing.assert_allclose(answer.logps, expected.numpy(), rtol=0, atol=2e-5)
    alone = first.log_softmax(dim=1)[range(len(first)), list(row.response_ids)]
    assert abs(alone - expected).max() > 1e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "cells", [{"support": "student", "top_k": 5}, {"support": "teacher", "top_k": 5}, {"support": "union"}, FULL]
)
def test_same_weights_and_prompt_have_no_divergence(
    cell_spec: CellSpec, base: Base, schedule: str, alpha: float, cells: dict[str, Any]
) -> None:
    """Contract 7: the self-distance of student and teacher workers over ragged rows is a rounding error."""
    workers, teacher = make_workers(cell_spec, base, schedule=schedule)
    spec = DivergenceSpec.model_validate({**cells, "alpha": alpha})
    rows, width = ragged_rows(), spec.top_k or 0
    scores = workers.student.score(rows, top_k=width)
    questions = [TeacherQuestion(row=row, student_ids=s.support_ids) for row, s in zip(rows, scores, strict=True)]
    answers = teacher.score(questions, support=spec.support, top_k=width)
    workers.student.hold_projection_of(teacher)
    trained = [
        TrainRow(
            row=row,
            distill_weight=1.0,
            support_ids=answer.support_ids,
            teacher_logps=answer.table,
            teacher_states=answer.states,
        )
        for row, answer in zip(rows, answers, strict=True)
        if isinstance(answer, TeacherScores)
    ]
    stats = workers.student.update(trained, objective(**cells, alpha=alpha), learning_rate=1e-9)
    assert stats.sums["tokens"] == 22
    assert abs(stats.sums["divergence"]) / stats.sums["tokens"] <= 1e-9
    assert abs(stats.loss) <= 1e-9 * 22
