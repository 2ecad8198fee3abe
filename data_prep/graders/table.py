"""The graders by task, and `grade`: the one way to a verdict."""

from functools import partial
from typing import Literal

from data_prep.feedback import Finding, feedback_text
from data_prep.graders import compat_lasgroup
from data_prep.graders.base import Grader
from data_prep.graders.called import PREFIX, grade_called
from data_prep.graders.exact import grade_exact
from data_prep.graders.mcq import grade_mcq, grade_true_false
from data_prep.graders.spell_backward import grade_spell_backward
from data_prep.graders.tool_call import grade_tool_call
from sdpo_core.errors import DataError
from sdpo_core.records import Problem, Verdict
from sdpo_core.specs import FeedbackLevel

GRADERS: dict[str, Grader] = {
    "mcq": grade_mcq,
    "true_false": grade_true_false,
    "tool_call": grade_tool_call,
    "spell_backward": grade_spell_backward,
    "exact": grade_exact,
}

# "standard" is what cells train on. "strict": as published numbers are counted. "compat-lasgroup": the verdicts of the
# reference's scorers, defects included; None where they have none for a task.
GradeMode = Literal["standard", "strict", "compat-lasgroup"]
_STRICT: dict[str, Grader] = {**GRADERS, "tool_call": partial(grade_tool_call, is_strict=True)}


def is_task(task: str) -> bool:
    """Whether responses of a task can be graded."""
    return task in GRADERS or task.startswith(PREFIX)


def grade(problem: Problem, response: str, truncated: bool, *, level: FeedbackLevel) -> Verdict:
    """Verdict on a response; positional as `sdpo_core.records.Grade` is, so that `level` alone is bound before.

    Raises:
        DataError: the problem's reference is broken, or its task has no grader. A response never raises.
        SpecError: a grader of the user's own cannot be imported, or returns no score.
    """
    if problem.task.startswith(PREFIX):
        return grade_called(problem, response=response, level=level)
    return _verdict(problem, response, truncated, level=level, graders=GRADERS)


def score(problem: Problem, response: str, truncated: bool, *, mode: GradeMode) -> float | None:
    """The score in a mode; None where the mode has no rule for the task."""
    if mode == "compat-lasgroup":
        scorer = compat_lasgroup.SCORERS.get(problem.task)
        return None if scorer is None else scorer(problem, response)
    if mode == "strict" and not problem.task.startswith(PREFIX):
        return _verdict(problem, response, truncated, level="none", graders=_STRICT).score
    return grade(problem, response, truncated, level="none").score


def _verdict(
    problem: Problem, response: str, truncated: bool, *, level: FeedbackLevel, graders: dict[str, Grader]
) -> Verdict:
    if problem.task not in graders:
        raise DataError(
            f"{problem.id}: got task {problem.task!r}, expected one of {', '.join(graders)}, or "
            f"{PREFIX}<module>:<function>. Correct the row."
        )
    finding: Finding = graders[problem.task](problem, response=response, truncated=truncated)
    return Verdict(
        score=finding.score,
        reason=finding.reason,
        feedback=feedback_text(problem.task, finding=finding, level=level),
        format_ok=finding.format_ok,
        answer=finding.answer,
    )
