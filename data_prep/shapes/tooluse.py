"""Reference tool-use rows: ToolAlpaca requests with the documentation of one API and the expected calls.

Keys used: `idx`, `kind` ("tooluse"), `prompt`, `answer` (JSON text: a list of {Action, Action_Input}, the input again
JSON text), `system` (null or text).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import (
    Origin,
    RowRejectedError,
    Shape,
    declared_domain,
    group_key,
    index_field,
    text_field,
)
from sdpo_core.fingerprint import canonical_json
from sdpo_core.records import Message, Problem

_API = re.compile(r"^Name: (.+)$", re.MULTILINE)
_DOCUMENTATION = re.compile(r"^Documentation:\n(.*?)^Use the following format:$", re.MULTILINE | re.DOTALL)
_TOOL = re.compile(r"^([^\s:]+):[^\n]*\nParameters: ", re.MULTILINE)
_REQUEST = "\nQuestion: "


def _has_keys(row: Mapping[str, Any]) -> bool:
    return {"kind", "prompt"} <= row.keys() and row["kind"] == "tooluse"


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    yield _problem(row, origin)


def _problem(row: Mapping[str, Any], origin: Origin) -> Problem:
    idx = index_field(row, "idx")
    prompt = text_field(row, "prompt")
    answer = text_field(row, "answer")
    system = None if row.get("system") is None else text_field(row, "system")
    if row.get("kind") != "tooluse":
        raise RowRejectedError("type_not_supported", f"kind: got {row.get('kind')!r}, expected 'tooluse'")
    api, tools, request = _read_prompt(prompt)
    calls = _read_calls(answer, tools=tools)
    messages = [Message(role="user", content=prompt)]
    if system is not None:
        messages.insert(0, Message(role="system", content=system))
    return Problem(
        id=f"{origin.dataset}/{origin.source}/{idx}",
        prompt=tuple(messages),
        label=canonical_json(calls),
        dataset=origin.dataset,
        task="tool_call",
        domain=declared_domain(origin),
        split=origin.split,
        group_key=group_key(api, request),
        reference={"calls": calls, "tool_names": tools, "order": "any"},
        source=origin.to_json(idx=idx, shape=SHAPE.name),
        details={"api": api, "num_tools": len(tools), "num_calls": len(calls)},
        flags=_flags(calls, request=request),
    )


SHAPE = Shape(name="tooluse-reference", has_keys=_has_keys, problems=_problems)


def _read_prompt(prompt: str) -> tuple[str, list[str], str]:
    api, documentation = _API.search(prompt), _DOCUMENTATION.search(prompt)
    _, found, request = prompt.rpartition(_REQUEST)
    tools = _TOOL.findall(documentation[1]) if documentation else []
    if api is None or not tools or not found or not request.strip():
        raise RowRejectedError("prompt_not_read", "expected a prompt with Name, Documentation of tools and Question")
    return api[1].strip(), tools, request.strip()


def _read_calls(answer: str, *, tools: list[str]) -> list[dict[str, Any]]:
    try:
        entries = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("gold_not_json", f"answer: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise RowRejectedError("no_gold", "answer: expected at least one call")
    return [_read_call(entry, tools=tools) for entry in entries]


def _read_call(entry: object, *, tools: list[str]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("Action"), str):
        raise RowRejectedError("missing_field", "answer: expected calls with Action and Action_Input")
    name, given = entry["Action"], entry.get("Action_Input")
    if not isinstance(given, str):
        raise RowRejectedError("missing_field", f"Action_Input of {name}: expected JSON text")
    # A reference to an earlier call's output cannot be written by a policy that sees no output. A lone $ can.
    if "${" in given:
        raise RowRejectedError("gold_has_placeholder", f"input of {name} holds ${{...}}")
    if name not in tools:
        raise RowRejectedError("gold_tool_unknown", f"got {name}, expected a tool of the row: {', '.join(tools)}")
    try:
        arguments = json.loads(given, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("gold_input_not_object", f"input of {name}: {error}") from None
    if not isinstance(arguments, dict):
        raise RowRejectedError("gold_input_not_object", f"input of {name}: got {type(arguments).__name__}")
    return {"name": name, "arguments": arguments}


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _flags(calls: list[dict[str, Any]], *, request: str) -> tuple[str, ...]:
    values = [value for call in calls for value in _leaves(call["arguments"])]
    spoken = request.casefold()
    found = {
        "several_calls": len(calls) > 1,
        "empty_string_in_gold": "" in [value for call in calls for value in call["arguments"].values()],
        "gold_value_not_in_request": any(not value or value.casefold() not in spoken for value in values),
    }
    return tuple(flag for flag, is_set in found.items() if is_set)


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
