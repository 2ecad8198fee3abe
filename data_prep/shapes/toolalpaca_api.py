"""Raw ToolAlpaca APIs: the documentation of one API, requests to it and expected calls; a problem for each request.

Keys used: `Name`, `Description`, `NLDocumentation`, `Function_Projection` (its keys are the functions), and either
`Instructions` with `Golden_Answers` (a list of {Action, Action_Input} for each request) or `Instances` (requests with
the steps that were taken). Where both stand, the instances are what some model did, and the answers count. Older files
hold requests alone, under `Instructions` or `Questions`: they have no gold.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, file_stem, plain_text, shown, text_field
from data_prep.shapes.tool_calls import ToolRequest, documented_tools, listed_calls, read_calls, tool_prompt
from sdpo_core.records import Message, Problem

_MAX_STEPS = 5
# The pseudo-tool that asks the user; no prompt offers it.
_GET_DETAILS = "getDetails"
_HINT = "\nHint: "


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answered:
    """A request and the calls that answer it."""

    request: str
    calls: list[dict[str, Any]]


# (one entry of the API, its tools) -> request and calls
_Read = Callable[[Any, Sequence[str]], _Answered]


def _has_keys(row: Mapping[str, Any]) -> bool:
    return not row.keys().isdisjoint({"NLDocumentation", "Golden_Answers", "Instances"})


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem | RowRejectedError]:
    entries, read = _entries(row)
    # Files without gold document their functions in other ways, so nothing more of them is read.
    if read is None:
        yield from (RowRejectedError("no_gold", f"request {number}: has no answer") for number in range(len(entries)))
        return
    api, description, documentation = (text_field(row, key) for key in ("Name", "Description", "NLDocumentation"))
    tools = _tools(row, documentation=documentation)
    for number, entry in enumerate(entries):
        try:
            answered = read(entry, tools)
            prompt = tool_prompt(answered.request, api=api, description=description, documentation=documentation)
            asked = ToolRequest(api=api.strip(), tools=tools, request=answered.request.strip(), calls=answered.calls)
            yield asked.problem(
                (Message(role="user", content=prompt),),
                idx=f"{file_stem(origin.path)}/{origin.line - 1}/{number}",
                origin=origin,
                shape=SHAPE.name,
            )
        except RowRejectedError as rejection:
            yield RowRejectedError(rejection.code, f"request {number}: {rejection.note}")


SHAPE = Shape(name="toolalpaca-api", has_keys=_has_keys, problems=_problems)


def _tools(row: Mapping[str, Any], *, documentation: str) -> list[str]:
    """The functions, which the documentation, and so the prompt, must describe."""
    if row.get("Function_Description", {}) is None:
        raise RowRejectedError("missing_field", "Function_Description: got None, expected the functions' descriptions")
    functions = row.get("Function_Projection", {})
    if not isinstance(functions, Mapping):
        raise RowRejectedError("missing_field", f"Function_Projection: got {shown(functions)}, expected an object")
    tools = list(functions) or documented_tools(documentation)
    absent = [tool for tool in tools if f"\n{tool}: " not in f"\n{documentation}"]
    if absent or not tools:
        raise RowRejectedError("prompt_not_read", f"NLDocumentation: describes no {', '.join(absent) or 'function'}")
    return tools


def _entries(row: Mapping[str, Any]) -> tuple[list[Any], _Read | None]:
    """What holds one request each, and how it is read; None where there is no gold."""
    if "Instances" in row and "Golden_Answers" not in row:
        return _list(row["Instances"], where="Instances"), _taken
    key = "Instructions" if "Instructions" in row else "Questions"
    requests = _list(row.get(key), where=key)
    if "Golden_Answers" not in row:
        return requests, None
    answers = _list(row["Golden_Answers"], where="Golden_Answers")
    if len(requests) != len(answers):
        note = f"got {len(requests)} {key} and {len(answers)} Golden_Answers, expected one for each"
        raise RowRejectedError("answers_mismatch", note)
    return list(zip(requests, answers, strict=True)), _golden


def _list(value: object, *, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RowRejectedError("missing_field", f"{where}: got {shown(value)}, expected a list that is not empty")
    return value


def _golden(entry: tuple[Any, Any], tools: Sequence[str]) -> _Answered:
    request, answer = entry
    return _Answered(request=plain_text(request, where="request"), calls=read_calls(listed_calls(answer), tools=tools))


def _taken(entry: object, tools: Sequence[str]) -> _Answered:
    """An instance: all steps that were taken before its final thought, without questions to the user."""
    if not isinstance(entry, Mapping):
        raise RowRejectedError("missing_field", f"Instances: got {shown(entry)}, expected an object")
    if "error" in entry:
        raise RowRejectedError("instance_error", f"error: {shown(entry['error'])}")
    steps = entry.get("intermediate_steps")
    if not isinstance(steps, list) or not steps:
        raise RowRejectedError("instance_no_steps", f"intermediate_steps: got {shown(steps)}, expected steps")
    if len(steps) > _MAX_STEPS:
        raise RowRejectedError("instance_over_5_steps", f"intermediate_steps: got {len(steps)} of them")
    actions = [action for step in steps if (action := _action(step))[0] != _GET_DETAILS]
    if not actions:
        raise RowRejectedError("instance_only_asks", f"all steps are {_GET_DETAILS}")
    request = plain_text(entry.get("input"), where="input").rsplit(_HINT, 1)[0]
    return _Answered(request=plain_text(request, where="input"), calls=read_calls(actions, tools=tools))


def _action(step: object) -> tuple[object, object]:
    """Tool and input of a step: [[tool, input, log], observation]."""
    match step:
        case [[name, given, *_], *_]:
            return name, given
    raise RowRejectedError(
        "missing_field", f"intermediate_steps: got {shown(step)}, expected [[tool, input, ...], ...]"
    )
