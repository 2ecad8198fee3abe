"""What graders share: the task protocol and how a final answer is found in a response."""

import re
from dataclasses import dataclass
from typing import Protocol

from data_prep.feedback import Finding
from sdpo_core.records import Problem

_THINK_OPEN = re.compile(r"<think>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</think>", re.IGNORECASE)
_ANSWER_OPEN = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_CLOSE = re.compile(r"</answer>", re.IGNORECASE)
_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


class Grader(Protocol):
    """Reads one response. A bad reference raises DataError; a response never raises."""

    def __call__(self, problem: Problem, *, response: str, truncated: bool) -> Finding: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerBlock:
    """The text of the last answer block, and whether its closing tag stands."""

    text: str
    is_closed: bool


def visible_text(response: str) -> str | None:
    """What stands after the last closed reasoning; None when reasoning was opened and did not end."""
    closings = list(_THINK_CLOSE.finditer(response))
    visible = response[closings[-1].end() :] if closings else response
    return None if _THINK_OPEN.search(visible) else visible


def last_answer_block(text: str) -> AnswerBlock | None:
    """The last answer block of a text."""
    openings = list(_ANSWER_OPEN.finditer(text))
    if not openings:
        return None
    start = openings[-1].end()
    closing = _ANSWER_CLOSE.search(text, start)
    return AnswerBlock(text=text[start : closing.start() if closing else len(text)], is_closed=closing is not None)


def last_boxed(text: str) -> str | None:
    """The content of the last balanced \\boxed{...}, in one pass over the braces."""
    found: str | None = None
    open_braces: list[tuple[bool, int]] = []
    for brace in _BRACES.finditer(text):
        token = brace[0]
        if token in ("\\{", "\\}"):
            continue
        if token != "}":
            open_braces.append((token.startswith("\\boxed"), brace.end()))
        elif open_braces:
            is_box, start = open_braces.pop()
            found = text[start : brace.start()] if is_box else found
    return found
