"""Tool calls: reads all Action / Action Input pairs of a response and compares them with the expected calls."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.feedback import CORRECT, MAX_NAME, Finding, listing, quote
from data_prep.graders.base import visible_text
from data_prep.graders.json_values import InputFault, json_kind, read_object, same_value
from sdpo_core.errors import DataError
from sdpo_core.records import Problem

# At line start, in any case; bold marks and numbering ("1. ", "Action 2:") are allowed around the word.
_MARKER = re.compile(
    r"^[ \t]*(?:[-*][ \t]+)?(?:\d+[.)][ \t]*)?[*_]*Action(?P<input>[ \t]+Input)?(?:[ \t]*\d+)?[*_]*[ \t]*:[*_]*",
    re.IGNORECASE | re.MULTILINE,
)
_NAME_MARKS = " \t\r*`\"'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call that was read."""

    name: str
    arguments: Mapping[str, Any]


# Name and arguments as they were read, to the call that is compared.
_Given = Callable[[str, Mapping[str, Any]], Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fault:
    reason: str
    facts: Mapping[str, str]


def grade_tool_call(problem: Problem, *, response: str, truncated: bool, is_strict: bool = False) -> Finding:
    """Finding for a response; `format_ok`: at least one call, and the input of each could be read.

    Top-level arguments that are empty strings or null count as not given, on both sides; `is_strict` compares them as
    they are, as published numbers do.
    """
    given = _as_it_is if is_strict else _without_blanks
    expected, tools = _reference(problem, given=given)
    revealed = f"{problem.label}."
    text = visible_text(response)
    if text is None:
        return Finding(reason="truncated" if truncated else "open_reasoning", gold=revealed, format_ok=False)
    read = _read_calls(text, given=given)
    answer = quote("; ".join(call.name for call in read if isinstance(call, Call))) or None
    broken = next((item for item in read if isinstance(item, _Fault)), None)
    if broken is not None or not read:
        fault = broken or _Fault(reason="no_action", facts={})
        # Only the end of a response can be missing, so an earlier broken call keeps its own reason.
        is_cut = truncated and (not read or fault is read[-1])
        reason = "truncated" if is_cut else fault.reason
        return Finding(reason=reason, gold=revealed, format_ok=False, answer=answer, facts=fault.facts)
    calls = [call for call in read if isinstance(call, Call)]
    difference = _difference(calls, expected=expected, tools=tools)
    if difference is None:
        return Finding(reason=CORRECT, gold=revealed, format_ok=True, score=1.0, answer=answer)
    return Finding(reason=difference.reason, gold=revealed, format_ok=True, answer=answer, facts=difference.facts)


def _reference(problem: Problem, *, given: _Given) -> tuple[list[Call], list[str]]:
    try:
        tools = list(problem.reference["tool_names"])
        calls = [given(call["name"], call["arguments"]) for call in problem.reference["calls"]]
        order = problem.reference["order"]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{problem.id}: got a broken reference ({error}), expected calls, tool_names and order. "
            "Prepare the data again."
        ) from None
    unknown = [call.name for call in calls if call.name not in tools]
    if not calls or unknown or order != "any":
        raise DataError(
            f"{problem.id}: got {len(calls)} expected calls, unknown tools {unknown} and order {order!r}, expected "
            "calls of the row's tools in order 'any'. Prepare the data again."
        )
    return calls, tools


def _without_blanks(name: str, arguments: Mapping[str, Any]) -> Call:
    return Call(name=name, arguments={key: value for key, value in arguments.items() if value not in ("", None)})


def _as_it_is(name: str, arguments: Mapping[str, Any]) -> Call:
    return Call(name=name, arguments=dict(arguments))


def _read_calls(text: str, *, given: _Given) -> list[Call | _Fault]:
    markers = list(_MARKER.finditer(text))
    ends = [*(marker.start() for marker in markers), len(text)][1:]
    read: list[Call | _Fault] = []
    for position, (marker, end) in enumerate(zip(markers, ends, strict=True)):
        if marker["input"]:
            continue
        name = text[marker.end() : end].split("\n", 1)[0].strip(_NAME_MARKS)
        follower = position + 1
        if follower == len(markers) or not markers[follower]["input"]:
            read.append(_Fault(reason="no_input", facts={"tool": _quoted(name)}))
        else:
            read.append(_read_call(name, text=text[markers[follower].end() : ends[follower]], given=given))
    return read


def _read_call(name: str, *, text: str, given: _Given) -> Call | _Fault:
    value = read_object(text)
    if isinstance(value, InputFault):
        facts = {
            "tool": _quoted(name),
            "detail": value.detail,
            "position": str(value.position),
            "kind": value.detail,
            "argument": _quoted(value.detail),
        }
        return _Fault(reason=value.reason, facts=facts)
    return given(name, value)


def _difference(calls: Sequence[Call], *, expected: Sequence[Call], tools: Sequence[str]) -> _Fault | None:
    """What sets the calls apart from the expected ones as multisets; None when nothing does."""
    for call in calls:
        if call.name not in tools:
            facts = {"tool": _quoted(call.name), "tools": listing(list(tools), limit=250)}
            return _Fault(reason="unknown_tool", facts=facts)
    if len(calls) != len(expected):
        made = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
        return _Fault(reason="call_count", facts={"made": made})
    names = [call.name for call in expected]
    for call in calls:
        if call.name not in names:
            return _Fault(reason="wrong_tool", facts={"tool": _quoted(call.name)})
        names.remove(call.name)
    return _argument_difference(calls, expected=expected)


def _argument_difference(calls: Sequence[Call], *, expected: Sequence[Call]) -> _Fault | None:
    open_calls, open_expected = [], list(expected)
    for call in calls:
        twin = next((place for place, other in enumerate(open_expected) if _equal(call, other)), None)
        if twin is None:
            open_calls.append(call)
        else:
            del open_expected[twin]
    if not open_calls:
        return None
    call = open_calls[0]
    nearest = min(
        (other for other in open_expected if other.name == call.name),
        key=lambda other: sum(len(names) for names in _unlike(call, other).values()),
    )
    reason, names = next((reason, names) for reason, names in _unlike(call, nearest).items() if names)
    # Names of missing arguments come from the documentation in the prompt, the others from the response.
    arguments = listing(names, limit=150) if reason == "missing_argument" else quote(", ".join(names), limit=MAX_NAME)
    return _Fault(reason=reason, facts={"tool": _quoted(call.name), "arguments": arguments})


def _equal(call: Call, other: Call) -> bool:
    return call.name == other.name and same_value(dict(call.arguments), dict(other.arguments))


def _unlike(call: Call, other: Call) -> dict[str, list[str]]:
    """Argument names by what is wrong with them, in the order in which feedback speaks of them."""
    shared = [name for name in other.arguments if name in call.arguments]
    unequal = [name for name in shared if not same_value(call.arguments[name], other.arguments[name])]
    mistyped = [name for name in unequal if json_kind(call.arguments[name]) != json_kind(other.arguments[name])]
    return {
        "missing_argument": [name for name in other.arguments if name not in call.arguments],
        "unexpected_argument": [name for name in call.arguments if name not in other.arguments],
        "wrong_type": mistyped,
        "wrong_value": [name for name in unequal if name not in mistyped],
    }


def _quoted(name: str) -> str:
    return quote(name, limit=MAX_NAME) or "without a name"
