"""Checking a user's file: every fault at its line, and nothing written."""

import json

import pytest

from data_prep.check import check
from sdpo_core.errors import DataError, SpecError

GOOD = {"prompt": "Say x.", "label": "x", "task": "exact"}


def _write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_check_names_each_line_with_code_and_note(tmp_path):
    path = _write(
        tmp_path / "mine.jsonl",
        GOOD,
        "",
        {**GOOD, "lable": "x"},
        '{"prompt": ',
        {"prompt": "Say y.", "lable": "y", "task": "exact"},
        GOOD,
        {"prompt": "Say z.", "label": "z", "task": "exact"},
    )
    faults = list(check(path))
    assert [(fault.path, fault.line, fault.code) for fault in faults] == [
        (str(path), 3, "unknown_key"),
        (str(path), 4, "bad_json"),
        (str(path), 5, "shape_unknown"),
        (str(path), 6, "exact_repeat"),
    ]
    assert faults[0].note.startswith("got lable, expected details")
    assert faults[2].note.endswith("a row of your own has prompt, task, and label or reference (docs/data.md)")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mine.jsonl"]


def test_check_finds_nothing_wrong_in_good_rows(tmp_path):
    assert list(check(_write(tmp_path / "mine.jsonl", GOOD))) == []


def test_check_of_a_folder_names_the_file(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    _write(folder / "a.jsonl", GOOD)
    _write(folder / "b.json", json.dumps([{**GOOD, "prompt": "Say y."}, {"x": 1}]))
    _write(folder / "c.md", "# Rows")
    assert [(fault.path, fault.line, fault.code) for fault in check(folder)] == [
        (str(folder / "c.md"), 0, "no_rows"),
        (str(folder / "b.json"), 2, "shape_unknown"),
    ]


def test_check_of_a_mixture_looks_into_its_files(tmp_path):
    _write(tmp_path / "mine.jsonl", GOOD, {**GOOD, "task": "exakt"})
    path = _write(tmp_path / "mix.json", {"parts": {"file:mine.jsonl": 1, "spell_backward": 1}, "task": "exact"})
    assert [(fault.line, fault.code) for fault in check(path)] == [(2, "bad_reference")]


def test_check_refuses_what_cannot_be_read_at_all(tmp_path):
    with pytest.raises(SpecError, match="expected a file or folder there"):
        list(check(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="damaged JSON array"):
        list(check(_write(tmp_path / "rows.json", '[{"x": 1}')))
