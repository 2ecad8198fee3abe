"""What preparing keeps between its two looks at the rows: their text in a file, and a fixed-size record of each.

Records compare rows by 64-bit hashes. Two of a million rows agree by chance in 3 of 100 million such files.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_prep.shapes.base import comparison_key
from sdpo_core.records import Problem, Split

SPLITS: tuple[Split, ...] = ("train", "dev", "test", "warmup")

# `code` is 0 for a row that was read, else the number of its rejection in `Spool.codes`. `extra`: of whatever more the
# data set compares or orders its rows by.
RECORD = np.dtype(
    [
        ("offset", "<u8"),
        ("group", "<u8"),
        ("content", "<u8"),
        ("id", "<u8"),
        ("gold", "<u8"),
        ("extra", "<u8"),
        ("length", "<u4"),
        ("source", "<u2"),
        ("code", "<u2"),
        ("split", "u1"),
        ("shape", "u1"),
    ]
)
_PACK = struct.Struct("<QQQQQQIHHBB").pack


class Spool:
    """A file of lines and the records of them; a context that closes the file."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._read: BinaryIO = path.open("rb")
        self._offset = 0
        self._records = bytearray()
        self.codes: dict[str, int] = {"": 0}
        self.shapes: dict[str, int] = {}

    def __enter__(self) -> "Spool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._read.close()

    def add_problem(self, problem: Problem, line: bytes, *, source: int, shape: str, extra: str = "") -> None:
        """A canonical row, with the text that its `extra` hash is made of."""
        choices = option_keys(problem.reference)
        gold = choices.get(problem.label, problem.label)
        content = "\x1f".join((problem.group_key, gold, *sorted(choices.values())))
        hashes = (_hash(text) for text in (problem.group_key, content, problem.id, gold, extra))
        self._add(line, hashes=hashes, source=source, code=0, split=SPLITS.index(problem.split), shape=shape)

    def add_rejected(self, line: bytes, *, source: int, shape: str, code: str) -> None:
        """A line of the quarantine file."""
        number = self.codes.setdefault(code, len(self.codes))
        self._add(line, hashes=(0, 0, 0, 0, 0), source=source, code=number, split=0, shape=shape)

    def records(self) -> NDArray[np.void]:
        """All records, in the order of the rows; nothing can be added while this is in use."""
        self._file.flush()
        return np.frombuffer(self._records, dtype=RECORD)

    def line(self, record: np.void) -> bytes:
        """The line of a record."""
        self._read.seek(int(record["offset"]))
        return self._read.read(int(record["length"]))

    def _add(self, line: bytes, *, hashes: Iterable[int], source: int, code: int, split: int, shape: str) -> None:
        number = self.shapes.setdefault(shape, len(self.shapes))
        self._records += _PACK(self._offset, *hashes, len(line), source, code, split, number)
        self._file.write(line)
        self._offset += len(line)


def option_keys(reference: Mapping[str, Any]) -> dict[str, str]:
    """Options for comparison, by label; none where the task has none."""
    return {choice["label"]: comparison_key(choice["text"]) for choice in reference.get("choices", ())}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
