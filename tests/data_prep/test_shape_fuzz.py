"""Damaged rows of every shape: kept or rejected with a code, never another exception, never silently changed.

SDPO_FUZZ_EXAMPLES sets the number of rows for each shape; 10,000 take about eight minutes in all.
"""

import copy
import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.codes import CODES, FLAGS
from data_prep.graders.table import grade
from data_prep.shapes.base import RowRejectedError, parse_json_line
from data_prep.shapes.questions import truth
from sdpo_core.records import Problem
from tests.data_prep.source_rows import (
    REAL,
    SIMULATED,
    TOOL_USE,
    bundled,
    flat_rows,
    origin,
    outcomes,
    raw_files,
    read,
    reference,
    sample,
)

_LOGGER = logging.getLogger(__name__)
EXAMPLES = int(os.environ.get("SDPO_FUZZ_EXAMPLES", "200"))


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Whatever a field may hold instead: other types, bounds, characters that break lines, encodings, labels or JSON.
JUNK: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3.5,
    10**400,
    float("nan"),
    float("inf"),
    "",
    " \n\t",
    "A",
    "B",
    "E",
    "Yes",
    "L3",
    "mcq-2-choices",
    "true_or_false",
    "tooluse",
    "mcq",
    "getDetails",
    "{}",
    "[]",
    '{"a": NaN}',
    '{"a": 1e999}',
    '{"a": 1, "a": 2}',
    '{"a": "\\ud83d"}',
    "${x from y}",
    "\ud800",
    " two  blanks\tand a tab ",
    "\u2028\x00\ufeff",
    "\u202eABC\u0130\ufb01\u1e9e",
    "x" * 200_000,
    "A: 1\nB: 2\n" * 2_000,
    "\nQuestion: ",
    "Use the following format:",
    [],
    {},
    ["A", "B", "C", "D"],
    {"text": ["1", "2"], "label": ["A", "B"]},
    _nested(200),
    {"Action": "x", "Action_Input": "{}"},
)


# What a line may hold in the middle: broken encodings, escapes, JSON's own marks and numbers.
BYTES = (b"", b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b'"', b"}", b"[", b"NaN", b"1e9999")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a row: its container, and the key or number there."""
    keys: Sequence[Any] = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _inside(value: object) -> dict[str, Any] | list[Any] | None:
    """The object or list that a text holds as JSON, as golds do."""
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return None
    try:
        inside = json.loads(value)
    except ValueError:
        return None
    return inside if isinstance(inside, dict | list) else None


def _edit_text(text: str, *, draw: random.Random) -> str:
    """A text with one edit somewhere."""
    at = draw.randrange(len(text) + 1)
    piece = draw.choice(["", " ", "\n", '"', "\\", "{", "}", "$", "${", "\ud800", "\u0000", "A: ", "B", "e\u0301", "#"])
    end = at + draw.choice([0, 0, 1, 10])
    return text[:at] + piece + text[end:]


def _damage(row: Any, *, draw: random.Random) -> None:
    places = list(_places(row))
    if not places:
        return
    # Fields of the row first: deep places of long rows would else be drawn nearly always.
    top = [(container, key) for container, key in places if container is row]
    container, key = draw.choice(draw.choice([top, places]))
    value = container[key]
    kind = draw.randrange(8)
    inside = _inside(value)
    if inside is not None and kind < 5:
        _damage(inside, draw=draw)
        container[key] = json.dumps(inside, ensure_ascii=draw.random() < 0.5)
    elif kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = copy.deepcopy(draw.choice(JUNK))
    elif kind == 2 and isinstance(value, str):
        container[key] = _edit_text(value, draw=draw)
    elif kind == 3:
        container[key] = [value] if draw.random() < 0.5 else {"value": value}
    elif kind == 4 and isinstance(container, dict):
        container[draw.choice([key + "s", key.upper(), "", "kind", "question"])] = container.pop(key)
    elif kind == 5:
        other, place = draw.choice(places)
        container[key] = copy.deepcopy(other[place]) if other is not container or place != key else json.dumps(value)
    elif isinstance(value, list) and value:
        value.append(copy.deepcopy(draw.choice(value)))


def _user_text(problem: Problem) -> str:
    assert problem.prompt[-1].role == "user"
    return problem.prompt[-1].content


def _holds_question(problem: Problem, *, question: str, options: Mapping[str, str], gold: str) -> None:
    listed = "".join(f"\n{label}: {text}" for label, text in options.items())
    assert _user_text(problem) == f"{question}\n{listed}\nPlease reason step by step."
    choices = {choice["label"]: choice["text"] for choice in problem.reference["choices"]}
    assert choices == {label: text.strip() for label, text in options.items()}
    assert problem.label == problem.reference["answer_key"] == gold


def _holds_truth(problem: Problem, *, question: str, gold: str) -> None:
    assert _user_text(problem) == f"{question}\n\nPlease reason step by step."
    assert gold.strip().lower() in {"Yes": ("yes", "true"), "No": ("no", "false")}[problem.label]
    assert problem.reference == {"answer": problem.label}


def _holds_calls(problem: Problem, *, calls: Sequence[tuple[str, str]]) -> None:
    expected = [{"name": name, "arguments": json.loads(given)} for name, given in calls]
    assert problem.reference["calls"] == json.loads(problem.label) == expected
    assert {name for name, _ in calls} <= set(problem.reference["tool_names"])
    assert all(tool in _user_text(problem) for tool in problem.reference["tool_names"])


def _pairs(entries: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    return [(entry["Action"], entry["Action_Input"]) for entry in entries]


def _raw(row: Mapping[str, Any], problem: Problem) -> None:
    if problem.task == "true_false":
        _holds_truth(problem, question=row["question"], gold=row["answer"])
    else:
        options = dict(zip(row["choices"]["label"], row["choices"]["text"], strict=True))
        _holds_question(problem, question=row["question"], options=options, gold=row["answerKey"].strip())


def _prerelease(row: Mapping[str, Any], problem: Problem) -> None:
    if problem.task == "true_false":
        _holds_truth(problem, question=row["question"], gold=row["correct_option"])
        return
    given = {key: value for key, value in row.items() if "_option" in key}
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
    body = _user_text(problem).removesuffix("\nPlease reason step by step.").removeprefix(f"{row['question']}\n")
    options = {}
    for label in "ABCD"[: len(texts)]:
        text = next(text for text in sorted(texts.values(), key=len)[::-1] if body.startswith(f"\n{label}: {text}"))
        options[label], body = text, body.removeprefix(f"\n{label}: {text}")
    assert body == ""
    assert sorted(options.values()) == sorted(texts.values())
    assert options[problem.label] == texts["correct_option"]
    _holds_question(problem, question=row["question"], options=options, gold=problem.label)


def _reference(row: Mapping[str, Any], problem: Problem) -> None:
    assert [turn.content for turn in problem.prompt] == [row["system"], row["prompt"]]
    assert problem.label == problem.reference["answer_key"] == row["answer"].strip()
    for choice in problem.reference["choices"]:
        assert re.search(rf"^{choice['label']}: ?\s*{re.escape(choice['text'])}\s*$", row["prompt"], re.MULTILINE)


def _tool_use(row: Mapping[str, Any], problem: Problem) -> None:
    assert [turn.content for turn in problem.prompt] == [text for text in (row.get("system"), row["prompt"]) if text]
    _holds_calls(problem, calls=_pairs(json.loads(row["answer"])))


def _api(row: Mapping[str, Any], problem: Problem) -> None:
    number = int(problem.id.rpartition("/")[2])
    if "Golden_Answers" in row:
        request = row["Instructions" if "Instructions" in row else "Questions"][number]
        calls = _pairs(row["Golden_Answers"][number])
    else:
        instance = row["Instances"][number]
        request = instance["input"].rsplit("\nHint: ", 1)[0]
        calls = [(step[0][0], step[0][1]) for step in instance["intermediate_steps"] if step[0][0] != "getDetails"]
    _, _, rest = _user_text(problem).partition("You have access to the following tools:\n")
    head = f"Name: {row['Name']}\nDescription: {row['Description']}\nDocumentation:\n{row['NLDocumentation']}\nUse the"
    assert rest.startswith(head)
    assert rest.endswith(f"\nBegin!\nQuestion: {request}")
    _holds_calls(problem, calls=calls)


def _flat(row: Mapping[str, Any], problem: Problem) -> None:
    assert _user_text(problem) == row["prompt"]
    assert row["instruction"].strip() in row["prompt"]
    assert problem.privileged in (None, "\n".join(text for text in row.get("golden_response") or () if text))
    _holds_calls(problem, calls=_pairs(row["golden_answer"]))


def _word(row: Mapping[str, Any], problem: Problem) -> None:
    assert _user_text(problem).endswith(f": {row['word']}")
    assert problem.label == problem.privileged == row["word"][::-1]


def _canonical(row: Mapping[str, Any], problem: Problem) -> None:
    fields = {**row.get("metadata", {}), **row}
    prompt = row["prompt"]
    assert [turn.content for turn in problem.prompt] == (
        [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    )
    reference, label = fields.get("reference", {}), row.get("label")
    assert problem.privileged == row.get("privileged")
    if problem.task == "mcq":
        assert problem.label == problem.reference["answer_key"]
        assert {label, reference.get("answer_key")} - {None} == {problem.label}
        for choice in problem.reference["choices"]:
            assert choice["text"] in problem.prompt[-1].content
        texts = [(choice["label"], choice["text"].strip()) for choice in reference.get("choices", ())]
        assert texts in ([], [(choice["label"], choice["text"]) for choice in problem.reference["choices"]])
    elif problem.task == "true_false":
        assert problem.reference == {"answer": problem.label}
        assert {problem.label} == {truth(text) for text in (reference.get("answer"), label) if text is not None}
    elif problem.task == "tool_call":
        calls = reference["calls"] if "calls" in reference else json.loads(str(label))
        given = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
        assert problem.reference["calls"] == json.loads(problem.label) == given
    else:
        assert label in (None, problem.label)
        assert problem.reference == (reference or {"answer": label})


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Real rows of a shape, and what a problem that is kept owes to its row."""

    rows: tuple[dict[str, Any], ...]
    check: Callable[[Mapping[str, Any], Problem], None]


def _short_apis() -> Iterator[dict[str, Any]]:
    for api in bundled(SIMULATED) + bundled(REAL):
        yield {**api, "Instructions": api["Instructions"][:2], "Golden_Answers": api["Golden_Answers"][:2]}
    for api in sample("toolalpaca_instances.json"):
        yield {**api, "Instances": api["Instances"][:2]}
    yield from sample("toolalpaca_legacy.json")


def _own_rows() -> Iterator[dict[str, Any]]:
    """Lines that were prepared, and what a user writes."""
    files = [(path, None) for path in raw_files()] + [(SIMULATED, "tooluse"), (REAL, "tooluse")]
    for path, domain in files:
        kept = [item for item in read(path, domain=domain) if isinstance(item, Problem)]
        yield from (item.to_json() for item in kept[:2])
    yield {"prompt": "Which?\n\nA: red\nB: blue", "task": "mcq", "label": "B", "split": "train", "id": "one"}
    yield {"prompt": "Is water wet?", "task": "true_false", "label": "Yes", "privileged": "Yes, it is."}
    yield {"prompt": [{"role": "user", "content": "2 + 2?"}], "task": "exact", "reference": {"answer": "4"}}


KINDS = {
    "sciknoweval-raw": Kind(
        rows=tuple(row for path in raw_files() for row in bundled(path)[:2]) + sample("sciknoweval_v1.jsonl"),
        check=_raw,
    ),
    "sciknoweval-prerelease": Kind(rows=sample("sciknoweval_prerelease.jsonl")[:5], check=_prerelease),
    "sciknoweval-reference": Kind(
        rows=tuple(row for name in ("biology", "chemistry", "material", "physics") for row in reference(name)[::40]),
        check=_reference,
    ),
    "tooluse-reference": Kind(rows=bundled(TOOL_USE), check=_tool_use),
    "toolalpaca-api": Kind(rows=tuple(_short_apis()), check=_api),
    "toolalpaca-flat": Kind(rows=flat_rows(), check=_flat),
    "canonical": Kind(rows=tuple(_own_rows()), check=_canonical),
    "word": Kind(rows=tuple({"word": word} for word in ("aal", "dragon", "level")), check=_word),
}


def _check(row: Mapping[str, Any]) -> Iterator[str]:
    """Hold what becomes of a row to the rules; gives each outcome's name."""
    for item in outcomes(row, origin(domain=None)):
        if isinstance(item, RowRejectedError):
            assert item.code in CODES
            assert len(item.note.encode("utf-8")) <= 4_000
            yield item.code
            continue
        line = json.dumps(item.to_json(), ensure_ascii=False, allow_nan=False).encode("utf-8")
        assert Problem.from_json(json.loads(line), where="row") == item
        # In our own form, a row may have flags that we do not know.
        assert set(item.flags) <= FLAGS.keys() or item.source["shape"] == "canonical"
        # A gold that a grader refuses must not have been kept.
        assert not grade(item, "", False, level="none").is_correct
        KINDS[item.source["shape"]].check(row, item)
        yield "flagged" if item.flags else "kept"


@pytest.mark.parametrize("name", KINDS)
def test_undamaged_rows_pass_the_checks(name):
    """Else a check that no kept row can pass would go unseen where hardly any damaged row is kept."""
    found = {outcome for row in KINDS[name].rows for outcome in _check(row)}
    assert found & {"kept", "flagged"}


@pytest.mark.parametrize("name", KINDS)
def test_damaged_rows_are_kept_flagged_or_rejected_and_never_changed(name):
    seen: dict[str, int] = {}

    @given(st.randoms(use_true_random=False), st.integers(1, 3))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def hold(draw: random.Random, count: int) -> None:
        row = copy.deepcopy(draw.choice(KINDS[name].rows))
        for _ in range(count):
            if row:
                _damage(row, draw=draw)
        for outcome in _check(row):
            seen[outcome] = seen.get(outcome, 0) + 1

    hold()
    _LOGGER.info("%s: %s", name, dict(sorted(seen.items())))
    # The damage is neither nothing nor everything.
    assert len(seen) > 2


def _row_of(line: bytes) -> Mapping[str, Any] | None:
    """The row of a line; None where it is `bad_json`."""
    try:
        return parse_json_line(line)
    except RowRejectedError as rejection:
        if rejection.code != "bad_json":
            raise
        return None


@pytest.mark.parametrize("name", KINDS)
def test_damaged_lines_are_rows_or_bad_json(name):
    @given(st.randoms(use_true_random=False), st.integers(1, 4))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def hold(draw: random.Random, count: int) -> None:
        text = json.dumps(draw.choice(KINDS[name].rows), ensure_ascii=draw.random() < 0.5)
        line = bytearray(text.encode("utf-8"))
        for _ in range(count):
            at = draw.randrange(len(line) + 1)
            line[at : at + draw.choice([0, 1, 1, 20])] = draw.choice(BYTES)
        if (row := _row_of(bytes(line))) is not None:
            list(_check(row))

    hold()
