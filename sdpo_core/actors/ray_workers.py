"""Student, teacher and anchor on Ray actors, behind the same protocols as the plain classes.

Each is one process or several (`process_group`), and none asks for CPUs: the job that drives a cell holds the cell's
CPUs (see docs/decisions/0004), and a cell's workers take turns. GPUs are asked for here, since a process must own its
device (`placement`).
"""

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import ray
from torch import Tensor

from sdpo_core.actors.placement import placed
from sdpo_core.actors.process_group import WorkerProcesses, worker_processes
from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import (
    Objective,
    Projection,
    RowScores,
    TeacherFailure,
    TeacherQuestion,
    TeacherScores,
    TokenRow,
    TrainRow,
    UpdateStats,
    WeightsAt,
    WorkerFacts,
)
from sdpo_core.cell import Workers
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.table import LIVE
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights, Teacher
from sdpo_core.teacher.schedule import commit_rate
from sdpo_core.teacher.served_weights import remove_weights
from sdpo_core.teacher.table import PLACEMENTS, TeacherPlacement
from sdpo_core.workers import ANCHOR, StudentWorker, TeacherWorker


def connect() -> None:
    """Connect to the Ray cluster this job runs on; outside a job, to one of its own."""
    ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)


class RemoteStudent:
    """`StudentWorker` in processes of its own."""

    def __init__(self, processes: WorkerProcesses[StudentWorker]) -> None:
        self.processes = processes
        self._held_version: int | None = None

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        return self.processes.call(lambda worker: worker.generate(requests, sampling=sampling))

    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        return self.processes.call(lambda worker: worker.score(rows, top_k=top_k))

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        return self.processes.call(lambda worker: worker.update(rows, objective, learning_rate=learning_rate))

    def hold_projection_of(self, teacher: Teacher) -> None:
        """As `StudentWorker`; the projection does not pass through the driver."""
        version = teacher.projection_version()
        if version != self._held_version:
            if isinstance(teacher, RemoteTeacher):
                teacher.processes.hand_over(
                    TeacherWorker.projection, to=self.processes, give=StudentWorker.hold_projection
                )
            else:
                projection = teacher.projection()
                self.processes.call(lambda worker: worker.hold_projection(projection))
            self._held_version = version

    def weights_version(self) -> int:
        return self.processes.call(lambda worker: worker.weights_version())

    def weights(self) -> dict[str, Tensor]:
        return self.processes.call(lambda worker: worker.weights())

    def save(self, folder: Path) -> None:
        self.processes.call(lambda worker: worker.save(folder))

    def load(self, folder: Path) -> None:
        self.processes.call(lambda worker: worker.load(folder))

    def load_weights(self, folder: Path) -> None:
        self.processes.call(lambda worker: worker.load_weights(folder))

    def facts(self) -> WorkerFacts:
        return self.processes.call(lambda worker: worker.facts())

    def peak_memory_bytes(self) -> int:
        """Of the process that needs most."""
        return max(self.processes.call_each(lambda worker: worker.peak_memory_bytes()))


class RemoteTeacher:
    """`TeacherWorker` in processes of its own; the student's weights reach it without passing through the driver."""

    def __init__(self, processes: WorkerProcesses[TeacherWorker], *, follows: bool) -> None:
        self.processes = processes
        self._follows = follows

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores | TeacherFailure, ...]:
        return self.processes.call(lambda worker: worker.score(questions, support=support, top_k=top_k))

    def projection(self) -> Projection:
        return self.processes.call(lambda worker: worker.projection())

    def projection_version(self) -> int:
        return self.processes.call(lambda worker: worker.projection_version())

    def follow(self, student: HasWeights) -> bool:
        if not self._follows:
            return False
        if isinstance(student, RemoteStudent):
            student.processes.hand_over(StudentWorker.weights, to=self.processes, give=TeacherWorker.commit)
        else:
            weights = student.weights()
            self.processes.call(lambda worker: worker.commit(weights))
        return True

    def save(self, folder: Path) -> None:
        self.processes.call(lambda worker: worker.save(folder))

    def load(self, folder: Path) -> None:
        self.processes.call(lambda worker: worker.load(folder))

    def facts(self) -> WorkerFacts:
        return self.processes.call(lambda worker: worker.facts())

    def peak_memory_bytes(self) -> int:
        """Of the process that needs most."""
        return max(self.processes.call_each(lambda worker: worker.peak_memory_bytes()))


@contextmanager
def ray_workers(
    spec: CellSpec, *, folder: Path, gpus: int, teacher: WeightsAt | None = None, scratch: Path | None = None
) -> Iterator[Workers]:
    """Start a cell's workers on the Ray this process is connected to, and end them with the block.

    `folder`: the base, of the student, of the anchor and, unless `teacher` names other weights, of the teacher. `gpus`
    is the cell's share. `scratch`: has a folder for each worker with a server, for its log and weights on their way.
    """
    lives = {name: life for name, life in (("teacher", spec.teacher), ("anchor", spec.anchor and ANCHOR)) if life}
    where: dict[str, TeacherPlacement] = {"teacher": spec.teacher_placement, "anchor": "trainer"}
    layouts = {name: spec.scorer_layout.size if PLACEMENTS[where[name]].is_on_backend else 1 for name in lives}
    sizes = {"student": spec.layout.size, **layouts}
    device = "cuda" if gpus else "cpu"
    at = {"teacher": teacher or WeightsAt(folder=folder), "anchor": WeightsAt(folder=folder)}
    with ExitStack() as stack:
        if scratch is not None:
            # Entered first, so that it is done when no process reads them any more.
            stack.callback(remove_weights, scratch / "teacher")
            stack.callback(shutil.rmtree, scratch / "student" / LIVE, ignore_errors=True)
        places = stack.enter_context(placed(sizes, gpus=gpus))
        start = partial(worker_processes, device=device, environment=_thread_environment(spec))
        make_student = partial(
            StudentWorker, spec, folder=folder, device=device, scratch=scratch and scratch / "student"
        )
        student = stack.enter_context(start("student", make_student, places=places["student"]))
        scorers = {}
        for name, life in lives.items():
            make = partial(
                TeacherWorker,
                spec,
                life=life,
                at=at[name],
                device=device,
                where=where[name],
                scratch=scratch and scratch / name,
            )
            processes = stack.enter_context(start(name, make, places=places[name]))
            scorers[name] = RemoteTeacher(processes, follows=commit_rate(life) is not None)
        yield Workers(student=RemoteStudent(student), teacher=scorers.get("teacher"), anchor=scorers.get("anchor"))


def _thread_environment(spec: CellSpec) -> dict[str, str]:
    """Thread counts must be set before torch is imported in the worker."""
    return {name: str(spec.threads_per_worker) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
