"""The second look at the rows: what the rules say of each is done, and the files of the data set are written."""

import json
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.baselines import Guesses
from data_prep.collect import json_line
from data_prep.entry import DatasetEntry
from data_prep.rules import FATES, KEPT, NOT_DRAWN, Records, Verdicts
from data_prep.shapes.base import Quarantined
from data_prep.spool import SPLITS, Spool

QUARANTINE_NAME = "quarantine.jsonl"

# An odd number far from any simple fraction of 2**64: products, modulo 2**64, lie in an order of their own.
_SPREAD = 0x9E3779B97F4A7C15
_CONTRADICTED = "same_stem_other_gold"
# Notes on rows that went for another row, whose id follows.
_NOTES = {
    "exact_repeat": "repeats",
    "repeated_id": "its id was read before:",
    "group_in_test": "its question stands in test as",
    "group_in_dev": "its question stands in dev as",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Counts of what was written. `fates`: rows by source, shape and code; kept ones have no code.

    `stems`: marked test rows by whether their question occurs nowhere in train. `guesses`: by data set (a mixture has
    several) and by the task that the source names, if it names one.
    """

    fates: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    stems: Counter[bool] = field(default_factory=Counter)
    guesses: defaultdict[tuple[str, str | None], Guesses] = field(default_factory=lambda: defaultdict(Guesses))

    def count(self, row: dict[str, Any]) -> None:
        """Count a kept row."""
        metadata = row["metadata"]
        self.tasks[metadata["task"]] += 1
        self.flags.update(metadata["flags"])
        task = metadata["details"].get("task")
        self.guesses[metadata["dataset"], task if isinstance(task, str) else None].add(row)


def write_rows(entry: DatasetEntry, spool: Spool, *, records: Records, verdicts: Verdicts, folder: Path) -> Written:
    """Write split files and quarantine. A split without rows is an empty file, but for `warmup`, which is none."""
    written = Written()
    shapes, codes = list(spool.shapes), list(spool.codes)
    has_warmup = bool((records["split"] == SPLITS.index("warmup")).any())
    with ExitStack() as stack:
        files = {
            split: stack.enter_context((folder / f"{split}.jsonl").open("wb"))
            for split in SPLITS
            if split != "warmup" or has_warmup
        }
        quarantine = stack.enter_context((folder / QUARANTINE_NAME).open("wb"))
        for index in _order(entry, records):
            fate = verdicts.fate[index]
            if fate == NOT_DRAWN:
                continue
            record = records[index]
            line = spool.line(record)
            code = FATES[fate] or codes[record["code"]]
            written.fates[int(record["source"]), shapes[record["shape"]], code] += 1
            if fate != KEPT:
                witness = spool.line(records[verdicts.witness[index]])
                quarantine.write(_quarantined(line, code=code, witness=witness))
            elif code:
                quarantine.write(line)
            else:
                line = _kept(entry, line, verdicts=verdicts, index=index, written=written)
                files[SPLITS[record["split"]]].write(line)
    return written


def _order(entry: DatasetEntry, records: Records) -> NDArray[np.intp]:
    """As read; of a mixture, in an order that mixes its parts from start to end, since runs may take the first rows."""
    if not entry.parts:
        return np.arange(len(records))
    # Not the order of the draw itself: of a part that is thinned out, only the rows with low hashes are left.
    return np.argsort(records["extra"] * np.uint64(_SPREAD), kind="stable")


def _kept(entry: DatasetEntry, line: bytes, *, verdicts: Verdicts, index: np.intp, written: Written) -> bytes:
    """The line of a kept row, marked where the rules have marked it."""
    row = json.loads(line.decode())
    metadata = row["metadata"]
    is_changed = False
    if verdicts.contradicts[index] and _CONTRADICTED not in metadata["flags"]:
        metadata["flags"].append(_CONTRADICTED)
        is_changed = True
    if entry.marks_stems and metadata["split"] == "test":
        is_disjoint = not verdicts.shares_stem[index]
        metadata["details"]["stem_disjoint"] = is_disjoint
        written.stems[is_disjoint] += 1
        is_changed = True
    written.count(row)
    return json_line(row) if is_changed else line


def _quarantined(line: bytes, *, code: str, witness: bytes) -> bytes:
    """A row that was read and went for another one; what stands for its text is its canonical form."""
    text = line.decode().rstrip("\n")
    metadata = json.loads(text)["metadata"]
    row = Quarantined(
        code=code,
        note=f"{_NOTES[code]} {json.loads(witness.decode())['id']}",
        path=metadata["source"]["file"],
        line=metadata["source"]["line"],
        split=metadata["split"],
        row=text,
    )
    return json_line(row.to_json())
