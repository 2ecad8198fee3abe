"""The verdicts of lasgroup/SDPO's scorers, defects included, so that the difference to ours can be shown.

Not for training: nested arguments never score, an unreadable input counts as an empty one, the inputs of several calls
are merged, `true` equals 1. What each does is in docs/data.md, "Beside the reference's scorers".
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sdpo_core.records import Problem

_ACTION = re.compile(r"Action:\s*(\w+)")
# Ends at the first closing brace: an input with an object inside is cut short and no JSON.
_INPUT = re.compile(r"Action Input:\s*(\{.*?\})", re.DOTALL)


def score_mcq(problem: Problem, response: str) -> float:
    """1 iff the gold letter is all that stands after the last opening answer tag; in the response without a tag."""
    answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return float(answer == problem.label)


def score_tool_call(problem: Problem, response: str) -> float:
    """1 iff names agree as multisets and the merged inputs agree by Python's equality."""
    names = Counter(_ACTION.findall(response))
    given = _merged(_parsed(text) for text in _INPUT.findall(response))
    calls = problem.reference["calls"]
    expected = _merged(call["arguments"] for call in calls)
    return float(names == Counter(call["name"] for call in calls) and given == expected)


SCORERS = {"mcq": score_mcq, "tool_call": score_tool_call}


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _merged(inputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for value in inputs:
        merged |= value
    return merged
