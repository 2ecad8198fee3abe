"""What every source shape offers: a row to canonical problems, or a rejection with a code."""

import hashlib
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from sdpo_core.records import Problem, Split

_MAX_NOTE = 1_000
# Deeper values could be read, but not written again: Python's own limit stands near 1,000.
_MAX_DEPTH = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a row stands. `source` is the middle part of its problem's id; `line` counts from 1.

    `domain` is the one its data set declares; None leaves it to the row.
    """

    dataset: str
    domain: str | None
    source: str
    repository: str
    revision: str
    path: str
    line: int
    split: Split

    def to_json(self, *, idx: int | str, shape: str) -> dict[str, Any]:
        """The `source` field of the canonical row."""
        return {
            "repository": self.repository,
            "revision": self.revision,
            "file": self.path,
            "line": self.line,
            "idx": idx,
            "shape": shape,
        }


class RowRejectedError(Exception):
    """A row that cannot become a problem: a quarantine code and a note that names the field or value."""

    def __init__(self, code: str, note: str) -> None:
        # A note quotes the row, which may hold anything: half characters, which no UTF-8 file of ours could.
        note = note[:_MAX_NOTE].encode("utf-8", "backslashreplace").decode()
        super().__init__(code, note)
        self.code = code
        self.note = note


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """One line of `quarantine.jsonl`: a row that was read and not kept, as it stood in the source."""

    code: str
    note: str
    path: str
    line: int
    split: Split
    row: str

    def to_json(self) -> dict[str, Any]:
        """The JSON row."""
        return {
            "code": self.code,
            "note": self.note,
            "path": self.path,
            "line": self.line,
            "split": self.split,
            "row": self.row,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A source shape: `has_keys` tells its rows by their keys, `problems` makes canonical problems of one row.

    An API of ToolAlpaca holds many requests, so a row gives any number of problems. What cannot be kept is a
    RowRejectedError: yielded in the place of one problem, or raised where the whole row is refused. Nothing else is
    raised on whatever JSON object a source holds.
    """

    name: str
    has_keys: Callable[[Mapping[str, Any]], bool]
    problems: Callable[[Mapping[str, Any], Origin], Iterator[Problem | RowRejectedError]]


def parse_json_line(line: bytes) -> Mapping[str, Any]:
    """One JSON object in UTF-8; anything else is `bad_json`."""
    try:
        row = strict_json(line.decode("utf-8"))
        # An escape such as \ud800 decodes to half a character, which no UTF-8 file of ours could hold.
        if b"\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("bad_json", str(error)) from None
    if not isinstance(row, dict):
        raise RowRejectedError("bad_json", f"got {type(row).__name__}, expected one object")
    # Levels are counted only where there may be too many.
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _depth(row) > _MAX_DEPTH:
        raise RowRejectedError("bad_json", f"got nesting beyond {_MAX_DEPTH}")
    return row


def strict_json(text: str) -> Any:
    """The JSON value of a text; ValueError also where Python's own reader takes NaN, or one of two equal keys."""
    return _DECODER.decode(text)


def text_field(row: Mapping[str, Any], key: str) -> str:
    """The non-blank text under `key`."""
    return plain_text(row.get(key), where=key)


def plain_text(value: object, *, where: str) -> str:
    """`value`, which is text that is not blank and can be written as UTF-8; else `missing_field`."""
    if not isinstance(value, str) or not value.strip():
        raise RowRejectedError("missing_field", f"{where}: got {shown(value)}, expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            note = f"{where}: got half a character at {error.start}, expected text"
            raise RowRejectedError("missing_field", note) from None
    return value


def index_field(row: Mapping[str, Any], key: str) -> int:
    """The row number under `key`."""
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise RowRejectedError("missing_field", f"{key}: got {shown(value)}, expected a whole number")
    return value


def require_json(value: object, *, where: str) -> None:
    """Refuse, as `missing_field`, a value that could not be written as JSON and read again."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise RowRejectedError("missing_field", f"{where}: {error}") from None
    if _depth(value) > _MAX_DEPTH:
        raise RowRejectedError("missing_field", f"{where}: got nesting beyond {_MAX_DEPTH}")


def json_object(text: str, *, where: str) -> dict[str, Any]:
    """The JSON object that `text` is, every value as written; else `gold_input_not_object`."""
    try:
        value = strict_json(text)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise RowRejectedError("gold_input_not_object", f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise RowRejectedError("gold_input_not_object", f"{where}: got {type(value).__name__}")
    if _depth(value) > _MAX_DEPTH:
        raise RowRejectedError("gold_input_not_object", f"{where}: got nesting beyond {_MAX_DEPTH}")
    return value


def declared_domain(origin: Origin) -> str:
    """The domain of rows that do not name one themselves: that of the data set, or a user's own."""
    return origin.domain or "own"


def comparison_key(text: str) -> str:
    """Text for comparison only: NFKC, runs of blanks as one. Case stays, since it carries meaning in SMILES."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).split())


@cache
def file_stem(path: str) -> str:
    """Name of a file without its folder and suffix."""
    return PurePosixPath(path).stem


def group_key(*parts: str) -> str:
    """SHA-256 over comparison keys: names the rows that stay on one side of a split."""
    return hashlib.sha256("\x1f".join(comparison_key(part) for part in parts).encode()).hexdigest()


def shown(value: object) -> str:
    """A value in a note: short, and safe whatever the row holds."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    if value is None or isinstance(value, bool | float):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond bounds")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object names a key twice")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)


def _depth(value: object) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [child for item in level for child in _children(item)]:
        depth += 1
    return depth


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
