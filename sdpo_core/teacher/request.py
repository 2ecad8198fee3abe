"""One teacher request: the teacher's prompt, bounded, and the question made of it and a response's own ids.

OPD asks with the plain prompt, SDPO and OPSD with a context in the last user message; all end with the header that the
student's prompt ends with. A prompt that is too long loses the middle of what was put in, never its frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from sdpo_core.backends.base import TeacherQuestion, TokenRow
from sdpo_core.errors import DataError
from sdpo_core.records import Problem
from sdpo_core.teacher.context import TeacherContext, teacher_messages
from sdpo_core.text import ChatTokenizer

# Stands where text was cut out. Its spaces keep what it joins from becoming one word, or a special token.
MARK = " ... "
# Tokens of its own that a cut text keeps at least: fewer say nothing, and the rollout counts as without context.
LEAST_TOKENS = 8
_TEXTS = ("demonstration", "privileged", "feedback")


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherPrompt:
    """A rendered teacher prompt and its ids. `is_cut`: some of the context was left out to fit."""

    text: str
    ids: tuple[int, ...]
    is_cut: bool


def teacher_prompt(
    problem: Problem, context: TeacherContext | None, *, text: ChatTokenizer, limit: int
) -> TeacherPrompt | None:
    """The teacher's prompt in at most `limit` ids; None where not even its frame and a little of each text fit.

    The frame is all but the demonstration, the feedback and the privileged text. These lose tokens from their middle in
    proportion to their lengths; each keeps `LEAST_TOKENS` beside the mark, or all it has.
    """
    prompt = _prompt(problem, context, text=text, is_cut=False)
    if len(prompt.ids) <= limit:
        return prompt
    if context is None:
        return None
    # Neutralised before the cut: a special token is then plain text, which a cut may divide.
    whole = {name: text.neutralise(value) for name in _TEXTS if (value := getattr(context, name)) is not None}
    spans = {name: text.spans(value) for name, value in whole.items()}
    total = sum(len(places) for places in spans.values())
    mark = len(text.spans(MARK))
    room = limit - len(prompt.ids) + total
    while total:
        left = {
            name: _cut(value, spans=spans[name], tokens=room * len(spans[name]) // total - mark, mark=mark)
            for name, value in whole.items()
        }
        shorter = replace(
            context,
            demonstration=left.get("demonstration"),
            privileged=left.get("privileged"),
            feedback=left.get("feedback"),
        )
        prompt = _prompt(problem, shorter, text=text, is_cut=True)
        if len(prompt.ids) <= limit:
            return prompt
        if room <= 0:
            break
        # The tokens beside a cut can merge otherwise than inside the whole text, so that a few too many may be left.
        room -= len(prompt.ids) - limit
    return None


def question(
    prompt: TeacherPrompt,
    row: TokenRow,
    *,
    text: ChatTokenizer,
    student_ids: Int[np.ndarray, "token k"] | None = None,
) -> TeacherQuestion:
    """The response of the student's `row` under the teacher's prompt, id for id.

    Response token t is predicted at position P + t - 1 of its own row, P that row's prompt length.

    Raises:
        DataError: one of the prompts does not end with the header that opens the assistant's turn.
    """
    header = text.header_ids
    for side, ids in (("student", row.prompt_ids), ("teacher", prompt.ids)):
        end = ids[len(ids) - len(header) :]
        if not header or end != header:
            raise DataError(
                f"question: got a {side} prompt that ends with ids {list(end)}, expected the header "
                f"{list(header)} of the assistant's turn. Render both prompts with one tokenizer and its chat template."
            )
    return TeacherQuestion(row=TokenRow(prompt_ids=prompt.ids, response_ids=row.response_ids), student_ids=student_ids)


def _prompt(problem: Problem, context: TeacherContext | None, *, text: ChatTokenizer, is_cut: bool) -> TeacherPrompt:
    rendered = text.render(teacher_messages(problem, context))
    return TeacherPrompt(text=rendered, ids=text.rendered_ids(rendered), is_cut=is_cut)


def _cut(value: str, *, spans: Sequence[tuple[int, int]], tokens: int, mark: int) -> str:
    """`value` with `tokens` of its tokens left, half at either end; whole where the mark would cost what is saved.

    Characters stay whole: one that is half inside goes.
    """
    tokens = max(LEAST_TOKENS, tokens)
    if tokens + mark >= len(spans):
        return value
    tail = tokens // 2
    return value[: spans[tokens - tail][0]] + MARK + value[spans[-tail - 1][1] :]
