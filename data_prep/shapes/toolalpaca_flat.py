"""Flat ToolAlpaca rows as the hub has them: the reference's prompt, and its parts in columns beside it.

Keys used: `prompt`, `name`, `nl_documentation`, `instruction`, `golden_answer` (a list of {Action, Action_Input}, the
input as JSON text) and, where there is one, `golden_response` (a list of text: a right response in words).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, file_stem, plain_text, shown, text_field
from data_prep.shapes.tool_calls import ToolRequest, documented_tools, listed_calls, read_calls
from sdpo_core.records import Message, Problem


def _has_keys(row: Mapping[str, Any]) -> bool:
    return "golden_answer" in row


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    prompt = text_field(row, "prompt")
    api, documentation, request = (text_field(row, key).strip() for key in ("name", "nl_documentation", "instruction"))
    tools = documented_tools(documentation)
    # The columns say what the prompt offers and asks; they must be the prompt's own.
    if not tools or not all(part in prompt for part in (api, documentation, request)):
        raise RowRejectedError("prompt_not_read", "expected a prompt that holds name, nl_documentation and instruction")
    asked = ToolRequest(
        api=api, tools=tools, request=request, calls=read_calls(listed_calls(row["golden_answer"]), tools=tools)
    )
    yield asked.problem(
        (Message(role="user", content=prompt),),
        # Large files come in several, each of which counts its rows afresh.
        idx=f"{file_stem(origin.path)}/{origin.line - 1}",
        origin=origin,
        shape=SHAPE.name,
        privileged=_privileged(row.get("golden_response")),
    )


SHAPE = Shape(name="toolalpaca-flat", has_keys=_has_keys, problems=_problems)


def _privileged(value: object) -> str | None:
    """The response in words; test rows have a blank one, which is none."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise RowRejectedError("missing_field", f"golden_response: got {shown(value)}, expected a list of text")
    parts = [plain_text(part, where="golden_response") for part in value if part != ""]
    return "\n".join(parts) or None
