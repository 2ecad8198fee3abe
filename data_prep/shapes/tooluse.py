"""Reference tool-use rows: ToolAlpaca requests with the documentation of one API and the expected calls.

Keys used: `idx`, `kind` ("tooluse"), `prompt`, `answer` (JSON text: a list of {Action, Action_Input}, the input again
JSON text), `system` (null or text).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, index_field, strict_json, text_field
from data_prep.shapes.tool_calls import ToolRequest, documented_tools, listed_calls, read_calls
from sdpo_core.records import Message, Problem

_API = re.compile(r"^Name: (.+)$", re.MULTILINE)
_DOCUMENTATION = re.compile(r"^Documentation:\n(.*?)^Use the following format:$", re.MULTILINE | re.DOTALL)
_REQUEST = "\nQuestion: "


def _has_keys(row: Mapping[str, Any]) -> bool:
    return {"kind", "prompt"} <= row.keys() and row["kind"] == "tooluse"


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    idx = index_field(row, "idx")
    prompt = text_field(row, "prompt")
    answer = text_field(row, "answer")
    messages: tuple[Message, ...] = (Message(role="user", content=prompt),)
    if row.get("system") is not None:
        messages = (Message(role="system", content=text_field(row, "system")), *messages)
    api, tools, request = _read_prompt(prompt)
    asked = ToolRequest(
        api=api, tools=tools, request=request, calls=read_calls(listed_calls(_entries(answer)), tools=tools)
    )
    yield asked.problem(messages, idx=idx, origin=origin, shape=SHAPE.name)


SHAPE = Shape(name="tooluse-reference", has_keys=_has_keys, problems=_problems)


def _read_prompt(prompt: str) -> tuple[str, list[str], str]:
    api, documentation = _API.search(prompt), _DOCUMENTATION.search(prompt)
    _, found, request = prompt.rpartition(_REQUEST)
    tools = documented_tools(documentation[1]) if documentation else []
    if api is None or not tools or not found or not request.strip():
        raise RowRejectedError("prompt_not_read", "expected a prompt with Name, Documentation of tools and Question")
    return api[1].strip(), tools, request.strip()


def _entries(answer: str) -> object:
    try:
        return strict_json(answer)
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("gold_not_json", f"answer: {error}") from None
