"""The graders by task, and `grade`: the one way to a verdict."""

from data_prep.feedback import Finding, feedback_text
from data_prep.graders.base import Grader
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
}


def grade(problem: Problem, response: str, truncated: bool, *, level: FeedbackLevel) -> Verdict:
    """Verdict on a response; positional as `sdpo_core.records.Grade` is, so that `level` alone is bound before.

    Raises:
        DataError: the problem's reference is broken, or its task has no grader. A response never raises.
    """
    if problem.task not in GRADERS:
        raise DataError(f"{problem.id}: got task {problem.task!r}, expected one of {', '.join(GRADERS)}.")
    finding: Finding = GRADERS[problem.task](problem, response=response, truncated=truncated)
    return Verdict(
        score=finding.score,
        reason=finding.reason,
        feedback=feedback_text(problem.task, finding=finding, level=level),
        format_ok=finding.format_ok,
        answer=finding.answer,
    )
