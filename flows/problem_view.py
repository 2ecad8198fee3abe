"""One problem as the student would see it, as its teacher would, and as the grader does."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_prep.grade_file import find_problems
from data_prep.graders.table import grade
from data_prep.warmups.table import WARMUPS
from sdpo_core.errors import DataError
from sdpo_core.records import Message, Problem
from sdpo_core.specs import FeedbackLevel
from sdpo_core.teacher.context import TeacherContext, teacher_messages

LEVEL: FeedbackLevel = "diagnostic"


def view(problem_id: str, *, data: Path) -> str:
    """The problem as text.

    Raises:
        DataError: no data set prepared below `data` holds it.
    """
    problem = find_problems(data, ids={problem_id}).get(problem_id)
    if problem is None:
        raise DataError(
            f"problem {problem_id}: got no such id below {data}, expected one of a prepared data set. "
            "Run `sdpo prepare` for it; ids stand in the .jsonl files of its folder."
        )
    return "\n".join(_lines(problem))


def _lines(problem: Problem) -> Iterator[str]:
    yield f"=== {problem.id} ({problem.split}): task {problem.task}, domain {problem.domain}"
    yield from _messages("student", problem.prompt)
    for title, context in _contexts(problem):
        yield from _messages(f"teacher with {title}", teacher_messages(problem, context))
    yield f"\n--- grader (never in a student's prompt)\nlabel: {problem.label}"
    yield f"reference: {json.dumps(dict(problem.reference), ensure_ascii=False)}"
    yield f"details: {json.dumps(dict(problem.details), ensure_ascii=False)}"
    yield f"flags: {', '.join(problem.flags) or 'none'}"


def _contexts(problem: Problem) -> Iterator[tuple[str, TeacherContext]]:
    """A right response as a sibling's, the feedback on a wrong one, and the privileged text, where there are any."""
    if problem.task in WARMUPS:
        task = WARMUPS[problem.task]
        yield "a right sibling", TeacherContext(demonstration=task.right(problem))
        wrong = task.wrong(problem, np.random.Generator(np.random.Philox(key=0)))
        yield (
            "feedback on a wrong response",
            TeacherContext(feedback=grade(problem, wrong, False, level=LEVEL).feedback),
        )
    elif feedback := grade(problem, "", False, level=LEVEL).feedback:
        yield "feedback on an empty response", TeacherContext(feedback=feedback)
    if problem.privileged:
        yield "the privileged text", TeacherContext(privileged=problem.privileged)


def _messages(title: str, messages: Sequence[Message]) -> Iterator[str]:
    yield f"\n--- {title}"
    for message in messages:
        yield f"[{message.role}]\n{message.content}"
