"""What a teacher promises: scores of the student's responses, and weights with a life of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import Projection, TeacherFailure, TeacherQuestion, TeacherScores, WorkerFacts


@runtime_checkable
class HasWeights(Protocol):
    """Whoever a teacher can follow."""

    def weights(self) -> dict[str, Tensor]: ...


@runtime_checkable
class Teacher(Protocol):
    """The teacher never samples: it reads the student's response under its own prompt."""

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores | TeacherFailure, ...]:
        """One answer a question, in order (see `ScoringModel.score`)."""
        ...

    def projection(self) -> Projection: ...

    def projection_version(self) -> int:
        """The version `projection` would carry, without moving it."""
        ...

    def follow(self, student: HasWeights) -> bool:
        """Commit the student's weights by the schedule; False when the schedule has no commit."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...
