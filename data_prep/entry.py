"""What a data set is: where its rows come from, how they are split, whose numbers a profile gives it."""

from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.sources import SourceFile
from data_prep.splits import GivenSplits, SplitPolicy

_GIVEN = GivenSplits()


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetEntry:
    """One data set: of `files`, or a mixture of `parts`.

    `task`: a profile's numbers and the warm-up are those of this task; None for a set that nobody can train on before
    it is named. `tasks`: the tasks its rows may have, None for any. `permute`: seed of another order of the options of
    each row. `marks_stems`: each test row says whether its question occurs in train, too. `notes`: what its card says.
    """

    name: str
    task: str | None
    tasks: frozenset[str] | None
    domain: str | None = None
    files: tuple[SourceFile, ...] = ()
    policy: SplitPolicy = _GIVEN
    parts: tuple["Part", ...] = ()
    permute: int | None = None
    marks_stems: bool = False
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A data set in a mixture, and its weight among the training rows."""

    entry: DatasetEntry
    weight: float
