"""Student and teacher as plain classes: each holds its own weights; `actors/` puts each in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sdpo_core.algorithm_specs import Support, TeacherSpec
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
from sdpo_core.backends.table import backend
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.table import engine
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights, Teacher
from sdpo_core.teacher.schedule import commit_rate
from sdpo_core.teacher.table import TeacherPlacement, placement

# The anchor of a policy: the base, as it was.
ANCHOR = TeacherSpec(schedule="static")


class StudentWorker:
    """The policy and, for the local engine, the rollouts it samples. `scratch`: where an engine keeps its logs."""

    def __init__(self, spec: CellSpec, *, folder: Path, device: str, scratch: Path | None = None) -> None:
        torch.set_num_threads(spec.threads_per_worker)
        self._policy = backend(spec).load_policy(spec, folder=folder, device=device)
        self._held_version: int | None = None
        self._engine = engine(spec).load_engine(
            spec, policy=self._policy, folder=folder, device=device, scratch=scratch
        )

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        return self._engine.generate(requests, sampling=sampling)

    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        return self._policy.score(rows, top_k=top_k)

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        return self._policy.update(rows, objective, learning_rate=learning_rate)

    def hold_projection_of(self, teacher: Teacher) -> None:
        """Take the teacher's output projection, unless it is held already."""
        version = teacher.projection_version()
        if version != self._held_version:
            self.hold_projection(teacher.projection())

    def hold_projection(self, projection: Projection) -> None:
        """Keep a projection that came over the wire."""
        self._policy.hold_projection(projection)
        self._held_version = projection.version

    def weights_version(self) -> int:
        return self._policy.weights_version()

    def weights(self) -> dict[str, Tensor]:
        return self._policy.weights()

    def save(self, folder: Path) -> None:
        self._policy.save(folder)

    def load(self, folder: Path) -> None:
        self._policy.load(folder)

    def load_weights(self, folder: Path) -> None:
        self._policy.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self._policy.facts()

    def peak_memory_bytes(self) -> int:
        return self._policy.peak_memory_bytes()


class TeacherWorker:
    """A teacher's own copy of the weights, with its schedule. `scratch`: where one that is served keeps its files."""

    def __init__(
        self,
        spec: CellSpec,
        *,
        life: TeacherSpec,
        at: WeightsAt,
        device: str,
        where: TeacherPlacement = "trainer",
        scratch: Path | None = None,
    ) -> None:
        torch.set_num_threads(spec.threads_per_worker)
        self._scorer = placement(where).load_scorer(spec, life=life, at=at, device=device, scratch=scratch)
        self._rate = commit_rate(life)
        self._makes_room = spec.sglang.sleep

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores | TeacherFailure, ...]:
        found = self._scorer.score(questions, support=support, top_k=top_k)
        if self._makes_room:
            # What torch keeps on a GPU for later is what servers that sleep want back.
            torch.cuda.empty_cache()
        return found

    def projection(self) -> Projection:
        return self._scorer.projection()

    def projection_version(self) -> int:
        return self._scorer.projection_version()

    def follow(self, student: HasWeights) -> bool:
        if self._rate is None:
            return False
        self._scorer.blend(student.weights(), rate=self._rate)
        return True

    def commit(self, weights: dict[str, Tensor]) -> None:
        """One commit of weights that came over the wire."""
        assert self._rate is not None
        self._scorer.blend(weights, rate=self._rate)

    def save(self, folder: Path) -> None:
        self._scorer.save(folder)

    def load(self, folder: Path) -> None:
        self._scorer.load(folder)

    def facts(self) -> WorkerFacts:
        return self._scorer.facts()

    def peak_memory_bytes(self) -> int:
        return self._scorer.peak_memory_bytes()
