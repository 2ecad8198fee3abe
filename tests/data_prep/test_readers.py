"""Rows of files: formats by content, arrays as streams, parquet and JSON Lines alike."""

import json

import datasets  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.readers import file_rows, format_of
from data_prep.shapes.base import parse_json_line
from sdpo_core.errors import DataError

ROWS = [{"a": 1, "b": "x\u2028y"}, {"a": 2, "b": "[{"}, {"a": 3, "b": "z" * 200_000}, {"a": 4, "b": '"]\\'}]

_rows = st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=200) | st.integers() | st.none()), max_size=8)


def _read(path):
    rows = list(file_rows(path, where="here"))
    assert [row.number for row in rows] == sorted({row.number for row in rows})
    return [parse_json_line(row.content) if isinstance(row.content, bytes) else row.content for row in rows]


def _lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_format_of_looks_at_content_and_not_at_the_name(tmp_path):
    contents = {
        "a.parquet": b' \n{"x": 1}',
        "b.jsonl": b"\n\n [\n",
        "c.json": b"PAR1...",
        "d.json": b"\xef\xbb\xbf{}",
        "e.jsonl": b"# A page",
        "f.json": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    found = [format_of(tmp_path / name) for name in contents]
    assert found == ["lines", "array", "parquet", "lines", None, None]


@pytest.mark.parametrize("indent", [None, 1])
def test_file_rows_reads_arrays_and_lines_alike(tmp_path, indent):
    """The third row is longer than what is read at once; strings that look like ends and starts are neither."""
    (tmp_path / "array").write_text(json.dumps(ROWS, indent=indent, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "lines").write_text(_lines(ROWS), encoding="utf-8")
    assert _read(tmp_path / "array") == _read(tmp_path / "lines") == ROWS


@settings(max_examples=200, deadline=None)
@given(rows=_rows, indent=st.sampled_from([None, 2]))
def test_file_rows_reads_any_array(tmp_path_factory, rows, indent):
    path = tmp_path_factory.mktemp("any") / "rows"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    assert _read(path) == rows


def test_file_rows_counts_lines_as_an_editor_does(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": 2}')
    assert [(row.number, row.content) for row in file_rows(path, where="here")] == [(1, b'{"a": 1}'), (4, b'{"a": 2}')]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"a": 1}, {"a": ', "after 1 rows"),
        ('[{"a": 1} {"a": 2}]', "between two rows"),
        ('[{"a": 1}', "does not end"),
        ('[{"a": 1},', "after 1 rows"),
        ("[", "after 0 rows"),
        ('[{"a": 1}] and more', "after the end"),
        ("[" * 100_000, "after 0 rows"),
    ],
)
def test_file_rows_refuses_a_damaged_array(tmp_path, text, why):
    (tmp_path / "rows").write_text(text)
    with pytest.raises(DataError, match=f"^here: got a damaged JSON array .*{why}"):
        list(file_rows(tmp_path / "rows", where="here"))


def test_file_rows_refuses_an_array_that_is_no_text(tmp_path):
    (tmp_path / "rows").write_bytes(b'[{"a": "\xff"}]')
    with pytest.raises(DataError, match="damaged JSON array"):
        list(file_rows(tmp_path / "rows", where="here"))


def test_file_rows_gives_elements_that_are_no_rows_to_be_rejected(tmp_path):
    (tmp_path / "rows").write_text('[1, {"a": 1}, "x"]')
    assert [row.text() for row in file_rows(tmp_path / "rows", where="here")] == ["1", '{"a": 1}', '"x"']


def test_file_rows_reads_parquet_and_leaves_out_what_a_row_does_not_have(tmp_path):
    rows = [{"a": 1, "b": {"text": ["x", "y"]}, "c": None}, {"a": 2, "b": {"text": []}, "c": "z"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.json")
    assert _read(tmp_path / "rows.json") == [{"a": 1, "b": {"text": ["x", "y"]}}, rows[1]]


def test_file_rows_refuses_damaged_parquet(tmp_path):
    (tmp_path / "rows").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"^here: got .*Repair the file"):
        list(file_rows(tmp_path / "rows", where="here"))
