"""Rows in our own form: what a user writes without code, or a line that `sdpo prepare` has written.

Keys: `prompt` (text, or messages of role and content), `task`, `label` or `reference`; and, where wanted, `id`,
`privileged`, `split`, `domain`, `details`, `group_key`, `flags`. A prepared line has most of them under `metadata`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from data_prep.graders.table import grade
from data_prep.shapes.base import (
    Origin,
    RowRejectedError,
    Shape,
    group_key,
    plain_text,
    require_json,
    shown,
    strict_json,
    text_field,
)
from data_prep.shapes.questions import MultipleChoice, option_text, truth
from data_prep.shapes.sciknoweval import split_options
from data_prep.shapes.tool_calls import read_call
from sdpo_core.errors import DataError, SpecError
from sdpo_core.fingerprint import canonical_json
from sdpo_core.records import Message, Problem, Role, Split

_REQUIRED = frozenset({"prompt", "task"})
_GOLD = frozenset({"label", "reference"})
_OPTIONAL = frozenset({"id", "privileged", "split", "domain", "details", "group_key", "flags"})
_SPLITS: tuple[Split, ...] = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gold:
    """`group`: the row's group key, where it names none."""

    label: str
    reference: Mapping[str, Any]
    group: str


def names_split(row: Mapping[str, Any]) -> bool:
    """Whether a row in this form says which split it belongs to."""
    return "split" in _flat(row)


def _has_keys(row: Mapping[str, Any]) -> bool:
    keys = _flat(row).keys()
    return keys >= _REQUIRED and not keys.isdisjoint(_GOLD) and "kind" not in keys


def _flat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping):
        return row
    # Of a prepared line: the data set and the place it came from are no longer this row's.
    kept = {key: value for key, value in metadata.items() if key not in ("dataset", "source")}
    return {**kept, **{key: value for key, value in row.items() if key != "metadata"}}


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    row = _flat(row)
    unknown = row.keys() - _REQUIRED - _GOLD - _OPTIONAL
    if unknown:
        raise RowRejectedError(
            "unknown_key",
            f"got {', '.join(sorted(map(str, unknown)))}, expected "
            f"{', '.join(sorted(_REQUIRED | _GOLD | _OPTIONAL))}; details may hold what is your own",
        )
    task = text_field(row, "task")
    prompt = tuple(_messages(row["prompt"]))
    gold = _GOLDS.get(task, _given)(row, prompt[-1].content)
    idx = text_field(row, "id") if "id" in row else _place(origin)
    problem = Problem(
        id=f"{origin.dataset}/{idx}",
        prompt=prompt,
        label=gold.label,
        dataset=origin.dataset,
        task=task,
        domain=text_field(row, "domain") if "domain" in row else origin.domain or "own",
        split=_split(row, origin=origin),
        group_key=text_field(row, "group_key") if "group_key" in row else gold.group,
        reference=gold.reference,
        source=origin.to_json(idx=idx, shape=SHAPE.name),
        details=_object(row, "details"),
        flags=tuple(plain_text(flag, where="flags") for flag in _list(row, "flags")),
        privileged=text_field(row, "privileged") if "privileged" in row else None,
    )
    _check_reference(problem)
    yield problem


SHAPE = Shape(name="canonical", has_keys=_has_keys, problems=_problems)


def _place(origin: Origin) -> str:
    """The row's place: its line, behind its file where the data set is a folder of them."""
    file = origin.path.removeprefix(origin.dataset).strip("/")
    return f"{file}/{origin.line - 1}" if file else str(origin.line - 1)


def _check_reference(problem: Problem) -> None:
    """A grader says of any response, so also of an empty one, that the reference is none it can use."""
    try:
        grade(problem, "", False, level="none")
    except (DataError, SpecError) as error:
        raise RowRejectedError("bad_reference", str(error)) from None
    # A grader of the user's own may raise anything.
    except Exception as error:
        note = f"{problem.task}: got {type(error).__name__}: {error}"
        raise RowRejectedError("bad_reference", note) from error


def _messages(value: object) -> Iterator[Message]:
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowRejectedError("prompt_not_read", f"prompt: got {shown(value)}, expected text or a list of messages")
    roles = [turn.get("role") for turn in turns]
    if any(role not in get_args(Role) for role in roles) or "system" in roles[1:] or roles[-1] != "user":
        raise RowRejectedError(
            "prompt_not_read", "prompt: expected the roles system (first, if any), user, assistant, and user at the end"
        )
    for number, turn in enumerate(turns):
        yield Message(role=turn["role"], content=plain_text(turn.get("content"), where=f"prompt[{number}].content"))


def _split(row: Mapping[str, Any], *, origin: Origin) -> Split:
    value = row.get("split", origin.split)
    for split in _SPLITS:
        if value == split:
            return split
    raise RowRejectedError("split_unknown", f"split: got {shown(value)}, expected one of {', '.join(_SPLITS)}")


def _multiple_choice(row: Mapping[str, Any], question: str) -> _Gold:
    reference = _object(row, "reference")
    try:
        stem, options = split_options(question)
    except RowRejectedError:
        if "choices" not in reference:
            raise
        stem, options = question, {}
    if "choices" in reference:
        options = _choices(reference)
    hidden = [label for label, text in options.items() if text.strip() not in question]
    if hidden:
        raise RowRejectedError("options_not_in_prompt", f"prompt: lacks the text of option {', '.join(hidden)}")
    gold = plain_text(_either(row.get("label"), reference.get("answer_key")), where="label")
    asked = MultipleChoice(text=stem, options=options, gold=gold)
    return _Gold(label=gold, reference=asked.reference(), group=asked.group())


def _choices(reference: Mapping[str, Any]) -> dict[str, str]:
    entries = _list(reference, "choices")
    options = {
        text_field(entry, "label"): option_text(entry.get("text"), where=f"choices[{number}]")
        for number, entry in enumerate(entries)
        if isinstance(entry, Mapping)
    }
    if not 2 <= len(options) == len(entries):
        raise RowRejectedError("choices_mismatch", "reference.choices: expected two or more of label and text")
    return options


def _true_false(row: Mapping[str, Any], question: str) -> _Gold:
    given = _either(row.get("label"), _object(row, "reference").get("answer"))
    answer = truth(plain_text(given, where="label"))
    return _Gold(label=answer, reference={"answer": answer}, group=group_key(question))


def _tool_call(row: Mapping[str, Any], question: str) -> _Gold:
    reference = _object(row, "reference")
    tools = [plain_text(tool, where="reference.tool_names") for tool in _list(reference, "tool_names")]
    entries = _list(reference, "calls") if "calls" in reference else _calls_in(text_field(row, "label"))
    if not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise RowRejectedError("no_gold", "reference.calls: expected at least one object of name and arguments")
    calls = [
        read_call(entry.get("name"), json.dumps(entry.get("arguments"), ensure_ascii=False), tools=tools)
        for entry in entries
    ]
    return _Gold(
        label=canonical_json(calls),
        reference={"calls": calls, "tool_names": tools, "order": "any"},
        group=group_key(question),
    )


def _calls_in(label: str) -> list[Any]:
    try:
        calls = strict_json(label)
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("gold_not_json", f"label: {error}") from None
    require_json(calls, where="label")
    return calls if isinstance(calls, list) else [calls]


def _given(row: Mapping[str, Any], question: str) -> _Gold:
    """Of any other task: what the row says, since only its grader knows what it needs."""
    reference = _object(row, "reference")
    label = row.get("label", reference.get("answer"))
    return _Gold(
        label=canonical_json(reference) if label is None else plain_text(label, where="label"),
        reference=reference or {"answer": label},
        group=group_key(question),
    )


# How the gold is read, by task; any other is taken as it is given.
_GOLDS: Mapping[str, Callable[[Mapping[str, Any], str], _Gold]] = {
    "mcq": _multiple_choice,
    "true_false": _true_false,
    "tool_call": _tool_call,
}


def _either(label: object, other: object) -> object:
    """The gold that a row gives once, or twice alike."""
    if label is not None and other is not None and label != other:
        raise RowRejectedError("gold_conflict", f"label: got {shown(label)}, and {shown(other)} in the reference")
    return other if label is None else label


def _object(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = row.get(key, {})
    if not isinstance(value, Mapping):
        raise RowRejectedError("missing_field", f"{key}: got {shown(value)}, expected an object")
    require_json(value, where=key)
    return value


def _list(row: Mapping[str, Any], key: str) -> list[Any]:
    value = row.get(key, [])
    if not isinstance(value, list):
        raise RowRejectedError("missing_field", f"{key}: got {shown(value)}, expected a list")
    return value
