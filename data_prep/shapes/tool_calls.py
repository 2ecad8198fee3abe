"""What tool-use rows of every shape share: the prompt and its tools, the expected calls, group and flags."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, declared_domain, group_key, json_object, shown
from sdpo_core.fingerprint import canonical_json
from sdpo_core.records import Message, Problem

_TOOL = re.compile(r"^([^\s:]+):[^\n]*\nParameters: ", re.MULTILINE)
_PROMPT = (
    # The reference's text, to the byte: a blank ends its first line.
    "Your task is to answer the user's question using available tools. \n"
    "You have access to the following tools:\n"
    "Name: {api}\n"
    "Description: {description}\n"
    "Documentation:\n"
    "{documentation}\n"
    "Use the following format:\n"
    "Thought: you should always think about what to do\n"
    "Action: the action to take, should be one of the tool names.\n"
    "Action Input: the input to the action, must be in JSON format. "
    "All of the action input must be realistic and from the user.\n"
    "\n"
    "Begin!\n"
    "Question: {request}"
)
# What stands in the place of access keys that the source was published with.
_REDACTED = "REDACTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRequest:
    """A request to the tools of one API, and the calls that answer it."""

    api: str
    tools: Sequence[str]
    request: str
    calls: Sequence[dict[str, Any]]

    def problem(
        self,
        messages: tuple[Message, ...],
        *,
        idx: int | str,
        origin: Origin,
        shape: str,
        privileged: str | None = None,
    ) -> Problem:
        """The problem with these messages; `idx` is the place within its source."""
        return Problem(
            id=f"{origin.dataset}/{origin.source}/{idx}",
            prompt=messages,
            label=canonical_json(self.calls),
            dataset=origin.dataset,
            task="tool_call",
            domain=declared_domain(origin),
            split=origin.split,
            group_key=group_key(self.api, self.request),
            reference={"calls": self.calls, "tool_names": self.tools, "order": "any"},
            source=origin.to_json(idx=idx, shape=shape),
            details={"api": self.api, "num_tools": len(self.tools), "num_calls": len(self.calls)},
            flags=self._flags(),
            privileged=privileged,
        )

    def _flags(self) -> tuple[str, ...]:
        values = [value for call in self.calls for value in _leaves(call["arguments"])]
        spoken = self.request.casefold()
        found = {
            "several_calls": len(self.calls) > 1,
            "empty_string_in_gold": "" in [value for call in self.calls for value in call["arguments"].values()],
            "gold_value_not_in_request": any(not value or value.casefold() not in spoken for value in values),
            "gold_value_redacted": _REDACTED in values,
        }
        return tuple(flag for flag, is_set in found.items() if is_set)


def tool_prompt(request: str, *, api: str, description: str, documentation: str) -> str:
    """The reference's user message: all of the API's documentation, then the request."""
    return _PROMPT.format(api=api, description=description, documentation=documentation, request=request)


def documented_tools(documentation: str) -> list[str]:
    """Names of the tools that a documentation describes, in its order."""
    return _TOOL.findall(documentation)


def listed_calls(entries: object) -> list[tuple[object, object]]:
    """Names and inputs of a list of {Action, Action_Input}."""
    if not isinstance(entries, list) or not entries:
        raise RowRejectedError("no_gold", f"got {shown(entries)}, expected a list of at least one call")
    if not all(isinstance(entry, dict) for entry in entries):
        raise RowRejectedError("missing_field", "expected calls with Action and Action_Input")
    return [(entry.get("Action"), entry.get("Action_Input")) for entry in entries]


def read_calls(pairs: Sequence[tuple[object, object]], *, tools: Sequence[str]) -> list[dict[str, Any]]:
    """Expected calls from their names and inputs. A placeholder in any of them says most of what is wrong."""
    for name, given in pairs:
        _refuse_placeholder(name, given)
    return [read_call(name, given, tools=tools) for name, given in pairs]


def read_call(name: object, given: object, *, tools: Sequence[str]) -> dict[str, Any]:
    """One expected call of a tool of the row; `given`: the JSON text of an object."""
    if not isinstance(name, str):
        raise RowRejectedError("missing_field", f"Action: got {shown(name)}, expected the name of a tool")
    if not isinstance(given, str):
        raise RowRejectedError("missing_field", f"Action_Input of {name}: got {shown(given)}, expected JSON text")
    _refuse_placeholder(name, given)
    if name not in tools:
        raise RowRejectedError("gold_tool_unknown", f"got {name}, expected a tool of the row: {', '.join(tools)}")
    return {"name": name, "arguments": json_object(given, where=f"input of {name}")}


def _refuse_placeholder(name: object, given: object) -> None:
    # A reference to an earlier call's output cannot be written by a policy that sees no output. A lone $ can.
    if isinstance(given, str) and "${" in given:
        raise RowRejectedError("gold_has_placeholder", f"input of {shown(name)} holds ${{...}}")


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for child in value.values():
            yield from _leaves(child)
    elif isinstance(value, list):
        for child in value:
            yield from _leaves(child)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
