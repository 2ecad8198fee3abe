"""Reference rows and words, how a row finds its shape, how a line is read."""

import json
import lzma
from collections.abc import Mapping
from typing import Any

import pytest

from data_prep.shapes import sciknoweval, spell_backward, tooluse
from data_prep.shapes.base import RowRejectedError, Shape, parse_json_line
from data_prep.shapes.table import recognise
from sdpo_core.records import Problem
from tests.data_prep.source_rows import (
    BUNDLED,
    REAL,
    SIMULATED,
    TOOL_USE,
    bundled,
    flat_rows,
    origin,
    raw_files,
    reference,
    sample,
)

ORIGIN = origin(line=7, domain="physics")
PHYSICS = bundled("lasgroup-sdpo/sciknoweval/physics/test.json")
CALLS = bundled(TOOL_USE)
WORDS = lzma.decompress((BUNDLED / "reasoning-gym/words3to10.txt.xz").read_bytes()).decode().split("\n")


def _problem(shape: Shape, row: Mapping[str, Any]) -> Problem:
    """The one problem of a row; a rejection raises."""
    (found,) = shape.problems(row, ORIGIN)
    if isinstance(found, RowRejectedError):
        raise found
    return found


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("sciknoweval-raw", [row for path in raw_files() for row in bundled(path)]),
        ("sciknoweval-raw", sample("sciknoweval_v1.jsonl")),
        ("sciknoweval-prerelease", sample("sciknoweval_prerelease.jsonl")[:5]),
        # Before the release, rows without options looked like raw ones.
        ("sciknoweval-raw", sample("sciknoweval_prerelease.jsonl")[5:]),
        ("sciknoweval-reference", reference("biology") + reference("material")),
        ("tooluse-reference", CALLS),
        ("toolalpaca-api", bundled(SIMULATED) + bundled(REAL)),
        ("toolalpaca-api", sample("toolalpaca_instances.json") + sample("toolalpaca_legacy.json")),
        ("toolalpaca-flat", flat_rows()),
        ("word", [{"word": "sun"}]),
    ],
)
def test_recognise_knows_every_real_row(name, rows):
    assert {recognise(row).name for row in rows} == {name}


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"text": "plain"},
        {"question": "2 + 2?", "answer": "4"},
        {**flat_rows()[0], "NLDocumentation": "x"},
        {"word": "sun", "language": "en"},
    ],
)
def test_recognise_refuses_unknown_and_mixed_keys(row):
    with pytest.raises(RowRejectedError, match="got the keys") as rejection:
        recognise(row)
    assert rejection.value.code == "shape_unknown"


def test_rejections_can_be_written_whatever_they_quote():
    with pytest.raises(RowRejectedError) as rejection:
        recognise({"half \ud800": 1, "x" * 5000: 2})
    assert rejection.value.note.startswith("got the keys (half \\ud800, xxx")
    assert len(rejection.value.note.encode("utf-8")) < 200
    assert len(RowRejectedError("code", "x" * 5000).note) == 1000


def test_sciknoweval_reads_real_rows_unchanged():
    for raw in PHYSICS[:3]:
        problem = _problem(sciknoweval.SHAPE, raw)
        assert [turn.content for turn in problem.prompt] == [raw["system"], raw["prompt"]]
        assert problem.id == f"d/s/{raw['idx']}"
        assert problem.label == problem.reference["answer_key"] == raw["answer"]
        assert [choice["label"] for choice in problem.reference["choices"]] == list("ABCD")


def test_sciknoweval_trims_options_with_blank_lines_between():
    row = reference("material")[273]
    problem = _problem(sciknoweval.SHAPE, row)
    texts = [choice["text"].split(" ")[0] for choice in problem.reference["choices"]]
    assert texts == ["1025.67", "1094.31", "1200.45", "1150.78"]


def test_split_options_takes_the_last_run_of_labels():
    stem, choices = sciknoweval.split_options(
        "Given\nA: red\nB: blue\nwhich is warmer?\n\nA: B: the second\n\nB: red\nof fire\nPlease reason step by step."
    )
    assert stem.endswith("which is warmer?")
    assert choices == {"A": "B: the second", "B": "red\nof fire"}


def test_group_key_joins_permuted_options_and_parts_generic_pairs():
    """Four options: the stem alone is the group. Two sequences under a generic stem: the pair is."""
    row = {"idx": 1, "kind": "mcq", "answer": "A", "system": "s", "prompt": "Which?\n\nA: 1\nB: 2\nC: 3"}
    other = {**row, "prompt": "Which?\n\nA: 3\nB: 4\nC: 5"}
    pair = {**row, "prompt": f"Which?\n\nA: {'MKV' * 9}\nB: {'MKL' * 9}"}
    swapped = {**row, "prompt": f"Which?\n\nA: {'MKL' * 9}\nB: {'MKV' * 9}"}
    third = {**row, "prompt": f"Which?\n\nA: {'MKL' * 9}\nB: {'MKA' * 9}"}
    keys = [_problem(sciknoweval.SHAPE, item).group_key for item in (row, other, pair, swapped, third)]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] != keys[0]
    assert keys[4] not in keys[:4]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": None}, "missing_field"),
        ({"system": ""}, "missing_field"),
        ({"idx": "12"}, "missing_field"),
        ({"idx": True}, "missing_field"),
        ({"idx": -1}, "missing_field"),
        ({"idx": 10**5000}, "missing_field"),
        ({"kind": "open"}, "type_not_supported"),
        ({"answer": "E"}, "gold_not_a_label"),
        ({"prompt": "no options at all"}, "options_not_found"),
        ({"prompt": "Which?\n\nA: 1\nC: 2"}, "options_not_found"),
        ({"prompt": "Which?\n\nA: 1\nB: \nC: 2", "answer": "A"}, "empty_option"),
        ({"prompt": "Which?\n\nA: 1\nB: 2\nC: 1 ", "answer": "A"}, "gold_under_two_labels"),
    ],
)
def test_sciknoweval_rejects_broken_rows(change, code):
    row = {**PHYSICS[0], **change}
    with pytest.raises(RowRejectedError) as rejection:
        _problem(sciknoweval.SHAPE, row)
    assert rejection.value.code == code


def test_tooluse_reads_real_rows():
    for raw in CALLS[:3]:
        problem = _problem(tooluse.SHAPE, raw)
        assert [turn.content for turn in problem.prompt] == [raw["prompt"]]
        assert problem.reference["tool_names"] == [
            "getRandomAxolotlImage",
            "searchAxolotlImages",
            "getAxolotlFacts",
        ]
        assert [call["name"] for call in problem.reference["calls"]] == [
            call["Action"] for call in json.loads(raw["answer"])
        ]


def test_tooluse_keeps_nested_arguments():
    problem = _problem(tooluse.SHAPE, CALLS[4072 - 4046])
    arguments = problem.reference["calls"][0]["arguments"]
    assert arguments["profileData"] == {"profilePictureUrl": "https://example.com/new_image.jpg"}


def _answer(**call: object) -> dict[str, object]:
    return {"answer": json.dumps([{"Action": "getAxolotlFacts", "Action_Input": "{}", **call}])}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"prompt": 3}, "missing_field"),
        ({"prompt": "Question: what?"}, "prompt_not_read"),
        ({"answer": "[{"}, "gold_not_json"),
        ({"answer": "[]"}, "no_gold"),
        (_answer(Action="getDetails"), "gold_tool_unknown"),
        (_answer(Action="[Optional]getAxolotlFacts"), "gold_tool_unknown"),
        (_answer(Action_Input='{"limit": "${limit from earlier}"}'), "gold_has_placeholder"),
        (_answer(Action_Input="{'limit': 3}"), "gold_input_not_object"),
        (_answer(Action_Input="[1]"), "gold_input_not_object"),
        (_answer(Action_Input='{"limit": NaN}'), "gold_input_not_object"),
        (_answer(Action_Input={"limit": 3}), "missing_field"),
    ],
)
def test_tooluse_rejects_broken_rows(change, code):
    row = {**CALLS[0], **change}
    with pytest.raises(RowRejectedError) as rejection:
        _problem(tooluse.SHAPE, row)
    assert rejection.value.code == code


def test_tooluse_keeps_a_lone_dollar():
    row = {**CALLS[0], **_answer(Action_Input='{"category": "pa$$word"}')}
    assert _problem(tooluse.SHAPE, row).reference["calls"][0]["arguments"] == {"category": "pa$$word"}


def test_words_read_real_rows():
    for word in ("aal", "dragon", "zoo"):
        assert word in WORDS
        problem = _problem(spell_backward.SHAPE, {"word": word})
        assert problem.prompt[0].content == f"Spell this word backward (example: sun -> nus): {word}"
        assert problem.reference == {"answer": word[::-1], "word": word}
        assert problem.privileged == word[::-1]


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("level", "palindrome"),
        ("Ada9", "not_a_word"),
        ("\ufffd", "not_a_word"),
        (" ", "missing_field"),
        (3, "missing_field"),
    ],
)
def test_words_reject_broken_rows(word, code):
    with pytest.raises(RowRejectedError) as rejection:
        _problem(spell_backward.SHAPE, {"word": word})
    assert rejection.value.code == code


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b"\xff{}",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"answer": "A", "answer": "B"}',
    ],
)
def test_parse_json_line_rejects_what_is_no_object(line):
    with pytest.raises(RowRejectedError) as rejection:
        parse_json_line(line)
    assert rejection.value.code == "bad_json"
