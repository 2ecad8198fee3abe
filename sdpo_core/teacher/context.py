"""Teacher context: what the teacher may see and the student may not, chosen for each rollout of a group.

Routing (sdpo: `include_feedback`, `feedback_only_without_demonstration`, `success_threshold`, `demonstration`):

    a successful sibling?   feedback?   the teacher sees
    yes                     any         the sibling's response (and the feedback, unless only without a demonstration)
    no                      yes         the feedback
    no                      no          nothing: the rollout has no context

A rollout is its own demonstration only with `exclude_self` False. Among several siblings `rule` decides; a random draw
is recorded. OPSD routes nothing: its teacher sees the problem's privileged text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger

import numpy as np

from sdpo_core.algorithm_specs import DemonstrationSpec, OpsdSpec, SdpoSpec
from sdpo_core.errors import DataError
from sdpo_core.records import GradedRollout, Message, Problem, plain_text

_log = getLogger(__name__)

# The small base models are warmed up on these texts: another wording is another base.
_SOLUTION = "\n\nA correct solution:\n\n"
_FEEDBACK = "\n\nFeedback on an earlier attempt that failed:\n\n"
_REASON_FIRST = "\n\nBefore you answer, reason through this solution step by step in your own words."
_CLOSING = "\n\nNow solve the original problem correctly."

_FLAGS = re.DOTALL | re.IGNORECASE
_ANSWER = re.compile(r"<answer>.*?</answer>", _FLAGS)
_AFTER_ANSWER = re.compile(r"(?<=</answer>).*", _FLAGS)
_THINKING = re.compile(r"<think>.*?</think>\s*", _FLAGS)
# What is left of a block that the chat template opened.
_OPENED_THINKING = re.compile(r".*</think>\s*", _FLAGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherContext:
    """What one teacher prompt adds to the problem. `demonstrator` is the sibling's index in its group.

    `is_reason_first` asks the teacher to follow the solution in its own words before it answers.
    """

    demonstration: str | None = None
    feedback: str | None = None
    privileged: str | None = None
    demonstrator: int | None = None
    is_reason_first: bool = False


def route(
    members: Sequence[GradedRollout], *, spec: SdpoSpec, generator: Callable[[int], np.random.Generator]
) -> tuple[TeacherContext | None, ...]:
    """The context of each rollout of a group; None where there is none.

    `generator(i)` is the random stream that draws rollout i's demonstration.
    """
    demonstrations = {
        index: text
        for index, member in enumerate(members)
        if member.verdict.score >= spec.success_threshold and (text := _demonstration(member.text, spec.demonstration))
    }
    contexts: list[TeacherContext | None] = []
    for index, member in enumerate(members):
        siblings = [i for i in demonstrations if i != index or not spec.demonstration.exclude_self]
        choose = _RULES[spec.demonstration.rule]
        demonstrator = choose(siblings, members, partial(generator, index)) if siblings else None
        wants_feedback = spec.include_feedback and not (
            demonstrator is not None and spec.feedback_only_without_demonstration
        )
        feedback = member.verdict.feedback.strip() if wants_feedback else ""
        if demonstrator is None and not feedback:
            contexts.append(None)
            continue
        contexts.append(
            TeacherContext(
                demonstration=None if demonstrator is None else demonstrations[demonstrator],
                feedback=feedback or None,
                demonstrator=demonstrator,
            )
        )
    return tuple(contexts)


def privileged_context(problem: Problem, *, spec: OpsdSpec) -> TeacherContext | None:
    """The problem's privileged text; None where it has none."""
    text = (problem.privileged or "").strip()
    return TeacherContext(privileged=text, is_reason_first=spec.prompt == "reason_first") if text else None


def check_privileged(problems: Sequence[Problem]) -> None:
    """Warn where some problems have no privileged text; DataError where none has."""
    empty = sum(not (problem.privileged or "").strip() for problem in problems)
    if empty == len(problems):
        raise DataError(
            f"opsd: got no privileged text in any of {len(problems)} problems, expected at least one. Choose a data "
            "set whose rows have the field `privileged`, or another arm."
        )
    if empty:
        _log.warning(
            "opsd: %d of %d problems have no privileged text; nothing is learned of them", empty, len(problems)
        )


def teacher_messages(problem: Problem, context: TeacherContext | None) -> tuple[Message, ...]:
    """The problem's messages with the context after the last user message; earlier turns stay as they are.

    Without a context the prompt is the student's.
    """
    for message in problem.prompt:
        plain_text(message.content, where=problem.id)
    if context is None:
        return problem.prompt
    last = problem.prompt[-1]
    if last.role != "user":
        raise DataError(
            f"{problem.id}: got a prompt that ends with role {last.role!r}, expected 'user'. Fix its shape."
        )
    content = last.content.rstrip()
    for solution in (context.demonstration, context.privileged):
        if solution is not None:
            content += _SOLUTION + solution
    if context.feedback is not None:
        content += _FEEDBACK + context.feedback
    if context.is_reason_first:
        content += _REASON_FIRST
    return (*problem.prompt[:-1], replace(last, content=content + _CLOSING))


def _demonstration(text: str, spec: DemonstrationSpec) -> str:
    """What is shown of a response; empty where it may not demonstrate."""
    if spec.single_answer and len(_ANSWER.findall(text)) != 1:
        return ""
    if spec.strip_thinking:
        text = _OPENED_THINKING.sub("", _THINKING.sub("", text))
    if spec.stop_at_answer:
        text = _AFTER_ANSWER.sub("", text, count=1)
    return text.strip()


# (siblings, members of the group, random stream) -> the sibling who demonstrates
_Rule = Callable[[Sequence[int], Sequence[GradedRollout], Callable[[], np.random.Generator]], int]
_RULES: dict[str, _Rule] = {
    "random": lambda siblings, _, generator: siblings[int(generator().integers(len(siblings)))],
    "first": lambda siblings, _, __: siblings[0],
    "shortest": lambda siblings, members, _: min(siblings, key=lambda i: len(members[i].rollout.response_ids)),
}
