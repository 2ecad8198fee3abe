"""The life of the teacher's weights, on real workers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.algorithms.sdpo import DivergenceObjective
from sdpo_core.backends.base import TokenRow, TrainRow
from sdpo_core.cell import Workers
from sdpo_core.specs import CellSpec, TeacherSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.teacher.schedule import commit_rate
from tests.sdpo_core.micro import Base, make_spec, plain_workers, ragged_rows

SCHEDULES: dict[str, dict[str, Any]] = {
    "static": {"schedule": "static"},
    "ema": {"schedule": "ema", "rate": 0.25},
    "live": {"schedule": "live"},
}


def make_workers(cell_spec: CellSpec, base: Base, *, schedule: str) -> tuple[Workers, Teacher]:
    spec = make_spec(cell_spec, algorithm={"teacher": SCHEDULES[schedule]})
    workers = plain_workers(spec, folder=base.folder)
    assert workers.teacher is not None
    return workers, workers.teacher


def move(workers: Workers) -> dict[str, Tensor]:
    """One real update of the student; its weights."""
    row = TokenRow(prompt_ids=(1, 2, 3), response_ids=(4, 5))
    flat = np.log(np.full((2, 3), 1 / 3, dtype=np.float32))
    trained = TrainRow(row=row, weight=0.5, support_ids=np.array([[0, 1], [2, 3]]), teacher_logps=flat)
    objective = DivergenceObjective(alpha=0.5, importance_clip=2.0)
    workers.student.update([trained], objective, learning_rate=1e-2)
    return workers.student.weights()


def test_commit_rate_of_each_schedule() -> None:
    rates = {name: commit_rate(TeacherSpec.model_validate(value)) for name, value in SCHEDULES.items()}
    assert rates == {"static": None, "ema": 0.25, "live": 1.0}


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


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_same_weights_and_prompt_have_no_divergence(cell_spec: CellSpec, base: Base, alpha: float) -> None:
    """Contract 7: the self-distance of student and teacher workers over ragged rows is a rounding error."""
    workers, teacher = make_workers(cell_spec, base, schedule="static")
    rows = ragged_rows()
    scores = workers.student.score(rows, top_k=5)
    tables = teacher.tables(rows, [score.support_ids for score in scores])
    trained = [
        TrainRow(row=row, weight=1.0, support_ids=score.support_ids, teacher_logps=table)
        for row, score, table in zip(rows, scores, tables, strict=True)
    ]
    objective = DivergenceObjective(alpha=alpha, importance_clip=2.0)
    stats = workers.student.update(trained, objective, learning_rate=1e-9)
    assert stats.sums["tokens"] == 22
    assert 0 <= stats.sums["divergence"] / stats.sums["tokens"] <= 1e-6
    assert stats.loss <= 1e-6 * 22
