"""A teacher at the far end of a wire: what it was asked is kept, what it answers may be spoiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import Projection, TeacherFailure, TeacherQuestion, TeacherScores, WorkerFacts
from sdpo_core.teacher.base import HasWeights, Teacher

Answer = TeacherScores | TeacherFailure
Spoil = Callable[[tuple[TeacherScores, ...]], tuple[Answer, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One call of the teacher."""

    questions: tuple[TeacherQuestion, ...]
    support: Support | None
    top_k: int


class WireTeacher:
    """`teacher`, with its answers passed through `spoil`."""

    def __init__(self, teacher: Teacher | None, spoil: Spoil = lambda answers: answers) -> None:
        assert teacher is not None
        self._teacher = teacher
        self._spoil = spoil
        self.asked: list[Asked] = []

    def score(self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int) -> tuple[Answer, ...]:
        self.asked.append(Asked(questions=tuple(questions), support=support, top_k=top_k))
        answers = self._teacher.score(questions, support=support, top_k=top_k)
        return self._spoil(tuple(answer for answer in answers if isinstance(answer, TeacherScores)))

    def projection(self) -> Projection:
        return self._teacher.projection()

    def projection_version(self) -> int:
        return self._teacher.projection_version()

    def follow(self, student: HasWeights) -> bool:
        return self._teacher.follow(student)

    def save(self, folder: Path) -> None:
        self._teacher.save(folder)

    def load(self, folder: Path) -> None:
        self._teacher.load(folder)

    def facts(self) -> WorkerFacts:
        return self._teacher.facts()

    def peak_memory_bytes(self) -> int:
        return self._teacher.peak_memory_bytes()


def failing(*places: int) -> Spoil:
    """The answers at `places` fail."""
    return lambda answers: tuple(
        TeacherFailure(reason="timeout") if place in places else answer for place, answer in enumerate(answers)
    )
