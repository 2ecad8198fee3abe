"""The seam between the step loop and an algorithm: graded groups in, mini-batches with an objective out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from sdpo_core.algorithm_specs import OptimizationSpec
from sdpo_core.backends.base import Objective, RowScores, TokenRow, TrainRow, UpdateStats, WorkerFacts
from sdpo_core.objectives.reduction import token_weights
from sdpo_core.phases import PhaseClock
from sdpo_core.records import GradedRollout, Group, Problem, Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights, Teacher
from sdpo_core.text import ChatTokenizer


@runtime_checkable
class Student(HasWeights, Protocol):
    """The student's worker: policy and rollouts."""

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]: ...

    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]: ...

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats: ...

    def hold_projection_of(self, teacher: Teacher) -> None: ...

    def weights_version(self) -> int: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTools:
    """What an algorithm may use in one training step."""

    step: int
    spec: CellSpec
    text: ChatTokenizer
    student: Student
    teacher: Teacher | None
    anchor: Teacher | None
    phases: PhaseClock


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherNote:
    """What the teacher saw for one rollout, for the samples of the journal."""

    teacher_prompt: str
    demonstrator: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Mini-batches of one step (each is one optimizer step; an empty one is skipped), and what was measured.

    `notes` is keyed by (group, member).
    """

    minibatches: tuple[tuple[TrainRow, ...], ...]
    objective: Objective
    metrics: Mapping[str, float | None]
    notes: Mapping[tuple[int, int], TeacherNote] = field(default_factory=dict)


@runtime_checkable
class Algorithm(Protocol):
    """One arm's way to turn graded groups into an update. It holds no state between steps."""

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Raise DataError before the first step when the training rows lack what the algorithm needs."""
        ...

    def accepts(self, group: Group, *, tools: StepTools) -> bool:
        """False sends the group back: another problem is polled in its place."""
        ...

    def build(self, groups: Sequence[Group], *, num_rejected: int, tools: StepTools) -> Batch: ...

    def after_update(self, updates: Sequence[UpdateStats], *, tools: StepTools) -> Mapping[str, float | None]:
        """Commit what follows the student, and turn the objective's sums into metrics."""
        ...


def token_row(member: GradedRollout) -> TokenRow:
    """The rollout's own prompt and response."""
    return TokenRow(prompt_ids=member.rollout.prompt_ids, response_ids=member.rollout.response_ids)


def deal(count: int, hands: int) -> tuple[tuple[int, ...], ...]:
    """Indices 0 .. count-1 dealt round to `hands`, so that a group's rollouts are spread over the mini-batches."""
    return tuple(tuple(range(hand, count, hands)) for hand in range(hands))


def row_weights(lengths: Sequence[int], active: Sequence[bool], *, spec: OptimizationSpec) -> list[float]:
    """`token_weights` of a step's rollouts, with the denominators of each one's mini-batch or of the step."""
    if spec.scope == "step":
        return token_weights(lengths, active, reduction=spec.reduction)
    weights = [0.0] * len(lengths)
    for hand in deal(len(lengths), spec.minibatches):
        parts = token_weights([lengths[i] for i in hand], [active[i] for i in hand], reduction=spec.reduction)
        for index, weight in zip(hand, parts, strict=True):
            weights[index] = weight
    return weights


def minibatches(rows: Sequence[TrainRow], *, spec: OptimizationSpec) -> tuple[tuple[TrainRow, ...], ...]:
    """The step's rows by mini-batch; those that carry no term are left out."""
    hands = deal(len(rows), spec.minibatches)
    return tuple(tuple(rows[i] for i in hand if rows[i].weight or rows[i].distill_weight) for hand in hands)
