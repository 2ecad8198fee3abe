"""Workers on real Ray actors: processes of their own, the numbers of plain workers, errors that come through."""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sdpo_core.actors.process_group import WorkerProcesses
from sdpo_core.actors.ray_workers import RemoteStudent, RemoteTeacher, ray_workers
from sdpo_core.backends.base import Projection, TokenRow, WeightsAt
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.cell import Workers
from sdpo_core.checkpoint import checkpoint_folder
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import Journal
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights
from sdpo_core.workers import TeacherWorker
from tests.sdpo_core.micro import ARMS, MAX_POSITIONS, Base, load_model, make_cell, make_spec, plain_workers
from tests.sdpo_core.test_cell import numbers, result

# An anchor and a teacher: one that follows, so that its projection reaches the student's process after every commit.
EVERYTHING: Mapping[str, Any] = {
    "anchor": {"coefficient": 0.1},
    "opd": {**ARMS["opd-full"]["opd"], "teacher": {"schedule": "trust_region", "rate": 0.25}},
}
CELLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "student alone": ("ppo", {}),
    "teacher": ("sdpo-ema", {}),
    "teacher and anchor": ("grpo", EVERYTHING),
}


class RecordingTeacher(RemoteTeacher):
    """Keeps the student's weights at every commit, and lets no projection pass through this process."""

    def __init__(self, teacher: RemoteTeacher) -> None:
        super().__init__(teacher.processes, follows=teacher._follows)
        self.seen: list[dict[str, Tensor]] = []

    def follow(self, student: HasWeights) -> bool:
        self.seen.append(student.weights())
        return super().follow(student)

    def projection(self) -> Projection:
        raise AssertionError("a projection came to the driver")


def run(spec: CellSpec, folder: Path, *, base: Base, workers: Workers) -> Journal:
    journal = Journal(folder)
    make_cell(spec, journal=journal, workers=workers, text=base.text).run()
    return journal


@pytest.mark.parametrize("case", CELLS)
def test_cell_on_actors_equals_the_cell_in_one_process(
    cell_spec: CellSpec, base: Base, tmp_path: Path, case: str
) -> None:
    """Two steps on a process for each worker, and the same in this one: every number but time is equal."""
    arm, algorithm = CELLS[case]
    spec = make_spec(cell_spec, arm=arm, algorithm=algorithm, training={"steps": 2})
    teacher = None
    with ray_workers(spec, folder=base.folder, gpus=0) as remote:
        if remote.teacher is not None:
            assert isinstance(remote.teacher, RemoteTeacher)
            teacher = RecordingTeacher(remote.teacher)
        workers = replace(remote, teacher=teacher)
        journal = run(spec, tmp_path / "ray", base=base, workers=workers)
    plain = run(spec, tmp_path / "plain", base=base, workers=plain_workers(spec, folder=base.folder))
    assert numbers(journal) == numbers(plain)
    assert journal.read_samples() == plain.read_samples()
    found, expected = result(journal)["workers"], result(plain)["workers"]
    names = {"student alone": {"student"}, "teacher": {"student", "teacher"}}
    assert found.keys() == names.get(case, {"student", "teacher", "anchor"})
    pids = {os.getpid(), *(facts.pop("pid") for facts in found.values())}
    assert len(pids) == 1 + len(found)
    assert {facts.pop("pid") for facts in expected.values()} == {os.getpid()}
    assert found == expected
    assert found["student"]["weights_sha256_end"] != found["student"]["weights_sha256_start"]
    if case == "teacher and anchor":
        assert found["anchor"]["weights_sha256_end"] == found["student"]["weights_sha256_start"]
        assert found["teacher"]["weights_sha256_end"] == found["student"]["weights_sha256_end"]
    if case == "teacher":
        assert teacher is not None
        assert_is_ema(teacher.seen, checkpoint_folder(journal, 2) / "teacher" / WEIGHTS_FILE, base=base)


def assert_is_ema(seen: list[dict[str, Tensor]], committed: Path, *, base: Base) -> None:
    """Two commits of what the student was."""
    assert len(seen) == 2
    weights = {name: value.double() for name, value in load_model(base.folder).weights().items()}
    for step in seen:
        weights = {name: 0.75 * value + 0.25 * step[name].double() for name, value in weights.items()}
    found = load_file(committed)
    for name, value in weights.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7, msg=name)


def test_projection_goes_from_one_actor_to_the_other_and_only_when_it_changed(
    cell_spec: CellSpec, base: Base, tmp_path: Path
) -> None:
    """A teacher with a checkpoint's weights over its base: what the student holds is its projection, once a version."""
    model = load_model(base.folder)
    model.blend({name: value + 0.1 for name, value in model.weights().items()}, rate=1.0)
    model.save_weights(tmp_path)
    spec = make_spec(cell_spec, arm="opsd")
    at = WeightsAt(folder=base.folder, weights=tmp_path)
    with ray_workers(spec, folder=base.folder, gpus=0, teacher=at) as workers:
        student, teacher = workers.student, workers.teacher
        assert isinstance(student, RemoteStudent)
        assert isinstance(teacher, RemoteTeacher)
        assert teacher.facts().weights_sha256 == weights_sha256(model.weights())
        assert student.facts().weights_sha256 != teacher.facts().weights_sha256
        torch.testing.assert_close(teacher.projection().weight, model.head.detach(), rtol=0, atol=0)
        counted = CountingProcesses(teacher.processes)
        teacher.processes = counted
        for _ in range(2):
            student.hold_projection_of(RecordingTeacher(teacher))
        assert counted.hand_overs == 1
        teacher.load(tmp_path)
        student.hold_projection_of(RecordingTeacher(teacher))
        assert counted.hand_overs == 2


class CountingProcesses(WorkerProcesses[TeacherWorker]):
    """The teacher's processes; counts what they hand over."""

    def __init__(self, processes: WorkerProcesses[TeacherWorker]) -> None:
        super().__init__(processes.name, processes.actors)
        self.hand_overs = 0

    def hand_over(self, take: Any, *, to: Any, give: Any) -> None:
        self.hand_overs += 1
        super().hand_over(take, to=to, give=give)


def test_errors_come_through_and_a_dead_worker_is_named(cell_spec: CellSpec, base: Base) -> None:
    spec = make_spec(cell_spec, arm="grpo")
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3,))
    with ray_workers(spec, folder=base.folder, gpus=0) as workers:
        student = workers.student
        assert workers.teacher is workers.anchor is None
        with pytest.raises(DataError, match=f"expected at most {MAX_POSITIONS}"):
            student.score([TokenRow(prompt_ids=(1,) * 300, response_ids=(1,))], top_k=0)
        with pytest.raises(SpecError, match="got top_k 300"):
            student.score([row], top_k=300)
        os.kill(student.facts().pid, signal.SIGKILL)
        with pytest.raises(CellError, match="expected a living worker") as caught:
            student.score([row], top_k=0)
    assert "\n" not in str(caught.value)


def test_worker_that_cannot_start_says_why(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """The reason is the worker's own, not only that it died."""
    spec = make_spec(cell_spec, arm="grpo").model_copy(update={"backend": "nonesuch"})
    with ray_workers(spec, folder=base.folder, gpus=0) as workers, pytest.raises(SpecError, match="nonesuch"):
        workers.student.facts()
    with (
        ray_workers(make_spec(cell_spec, arm="grpo"), folder=tmp_path, gpus=0) as workers,
        pytest.raises(DataError, match=f"got no tokenizer_config.json in {tmp_path}"),
    ):
        workers.student.facts()


def test_workers_have_as_many_processes_as_their_layouts_say(cell_spec: CellSpec, base: Base) -> None:
    """Every rank checks the layout; a backend of one process refuses it."""
    spec = make_spec(cell_spec).model_copy(update={"layout": LayoutSpec(data=2)})
    with ray_workers(spec, folder=base.folder, gpus=0) as workers:
        student, teacher = workers.student, workers.teacher
        assert isinstance(student, RemoteStudent)
        assert isinstance(teacher, RemoteTeacher)
        assert (len(student.processes.actors), len(teacher.processes.actors)) == (2, 1)
        with pytest.raises(SpecError, match="got a layout of 2 processes for backend 'hf'"):
            student.facts()
