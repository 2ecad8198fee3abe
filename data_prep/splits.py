"""How rows come to their splits: given by the source, with dev carved out of train, or drawn from one list.

Every choice is made by SHA-256 of a row's group key or text: independent of row order, locale and library versions.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from data_prep.shapes.base import Origin, Quarantined
from sdpo_core.errors import DataError
from sdpo_core.records import Problem, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One line of a source file."""

    line: bytes
    origin: Origin

    def quarantined(self, code: str, note: str) -> Quarantined:
        """The row as a line of the quarantine file."""
        return Quarantined(
            code=code,
            note=note,
            path=self.origin.path,
            line=self.origin.line,
            split=self.origin.split,
            row=self.line.decode("utf-8", errors="replace"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A problem that was read, with the row it came from."""

    problem: Problem
    row: RawRow


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSplits:
    """The source names train and test; `dev_percent` of train's groups become dev."""

    dev_percent: int = 10

    def is_eligible(self, line: bytes) -> bool:
        """Every line is a row."""
        return True

    def order(self, rows: Sequence[RawRow]) -> Sequence[RawRow]:
        """Rows as they stand."""
        return rows

    def assign(self, candidates: Iterable[Candidate | Quarantined]) -> Iterator[Candidate | Quarantined]:
        """Move whole groups of train to dev."""
        for candidate in candidates:
            if isinstance(candidate, Candidate) and candidate.problem.split == "train" and self._is_dev(candidate):
                yield _moved(candidate, split="dev")
            else:
                yield candidate

    def _is_dev(self, candidate: Candidate) -> bool:
        key = hashlib.sha256(f"dev:{candidate.problem.group_key}".encode()).hexdigest()
        return int(key, 16) % 100 < self.dev_percent


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSplits:
    """Splits of fixed `sizes`, filled one after the other from the lines that match `eligible`, in hash order."""

    sizes: Mapping[Split, int]
    eligible: str

    def is_eligible(self, line: bytes) -> bool:
        """The line matches `eligible`; asked before a row is made of it, since most lines of a word list do not."""
        return re.fullmatch(self.eligible, line.decode("utf-8", errors="replace")) is not None

    def order(self, rows: Sequence[RawRow]) -> Sequence[RawRow]:
        """Rows in the order of their SHA-256."""
        return sorted(rows, key=lambda row: hashlib.sha256(row.line).digest())

    def assign(self, candidates: Iterable[Candidate | Quarantined]) -> Iterator[Candidate | Quarantined]:
        """Fill the splits and stop; rejected rows take no place."""
        places = [split for split, size in self.sizes.items() for _ in range(size)]
        taken = 0
        for candidate in candidates:
            if isinstance(candidate, Quarantined):
                yield candidate
                continue
            yield _moved(candidate, split=places[taken])
            taken += 1
            if taken == len(places):
                return
        raise DataError(
            f"splits: got {taken} usable rows, expected {len(places)} for {dict(self.sizes)}. "
            "Lower the sizes in data_prep/table.py."
        )


SplitPolicy = GivenSplits | DrawnSplits


def _moved(candidate: Candidate, *, split: Split) -> Candidate:
    return replace(candidate, problem=replace(candidate.problem, split=split))
