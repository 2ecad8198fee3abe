"""Options in another order: takes the letter of the gold away as a shortcut, and no other.

Each row has its own order, drawn from the seed and its id. Gold, labels and prompt move together.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

from sdpo_core.records import Message, Problem

# The flag of rows that stay as they are.
REFUSED = "options_not_permuted"

# Options that speak of others by letter or place: in another order they would say something else.
_REFERS = re.compile(
    r"(?i:\b(?:all|none|both|neither|either|any|each|two|three)\b[^.]*\b(?:above|below|these|following|options?)\b)"
    r"|(?i:\b(?:both|neither|either|only|options?|choices?|answers?))\s+\(?[A-Z]\)?(?![\w-])"
    r"|(?i:\bboth\s+\(?[a-h]\)?\s*(?:and|&)\s*\(?[a-h]\)?(?![\w-]))"
    r"|\b[A-Z]\)?\s*(?:,|&|and|or|nor)\s*\(?[A-Z]\)?(?![\w-])\s*(?:$|\.|are|is|only|together)",
)


def permuted(problem: Problem, *, seed: int) -> Problem:
    """The problem with its options in another order; one whose options cannot be moved is flagged instead."""
    choices = {choice["label"]: choice["text"] for choice in problem.reference.get("choices", ())}
    if not choices:
        return problem
    labels = list(choices)
    order = sorted(labels, key=lambda label: hashlib.sha256(f"{seed}:{problem.id}:{label}".encode()).digest())
    moved = dict(zip(labels, (choices[label] for label in order), strict=True))
    user = problem.prompt[-1]
    content = None if _refer(choices) else _rewritten(user.content, choices=choices, moved=moved)
    if content is None:
        return replace(problem, flags=(*problem.flags, REFUSED))
    gold = labels[order.index(problem.label)]
    return replace(
        problem,
        prompt=(*problem.prompt[:-1], Message(role=user.role, content=content)),
        label=gold,
        reference={
            **problem.reference,
            "answer_key": gold,
            "choices": [{"label": label, "text": text} for label, text in moved.items()],
        },
    )


def _refer(choices: Mapping[str, str]) -> bool:
    return any(_REFERS.search(text) for text in choices.values())


def _rewritten(prompt: str, *, choices: Mapping[str, str], moved: Mapping[str, str]) -> str | None:
    """The prompt with other texts behind its labels, every blank where it was; None where it does not show them so."""
    lines = (rf"^\(?{re.escape(label)}[:.)]\s*({re.escape(text)})\s*" for label, text in choices.items())
    shown = list(re.finditer("".join(lines), prompt, re.MULTILINE))
    if len(shown) != 1:
        return None
    for number, text in reversed(list(enumerate(moved.values(), start=1))):
        start, end = shown[0].span(number)
        prompt = prompt[:start] + text + prompt[end:]
    return prompt
