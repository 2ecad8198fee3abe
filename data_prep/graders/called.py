"""Graders of the user's own: task `call:<module>:<function>` names a callable by its import path.

    def grade(reference: Mapping[str, Any], response: str) -> float | tuple[float, str]

It returns a score in [0, 1], and feedback if it has any. What it raises is an error of the grader and ends the cell: a
response that it cannot judge is for it to score.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from data_prep.feedback import CORRECT, MAX_CHARACTERS, quote
from sdpo_core.errors import SpecError
from sdpo_core.records import Problem, Verdict
from sdpo_core.specs import FeedbackLevel

PREFIX = "call:"
Called = Callable[[Mapping[str, Any], str], float | tuple[float, str]]


def grade_called(problem: Problem, *, response: str, level: FeedbackLevel) -> Verdict:
    """The verdict of the callable that the problem's task names; its feedback is bounded and neutralised as ours is.

    Raises:
        SpecError: no such callable, or a result that is no score.
    """
    result = called(problem.task)(problem.reference, response)
    score, feedback = result if isinstance(result, tuple) else (result, "")
    is_score = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    if not is_score or not 0.0 <= score <= 1.0 or not isinstance(feedback, str):
        raise SpecError(
            f"{problem.task}: got {result!r} for {problem.id}, expected a score from 0 to 1, or such a score and a "
            "text. Correct the grader."
        )
    is_right = score == 1.0
    told = "" if is_right or level == "none" else quote(feedback, limit=MAX_CHARACTERS)
    return Verdict(score=float(score), reason=CORRECT if is_right else "wrong", feedback=told, format_ok=True)


@cache
def called(task: str) -> Called:
    """The callable that a task names."""
    module, _, name = task.removeprefix(PREFIX).partition(":")
    try:
        found: Called = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"{task}: got {error}, expected {PREFIX}<module>:<function> of a module that can be imported. "
            "Put its folder on PYTHONPATH."
        ) from None
    if not callable(found):
        raise SpecError(f"{task}: got a {type(found).__name__}, expected a function. Name the grader itself.")
    return found
