"""Student and teacher on Ray actors: one process each, behind the same protocols as the plain classes.

The actors ask for no CPUs: the job that drives a cell holds the cell's CPUs (see docs/decisions/0004), and a cell's two
workers take turns. GPUs are asked for here, since a process must own its device.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import (
    Objective,
    Projection,
    RowScores,
    TeacherQuestion,
    TeacherScores,
    TokenRow,
    TrainRow,
    UpdateStats,
    WeightsAt,
    WorkerFacts,
)
from sdpo_core.cell import Workers
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights, Teacher
from sdpo_core.teacher.schedule import commit_rate
from sdpo_core.workers import ANCHOR, StudentWorker, TeacherWorker

_OWN_ERRORS = {f"{kind.__module__}.{kind.__name__}": kind for kind in (CellError, DataError, SpecError)}


def connect() -> None:
    """Connect to the Ray cluster this job runs on; outside a job, to one of its own."""
    ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)


def _get(reference: Any) -> Any:
    """Wait for a call; our own errors come back as themselves, a dead worker as a CellError."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, CellError | DataError | SpecError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        # What killed the worker ends Ray's report; an error of its start is there as text only.
        reason = str(error).rstrip().splitlines()[-1].strip()
        name, _, message = reason.partition(": ")
        if name in _OWN_ERRORS:
            raise _OWN_ERRORS[name](message) from None
        raise CellError(
            f"worker: got {type(error).__name__} ({reason}), expected a living worker. "
            "Run the experiment again: the cell resumes from its last checkpoint."
        ) from error


class RemoteStudent:
    """`StudentWorker` in another process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._held_version: int | None = None

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        rollouts: tuple[Rollout, ...] = _get(self.actor.generate.remote(requests, sampling=sampling))
        return rollouts

    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        scores: tuple[RowScores, ...] = _get(self.actor.score.remote(rows, top_k=top_k))
        return scores

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        stats: UpdateStats = _get(self.actor.update.remote(rows, objective, learning_rate=learning_rate))
        return stats

    def hold_projection_of(self, teacher: Teacher) -> None:
        """As `StudentWorker`; the projection does not pass through the driver."""
        version = teacher.projection_version()
        if version != self._held_version:
            projection = (
                teacher.actor.projection.remote() if isinstance(teacher, RemoteTeacher) else teacher.projection()
            )
            _get(self.actor.hold_projection.remote(projection))
            self._held_version = version

    def weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = _get(self.actor.weights.remote())
        return weights

    def save(self, folder: Path) -> None:
        _get(self.actor.save.remote(folder))

    def load(self, folder: Path) -> None:
        _get(self.actor.load.remote(folder))

    def load_weights(self, folder: Path) -> None:
        _get(self.actor.load_weights.remote(folder))

    def facts(self) -> WorkerFacts:
        facts: WorkerFacts = _get(self.actor.facts.remote())
        return facts

    def peak_memory_bytes(self) -> int:
        return int(_get(self.actor.peak_memory_bytes.remote()))


class RemoteTeacher:
    """`TeacherWorker` in another process; the student's weights reach it without passing through the driver."""

    def __init__(self, actor: Any, *, follows: bool) -> None:
        self.actor = actor
        self._follows = follows

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores, ...]:
        scores: tuple[TeacherScores, ...] = _get(self.actor.score.remote(questions, support=support, top_k=top_k))
        return scores

    def projection(self) -> Projection:
        projection: Projection = _get(self.actor.projection.remote())
        return projection

    def projection_version(self) -> int:
        return int(_get(self.actor.projection_version.remote()))

    def follow(self, student: HasWeights) -> bool:
        if not self._follows:
            return False
        weights = student.actor.weights.remote() if isinstance(student, RemoteStudent) else student.weights()
        _get(self.actor.commit.remote(weights))
        return True

    def save(self, folder: Path) -> None:
        _get(self.actor.save.remote(folder))

    def load(self, folder: Path) -> None:
        _get(self.actor.load.remote(folder))

    def facts(self) -> WorkerFacts:
        facts: WorkerFacts = _get(self.actor.facts.remote())
        return facts

    def peak_memory_bytes(self) -> int:
        return int(_get(self.actor.peak_memory_bytes.remote()))


@contextmanager
def ray_workers(spec: CellSpec, *, folder: Path, gpus: int, teacher: WeightsAt | None = None) -> Iterator[Workers]:
    """Start a cell's workers on the Ray this process is connected to, and end them with the block.

    `folder`: the base, of the student, of the anchor and, unless `teacher` names other weights, of the teacher. `gpus`
    (0, 1 or 2) is the cell's share: all workers have a part of one; of two the student has one, the others the second.
    """
    lives = {name: life for name, life in (("teacher", spec.teacher), ("anchor", spec.anchor and ANCHOR)) if life}
    own = {0: 0.0, 1: 1 / (1 + len(lives)), 2: 1.0}[gpus]
    rest = own if gpus < 2 else 1 / max(1, len(lives))
    environment = {"env_vars": _thread_environment(spec)}
    options = {"num_cpus": 0, "num_gpus": own, "runtime_env": environment}
    device = "cuda" if gpus else "cpu"
    places = {"teacher": teacher or WeightsAt(folder=folder), "anchor": WeightsAt(folder=folder)}
    actors: list[Any] = []
    try:
        actors.append(ray.remote(StudentWorker).options(**options).remote(spec, folder=folder, device=device))
        scorers: dict[str, RemoteTeacher] = {}
        for name, life in lives.items():
            actor = (
                ray.remote(TeacherWorker)
                .options(**{**options, "num_gpus": rest})
                .remote(spec, life=life, at=places[name], device=device)
            )
            actors.append(actor)
            scorers[name] = RemoteTeacher(actor, follows=commit_rate(life) is not None)
        yield Workers(student=RemoteStudent(actors[0]), teacher=scorers.get("teacher"), anchor=scorers.get("anchor"))
    finally:
        for actor in actors:
            ray.kill(actor)


def _thread_environment(spec: CellSpec) -> dict[str, str]:
    """Thread counts must be set before torch is imported in the worker."""
    return {name: str(spec.threads_per_worker) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
