"""How rows come to their splits: given by the source, made by hashing groups, or drawn from one list.

Every choice is made by SHA-256 of a row's group key or text: independent of row order, locale and library versions.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from data_prep.readers import SourceRow
from data_prep.shapes.base import RowRejectedError
from data_prep.sources import Source
from sdpo_core.errors import DataError
from sdpo_core.records import Problem, Split


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a row, or of one of its problems. `given`: the row or its source names the split itself."""

    row: SourceRow
    source: Source
    shape: str
    result: Problem | RowRejectedError
    given: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSplits:
    """The source names train and test; `dev_percent` of train's groups become dev.

    `unit`: the groups, or what stands under that key of `details`, where more than one group belongs together.
    """

    dev_percent: int = 10
    unit: str | None = None

    @property
    def meaning(self) -> str:
        """The rule in words."""
        unit = "group" if self.unit is None else self.unit
        return f"Train and test are those of the source; {self.dev_percent} % of train, by hash of the {unit}, are dev"

    def order(self, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        """Rows as they stand."""
        return rows

    def assign(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Move whole groups of train to dev."""
        for outcome in outcomes:
            problem = outcome.result
            if isinstance(problem, Problem) and problem.split == "train" and self._is_dev(problem):
                yield _moved(outcome, problem, split="dev")
            else:
                yield outcome

    def _is_dev(self, problem: Problem) -> bool:
        unit = problem.group_key if self.unit is None else problem.details[self.unit]
        return _percentile(f"dev:{unit}") < self.dev_percent


@dataclass(frozen=True, kw_only=True, slots=True)
class HashedSplits:
    """Rows that come without a split get one: `test_percent` of all groups are test, `dev_percent` are dev."""

    test_percent: int = 10
    dev_percent: int = 10

    @property
    def meaning(self) -> str:
        """The rule in words."""
        return (
            f"{self.test_percent} % of all groups, by hash, are test and {self.dev_percent} % dev, where a row or its "
            "source does not say itself"
        )

    def order(self, rows: Iterable[SourceRow]) -> Iterable[SourceRow]:
        """Rows as they stand."""
        return rows

    def assign(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Put whole groups where their hash says; a split that was given stays."""
        for outcome in outcomes:
            problem = outcome.result
            if isinstance(problem, Problem) and not outcome.given:
                split = self._split(problem)
                yield outcome if split == problem.split else _moved(outcome, problem, split=split)
            else:
                yield outcome

    def _split(self, problem: Problem) -> Split:
        place = _percentile(f"split:{problem.group_key}")
        if place < self.test_percent:
            return "test"
        return "dev" if place < self.test_percent + self.dev_percent else "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSplits:
    """Splits of fixed `sizes`, filled one after the other from the lines that match `eligible`, in hash order."""

    sizes: Mapping[Split, int]
    eligible: str

    @property
    def meaning(self) -> str:
        """The rule in words."""
        sizes = ", ".join(f"{size:,} {split}" for split, size in self.sizes.items())
        return f"Splits are filled one after the other in the order of the lines' hashes: {sizes}"

    def order(self, rows: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """Eligible lines in the order of their SHA-256; a line is all that is kept of each until its turn."""
        lines = ((row.number, row.content) for row in rows if isinstance(row.content, bytes))
        matches = re.compile(self.eligible.encode()).fullmatch
        keys = sorted(
            hashlib.sha256(line).digest() + number.to_bytes(8, "big") + line for number, line in lines if matches(line)
        )
        return (SourceRow(number=int.from_bytes(key[32:40], "big"), content=key[40:]) for key in keys)

    def assign(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Fill the splits and stop; rejected rows take no place."""
        places = [split for split, size in self.sizes.items() for _ in range(size)]
        taken = 0
        for outcome in outcomes:
            if not isinstance(outcome.result, Problem):
                yield outcome
                continue
            yield _moved(outcome, outcome.result, split=places[taken])
            taken += 1
            if taken == len(places):
                return
        raise DataError(
            f"splits: got {taken} usable rows, expected {len(places)} for {dict(self.sizes)}. "
            "Lower the sizes in data_prep/table.py."
        )


SplitPolicy = GivenSplits | HashedSplits | DrawnSplits


def _percentile(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100


def _moved(outcome: Outcome, problem: Problem, *, split: Split) -> Outcome:
    return replace(outcome, result=replace(problem, split=split))
