"""Rows of a file, one after the other: JSON Lines, a JSON array, parquet. Content tells which, never the name."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from data_prep.hub import dataset_rows
from sdpo_core.errors import DataError
from sdpo_core.records import Split

Format = Literal["lines", "array", "parquet"]

_MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8 text
_SNIFFED_BYTES = 4096
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRow:
    """One row as it stands in a source, `number` from 1. `content`: its line, or the row where there are no lines.

    `split` is one that the source itself names; None leaves it to the data set.
    """

    number: int
    content: bytes | Mapping[str, Any]
    split: Split | None = None

    def text(self) -> str:
        """The row for a person to read."""
        if isinstance(self.content, bytes):
            return self.content.decode("utf-8", errors="replace")
        return json.dumps(self.content, default=str)


def format_of(path: Path) -> Format | None:
    """What the first bytes of a file show; None where they show no rows."""
    with path.open("rb") as file:
        return _sniff(file.read(_SNIFFED_BYTES))


def file_rows(path: Path, *, where: str) -> Iterator[SourceRow]:
    """The rows of a file in one of the three formats; `where` opens the message of a damaged one."""
    if format_of(path) == "parquet":
        rows = dataset_rows("parquet", where=where, data_files=str(path))
        return (SourceRow(number=number, content=row) for number, (row, _) in enumerate(rows, start=1))
    return _opened_rows(path, where=where)


def stream_rows(file: BinaryIO, *, where: str) -> Iterator[SourceRow]:
    """The rows of JSON Lines or of a JSON array that can be read from its start."""
    start = file.read(_SNIFFED_BYTES)
    file.seek(0)
    return _array_rows(file, where=where) if _sniff(start) == "array" else line_rows(file)


def line_rows(file: BinaryIO) -> Iterator[SourceRow]:
    """One row a line that is not blank. Only \\n ends a line: others may stand inside JSON strings."""
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(_MARK).strip() if number == 1 else line.strip()
        if content:
            yield SourceRow(number=number, content=content)


def _sniff(start: bytes) -> Format | None:
    if start.startswith(b"PAR1"):
        return "parquet"
    formats: dict[bytes, Format] = {b"{": "lines", b"[": "array"}
    return formats.get(start.removeprefix(_MARK).lstrip()[:1])


def _opened_rows(path: Path, *, where: str) -> Iterator[SourceRow]:
    with path.open("rb") as file:
        yield from stream_rows(file, where=where)


def _array_rows(file: BinaryIO, *, where: str) -> Iterator[SourceRow]:
    """The elements of an array, without holding more than the one that is being read and a chunk."""
    reader = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    decoder = json.JSONDecoder()
    number = 0
    try:
        rest = _filled(reader, "")[1:]
        while not (rest := _filled(reader, rest)).startswith("]"):
            if number:
                rest = _filled(reader, _without_comma(rest))
            row, rest = _decoded(reader, rest, decoder=decoder)
            number += 1
            yield SourceRow(number=number, content=row if isinstance(row, dict) else json.dumps(row).encode())
        if _filled(reader, rest[1:]):
            raise ValueError("text after the end of the array")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: got a damaged JSON array ({error}, after {number} rows), expected an array of rows or one row "
            "a line. Repair the file."
        ) from None


def _filled(reader: io.TextIOWrapper, text: str) -> str:
    """`text` without blanks before it, read on until there is something; empty at the end of the file."""
    text = text.lstrip()
    while not text and (chunk := reader.read(_CHUNK)):
        text = chunk.lstrip()
    return text


def _without_comma(text: str) -> str:
    if not text.startswith(","):
        raise ValueError(f"got {text[:1]!r} between two rows" if text else "the array does not end")
    return text[1:]


def _decoded(reader: io.TextIOWrapper, text: str, *, decoder: json.JSONDecoder) -> tuple[Any, str]:
    """The first JSON value of `text`, reading on while it is not complete, and what follows it."""
    while True:
        try:
            value, end = decoder.raw_decode(text)
        except ValueError:
            # Twice as much each time, so that the work stays linear in the size of the value.
            chunk = reader.read(max(_CHUNK, len(text)))
            if not chunk:
                raise
            text += chunk
        else:
            return value, text[end:]
