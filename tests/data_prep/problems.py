"""Small problems for grader tests."""

import json
from collections.abc import Mapping
from typing import Any

from sdpo_core.records import Message, Problem

COPPER = {"A": "copper", "B": "zinc", "C": "nickel", "D": "cobalt"}


def make_problem(task: str, *, label: str, reference: Mapping[str, Any]) -> Problem:
    """A problem with the given gold."""
    return Problem(
        id=f"made/{task}/0",
        prompt=(Message(role="user", content="q"),),
        label=label,
        dataset="made",
        task=task,
        domain="physics",
        split="train",
        group_key="0",
        reference=reference,
        source={},
        details={},
    )


def mcq(gold: str = "B", choices: Mapping[str, str] = COPPER) -> Problem:
    """A multiple-choice problem."""
    options = [{"label": label, "text": text} for label, text in choices.items()]
    return make_problem("mcq", label=gold, reference={"answer_key": gold, "choices": options})


def true_false(gold: str = "No") -> Problem:
    """A yes/no problem."""
    return make_problem("true_false", label=gold, reference={"answer": gold})


def tool_call(*calls: tuple[str, Mapping[str, Any]], tools: tuple[str, ...] = ()) -> Problem:
    """A tool-call problem; `tools` are offered beside those that are called."""
    entries = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    names = list(dict.fromkeys([name for name, _ in calls] + list(tools)))
    reference = {"calls": entries, "tool_names": names, "order": "any"}
    return make_problem("tool_call", label=json.dumps(entries), reference=reference)


def spell(word: str = "planet") -> Problem:
    """A word to spell backward."""
    return make_problem("spell_backward", label=word[::-1], reference={"answer": word[::-1], "word": word})
