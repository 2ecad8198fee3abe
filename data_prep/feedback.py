"""Feedback: what a verdict says of a response that is not right, by reason code and level.

`none`: nothing. `diagnostic`: what is wrong with this response, never what the right answer is. `reveal`: adds the
gold. Text is deterministic, one paragraph, at most 400 characters; at most 80 of them are quoted from the response,
without chat-template tokens or reasoning and answer tags, since the text goes into a teacher prompt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sdpo_core.specs import FeedbackLevel

CORRECT = "correct"
MAX_CHARACTERS = 400
MAX_QUOTE = 80
MAX_NAME = 38  # two names, a tool and an argument, fit into MAX_QUOTE

_MAX_GOLD = 240
_TEMPLATE_TOKEN = re.compile(
    r"<\|[^<>|]{0,40}\|>"
    r"|</?(?:think|thinking|answer|reasoning|tool_call|tool_response|s|bos|eos|pad|unk|start_of_turn|end_of_turn)>"
    r"|\[/?(?:INST|SYS|TOOL_CALLS)\]"
    r"|<</?SYS>>",
    re.IGNORECASE,
)

# Reason codes by task. Fields in braces are facts of the finding. No text names the gold. Option letters are only
# named where the response named them or where all labels of the row are listed.
TEXTS: Mapping[str, Mapping[str, str]] = {
    "mcq": {
        "no_answer": "No final answer was found. After the reasoning, give one option label in an answer block.",
        "truncated": "The response was cut at the length limit before its final answer. Reason more briefly.",
        "open_reasoning": "No final answer was found: the reasoning did not end. Close it, then give one option label.",
        "multiple_labels": "The answer names more than one label: {quote}. Give exactly one of {labels}.",
        "invalid_label": "The answer was read as {quote}, which is not one of the labels {labels}.",
        "label_text_conflict": "The answer {quote} contradicts itself: the text is not that of the label.",
        "wrong_label": "Option {label} is not right.",
    },
    "true_false": {
        "no_answer": "No final answer was found. After the reasoning, give yes or no in an answer block.",
        "truncated": "The response was cut at the length limit before its final answer. Reason more briefly.",
        "open_reasoning": "No final answer was found: the reasoning did not end. Close it, then give yes or no.",
        "multiple_labels": "The answer says both yes and no: {quote}. Give exactly one of them.",
        "invalid_label": "The answer was read as {quote}, which is neither yes nor no.",
        "wrong_label": "The answer {label} is not right.",
    },
    "exact": {
        "no_answer": "No answer was given.",
        "truncated": "The response was cut at the length limit before its final answer. Reason more briefly.",
        "open_reasoning": "No answer was given: the reasoning did not end.",
        "wrong_answer": "The answer {quote} is not right.",
    },
    "tool_call": {
        "no_action": "No tool call was found. Write a line Action: with a tool's name, then Action Input:.",
        "truncated": "The response was cut at the length limit before its tool calls were complete.",
        "open_reasoning": "No tool call was found: the reasoning did not end. Close it, then write the calls.",
        "no_input": "The call to {tool} has no Action Input: line with a JSON object.",
        "invalid_json": "The input of the call to {tool} is not valid JSON: {detail} (character {position}).",
        "not_object": "The input of the call to {tool} is {kind}, and must be one JSON object.",
        "duplicate_key": "The input of the call to {tool} gives the argument {argument} twice.",
        "unknown_tool": "There is no tool {tool}. The tools are: {tools}.",
        "wrong_tool": "The call to {tool} is not among the calls that this request needs.",
        "call_count": "The response makes {made}, which is not the number of calls that this request needs.",
        "missing_argument": "The call to {tool} lacks: {arguments}.",
        "unexpected_argument": "The call to {tool} gives what is not needed: {arguments}.",
        "wrong_type": "The call to {tool} has a value of the wrong type in: {arguments}.",
        "wrong_value": "The call to {tool} has a wrong value in: {arguments}.",
    },
    "spell_backward": {
        "no_answer": "No answer was given.",
        "truncated": "The answer was cut at the length limit.",
        "open_reasoning": "No answer was given: the reasoning did not end.",
        "wrong_length": "Got {read} letters, expected {expected}; {hits} in the right place.",
        "wrong_letters": "{hits} of {expected} letters are in the right place; wrong: {places}.",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a grader found. `facts` fill the text of `reason`; `gold` is what level `reveal` adds."""

    reason: str
    gold: str
    format_ok: bool
    score: float = 0.0
    answer: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


def feedback_text(task: str, *, finding: Finding, level: FeedbackLevel) -> str:
    """The feedback of a finding; empty for a right answer and at level `none`."""
    if finding.reason == CORRECT or level == "none":
        return ""
    text = TEXTS[task][finding.reason].format(**finding.facts)
    if level == "diagnostic":
        return _cut(text, limit=MAX_CHARACTERS)
    gold = f" The right answer is {_cut(finding.gold, limit=_MAX_GOLD)}"
    return _cut(text, limit=MAX_CHARACTERS - len(gold)) + gold


def quote(text: str, *, limit: int = MAX_QUOTE) -> str:
    """A piece of a response, safe to stand in a prompt: one line, no template tokens or tags, bounded."""
    return _cut(_neutral(text[: 50 * limit]), limit=limit)


def listing(names: Sequence[str], *, limit: int) -> str:
    """Names in a row, as many as fit."""
    return _cut(", ".join(names), limit=limit)


def _neutral(text: str) -> str:
    # Half characters (from JSON escapes such as \ud800) cannot be written to a UTF-8 file.
    clean = " ".join(text.encode("utf-8", errors="replace").decode("utf-8").split())
    while True:
        # Taking a token out may join its neighbours to another one.
        shorter = " ".join(_TEMPLATE_TOKEN.sub("", clean).split())
        if shorter == clean:
            return clean
        clean = shorter


def _cut(text: str, *, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
