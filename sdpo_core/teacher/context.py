"""Teacher context: what the teacher may see and the student may not, chosen for each rollout of a group.

Routing (sdpo: `include_feedback`, `feedback_only_without_demonstration`, `success_threshold`):

    a successful sibling?   feedback?   the teacher sees
    yes                     any         the sibling's response (and the feedback, unless only without a demonstration)
    no                      yes         the feedback
    no                      no          nothing: the rollout has no context

A rollout is never its own demonstration; among several siblings one is drawn at random, and recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sdpo_core.errors import DataError
from sdpo_core.records import GradedRollout, Message, Problem
from sdpo_core.specs import SdpoSpec

_DEMONSTRATION = "\n\nA correct solution:\n\n"
_FEEDBACK = "\n\nFeedback on an earlier attempt that failed:\n\n"
_CLOSING = "\n\nNow solve the original problem correctly."


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherContext:
    """Demonstration and/or feedback; `demonstrator` is the sibling's index in its group."""

    demonstration: str | None = None
    feedback: str | None = None
    demonstrator: int | None = None


def route(
    members: Sequence[GradedRollout], *, spec: SdpoSpec, generator: Callable[[int], np.random.Generator]
) -> tuple[TeacherContext | None, ...]:
    """The context of each rollout of a group; None where there is none.

    `generator(i)` is the random stream that draws rollout i's demonstration.
    """
    successes = [i for i, member in enumerate(members) if member.verdict.score >= spec.success_threshold]
    contexts: list[TeacherContext | None] = []
    for index, member in enumerate(members):
        siblings = [i for i in successes if i != index]
        demonstrator = siblings[int(generator(index).integers(len(siblings)))] if siblings else None
        wants_feedback = spec.include_feedback and not (
            demonstrator is not None and spec.feedback_only_without_demonstration
        )
        feedback = member.verdict.feedback.strip() if wants_feedback else ""
        if demonstrator is None and not feedback:
            contexts.append(None)
            continue
        contexts.append(
            TeacherContext(
                demonstration=None if demonstrator is None else members[demonstrator].text.strip(),
                feedback=feedback or None,
                demonstrator=demonstrator,
            )
        )
    return tuple(contexts)


def teacher_messages(problem: Problem, context: TeacherContext) -> tuple[Message, ...]:
    """The problem's messages with the context after the last user message; earlier turns stay as they are."""
    last = problem.prompt[-1]
    if last.role != "user":
        raise DataError(
            f"{problem.id}: got a prompt that ends with role {last.role!r}, expected 'user'. Fix its shape."
        )
    content = last.content.rstrip()
    if context.demonstration is not None:
        content += _DEMONSTRATION + context.demonstration
    if context.feedback is not None:
        content += _FEEDBACK + context.feedback
    return (*problem.prompt[:-1], replace(last, content=content + _CLOSING))
