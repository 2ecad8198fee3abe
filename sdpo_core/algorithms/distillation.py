"""Asking the teacher: questions of one step, answers checked row by row, and the metrics every taught arm has."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from sdpo_core.algorithm_specs import DivergenceSpec, Support
from sdpo_core.algorithms.base import StepTools
from sdpo_core.backends.base import RowScores, TeacherFailure, TeacherQuestion, TeacherScores
from sdpo_core.errors import CellError, DataError
from sdpo_core.teacher.base import Teacher

# Sums over tokens that become means: metric name to the sum's name in `TokenLosses`.
_DIVERGENCE_MEANS = ("divergence", "clipped_fraction")
_SUPPORT_MEANS = ("kl_reverse", "kl_forward", "student_coverage", "teacher_coverage")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The teacher's scores, one a question; None where it failed. `metrics`: what was measured on the way."""

    scores: tuple[TeacherScores | None, ...]
    metrics: Mapping[str, float | None]


def student_width(divergence: DivergenceSpec | None) -> int:
    """How many of its best ids the student must name for a divergence."""
    if divergence is None or divergence.support not in ("student", "union"):
        return 0
    assert divergence.top_k is not None
    return divergence.top_k


def ask(questions: Sequence[TeacherQuestion], *, divergence: DivergenceSpec | None, tools: StepTools) -> Answers:
    """Scores of all questions; more failures than the teacher's spec allows end the cell.

    Raises:
        DataError: an answer of another shape than the question, or too many answers.
        CellError: too many failures. Nothing stands in for the scores of a failed question.
    """
    teacher, life = present(tools.teacher), tools.spec.teacher
    assert life is not None
    support: Support | None = None if divergence is None else divergence.support
    top_k = 0 if divergence is None else divergence.top_k or 0
    start = tools.phases.now()
    with tools.phases.phase("teacher"):
        answers = teacher.score(questions, support=support, top_k=top_k)
        if support == "full":
            tools.student.hold_projection_of(teacher)
    seconds = tools.phases.now() - start
    if len(answers) != len(questions):
        raise DataError(
            f"teacher: got {len(answers)} answers to {len(questions)} questions, expected one each. "
            "Look at the teacher's log."
        )
    answered = [
        check_answer(question, answer, support=support, top_k=top_k)
        for question, answer in zip(questions, answers, strict=True)
    ]
    failures = [answer for answer in answered if isinstance(answer, TeacherFailure)]
    fraction = len(failures) / len(answered) if answered else 0.0
    scores = tuple(None if isinstance(answer, TeacherFailure) else answer for answer in answered)
    if fraction > life.max_failed_fraction:
        raise CellError(
            f"teacher: got no scores for {len(failures)} of {len(scores)} rollouts (the first: {failures[0].reason}), "
            f"expected at most a fraction of {life.max_failed_fraction}. Look at the teacher, or allow more in the arm."
        )
    return Answers(
        scores=scores,
        metrics={
            "cost/teacher_forwards": float(len(questions)),
            "cost/teacher_seconds": seconds,
            "teacher/failed_fraction": fraction,
            "distill/teacher_entropy": _token_mean([s.entropies for s in scores if s is not None]),
            **({"distill/topk_overlap": _overlap(scores)} if "support" in tools.spec.traits else {}),
        },
    )


def check_answer(
    question: TeacherQuestion, answer: TeacherScores | TeacherFailure, *, support: Support | None, top_k: int
) -> TeacherScores | TeacherFailure:
    """The answer, if it fits its question; NaN is a failure, another shape or other ids an error."""
    if isinstance(answer, TeacherFailure):
        return answer
    tokens = len(question.row.response_ids)
    arrays = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    for name, array in arrays.items():
        if len(array) != tokens:
            raise DataError(
                f"teacher: got {name} of shape {array.shape} for {tokens} tokens, expected one entry a token. "
                "The teacher must score the same response ids."
            )
    missing = [name for name in _asked_for(support) if name not in arrays]
    if missing:
        raise DataError(
            f"teacher: got no {' and no '.join(missing)} for support {support!r}, expected them. Look at its log."
        )
    if answer.table is not None and answer.support_ids is not None:
        _check_cells(answer.support_ids, answer.table, asked=question.student_ids, support=support, top_k=top_k)
    damaged = [name for name, array in arrays.items() if np.isnan(array).any()]
    return TeacherFailure(reason=f"NaN in its {', '.join(damaged)}") if damaged else answer


def _asked_for(support: Support | None) -> tuple[str, ...]:
    if support is None:
        return ()
    return ("states",) if support == "full" else ("support_ids", "table")


def _check_cells(
    ids: Int[np.ndarray, "token k"],
    table: Float[np.ndarray, "token cell"],
    *,
    asked: Int[np.ndarray, "token own"] | None,
    support: Support | None,
    top_k: int,
) -> None:
    """Raise DataError unless the ids are those that were asked for, and the table has a cell for each and the tail."""
    if table.shape[1] != ids.shape[1] + 1:
        raise DataError(
            f"teacher: got a table of shape {table.shape} for {ids.shape[1]} ids, expected a cell each and the tail."
        )
    if support == "teacher" and ids.shape[1] != top_k:
        raise DataError(f"teacher: got {ids.shape[1]} ids a token, expected {top_k}. Compare its log.")
    if asked is None:
        return
    is_same = ids.shape == asked.shape and bool((ids == asked).all())
    is_held = support == "union" and bool((ids[:, None, :] == asked[:, :, None]).any(axis=2).all())
    if not (is_same or is_held):
        raise DataError("teacher: got scores at other ids than the student's, expected the same. Compare its log.")


def update_metrics(sums: Mapping[str, float], *, tools: StepTools) -> dict[str, float | None]:
    """What the objective's sums say, by the arm's traits; None for a mean over no token."""
    traits = tools.spec.traits
    trained = sums.get("trained_tokens", 0.0)
    metrics: dict[str, float | None] = {"train/entropy": sums["entropy"] / trained if trained else None}
    if "value" in traits:
        metrics["train/value_loss"] = sums["value_loss"] / trained if trained else None
    if "divergence" in traits:
        tokens = sums.get("tokens", 0.0)
        metrics["distill/tokens"] = tokens
        names = (*_DIVERGENCE_MEANS, *(_SUPPORT_MEANS if "support" in traits else ()))
        metrics |= {f"distill/{name}": sums[name] / tokens if tokens else None for name in names}
    if "support" in traits:
        metrics["distill/tail_share"] = sums["tail"] / sums["cells"] if sums.get("cells") else None
    return metrics


def follow(*, was_updated: bool, tools: StepTools) -> dict[str, float | None]:
    """Commit the student's weights to a teacher that follows it; a step without an optimizer step has none."""
    if tools.teacher is None:
        return {}
    metrics: dict[str, float | None] = {
        "cost/peak_memory_bytes/teacher": float(tools.teacher.peak_memory_bytes()),
    }
    if "follows" in tools.spec.traits:
        start = tools.phases.now()
        with tools.phases.phase("teacher"):
            committed = was_updated and tools.teacher.follow(tools.student)
        metrics["cost/ema_updates"] = float(committed)
        metrics["cost/ema_seconds"] = tools.phases.now() - start
    return metrics


def sampled_kl(student: Sequence[RowScores], teacher: Sequence[TeacherScores | None]) -> float | None:
    """Mean log-ratio student/teacher of the sampled tokens: k1 of the reverse KL."""
    gaps = [s.logps - t.logps for s, t in zip(student, teacher, strict=True) if t is not None]
    return _token_mean(gaps)


def present(teacher: Teacher | None) -> Teacher:
    """The teacher, which an arm that asks for one must have."""
    if teacher is None:
        raise DataError("teacher: got none, expected one. Start the cell's teacher worker.")
    return teacher


def _overlap(scores: Sequence[TeacherScores | None]) -> float | None:
    found = [s.overlap for s in scores if s is not None and s.overlap is not None]
    return _token_mean(found)


def _token_mean(columns: Sequence[np.ndarray]) -> float | None:
    return float(np.concatenate(columns).mean(dtype=np.float64)) if columns else None
