"""Workers as plain objects: a teacher's weights over a base, its projection held by the student."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdpo_core.algorithm_specs import TeacherSpec
from sdpo_core.backends.base import Projection, TeacherQuestion, WeightsAt
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.cell import Workers
from sdpo_core.specs import CellSpec, SglangSpec
from sdpo_core.workers import StudentWorker, TeacherWorker
from tests.sdpo_core.micro import Base, load_model, make_spec, plain_workers, ragged_rows


def other_weights(base: Base, folder: Path) -> dict[str, Tensor]:
    """A checkpoint of the same model: weights alone, without configuration or tokenizer."""
    model = load_model(base.folder)
    model.blend({name: value + 0.1 for name, value in model.weights().items()}, rate=1.0)
    model.save_weights(folder)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    return model.weights()


@pytest.mark.parametrize("schedule", [{"schedule": "static"}, {"schedule": "trust_region", "rate": 0.5}])
def test_teacher_takes_a_checkpoints_weights_over_its_base(
    cell_spec: CellSpec, base: Base, tmp_path: Path, schedule: dict[str, object]
) -> None:
    """Every part of it starts with them; the base of the folder is not looked at again."""
    weights = other_weights(base, tmp_path)
    life, at = TeacherSpec.model_validate(schedule), WeightsAt(folder=base.folder, weights=tmp_path)
    teacher = TeacherWorker(make_spec(cell_spec), life=life, at=at, device="cpu")
    assert teacher.facts().weights_sha256 == weights_sha256(weights)
    for part in teacher._scorer._parts:  # type: ignore[attr-defined]
        assert all(torch.equal(value, weights[name]) for name, value in part.model.weights().items())


@pytest.mark.parametrize("sleep", [False, True])
def test_teacher_leaves_a_gpu_to_servers_that_sleep(
    cell_spec: CellSpec, base: Base, monkeypatch: pytest.MonkeyPatch, sleep: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("room"))
    spec = make_spec(cell_spec, arm="sdpo-static").model_copy(update={"sglang": SglangSpec(sleep=sleep)})
    assert spec.teacher is not None
    teacher = TeacherWorker(spec, life=spec.teacher, at=WeightsAt(folder=base.folder), device="cpu")
    teacher.score([TeacherQuestion(row=ragged_rows()[0])], support=None, top_k=0)
    assert calls == ["room"] * sleep


class Counting(TeacherWorker):
    """Counts how often its projection was moved."""

    moved = 0

    def projection(self) -> Projection:
        self.moved += 1
        return super().projection()


@pytest.mark.parametrize(("schedule", "moves"), [("static", 1), ("ema", 3)])
def test_student_holds_a_projection_until_it_changes(
    cell_spec: CellSpec, base: Base, schedule: str, moves: int
) -> None:
    """A frozen teacher's output projection moves once, one that follows after each commit."""
    arm = f"sdpo-{schedule}"
    spec = make_spec(cell_spec, arm=arm, algorithm={"divergence": {"support": "full", "top_k": None}})
    assert spec.teacher is not None
    teacher = Counting(spec, life=spec.teacher, at=WeightsAt(folder=base.folder), device="cpu")
    student = StudentWorker(spec, folder=base.folder, device="cpu")
    for _ in range(3):
        student.hold_projection_of(teacher)
        student.hold_projection_of(teacher)
        teacher.follow(student)
    assert teacher.moved == moves
    held = student._policy._teacher_head  # type: ignore[attr-defined]
    assert held.weight.shape == (262, 32)
    assert held.temperature == spec.training.temperature


def test_held_projection_does_not_change_with_the_teacher(cell_spec: CellSpec, base: Base) -> None:
    """What a step was scored with is what it is trained with, whatever is committed in between."""
    spec = make_spec(cell_spec, arm="sdpo-ema", algorithm={"divergence": {"support": "full", "top_k": None}})
    workers = plain_workers(spec, folder=base.folder)
    assert workers.teacher is not None
    workers.student.hold_projection_of(workers.teacher)
    held = workers.student._policy._teacher_head.weight  # type: ignore[attr-defined]
    before = held.detach().clone()
    moved = {name: value + 1.0 for name, value in workers.student.weights().items()}
    workers.teacher.commit(moved)  # type: ignore[attr-defined]
    assert torch.equal(held, before)


def test_anchor_is_the_base_and_is_named(cell_spec: CellSpec, base: Base) -> None:
    """It is a worker of its own: scored like a teacher, with no part in a checkpoint."""
    workers = plain_workers(make_spec(cell_spec, arm="grpo-k1"), folder=base.folder)
    assert list(workers.named()) == ["student", "anchor"]
    assert list(workers.savable()) == ["student"]
    assert workers.checksums()["anchor"] == workers.checksums()["student"]
    assert workers.anchor is not None
    assert workers.anchor.follow(workers.student) is False
    (row, *_) = ragged_rows()
    (answer,) = workers.anchor.score([TeacherQuestion(row=row)], support=None, top_k=0)
    (score,) = workers.student.score([row], top_k=0)
    assert answer.logps.tolist() == score.logps.tolist()  # type: ignore[union-attr]


def test_workers_are_those_there_are(cell_spec: CellSpec, base: Base) -> None:
    student = StudentWorker(make_spec(cell_spec, arm="grpo"), folder=base.folder, device="cpu")
    assert list(Workers(student=student, teacher=None).named()) == ["student"]
