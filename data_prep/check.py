"""What is wrong with a user's own data, line by line: every row that preparing would not keep, and why."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.entry import DatasetEntry
from data_prep.prepare import build
from data_prep.table import dataset_entry
from data_prep.user_data import FILE
from data_prep.write import QUARANTINE_NAME

# Beside what the shapes have to say: nobody has to know the other ones to write a row.
_OWN_FORM = "a row of your own has prompt, task, and label or reference (docs/data.md)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One row that is not usable, or a file without rows (line 0). `code`: one of `data_prep/codes.py`."""

    path: str
    line: int
    code: str
    note: str


def check(path: Path) -> Iterator[Fault]:
    """The faults of a file or folder of rows, or of the files that a declared mixture names, in the order of the rows.

    Raises:
        SpecError: nothing is there, or the declaration of a mixture is faulty.
        DataError: a JSON array or a parquet file is damaged as a whole.
    """
    yield from _faults(dataset_entry(f"{FILE}{path}"))


def _faults(entry: DatasetEntry) -> Iterator[Fault]:
    for part in entry.parts:
        yield from _faults(part.entry)
    named = [file for file in entry.files if file.where == "named"]
    if not named:
        return
    (file,) = named
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = build(entry, home=folder, folder=folder)
        for label in built.manifest.source.get("ignored", ()):
            note = "begins like none of JSON Lines, a JSON array, parquet"
            yield Fault(path=label.replace(file.label, file.path, 1), line=0, code="no_rows", note=note)
        with (folder / QUARANTINE_NAME).open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                note = f"{row['note']}; {_OWN_FORM}" if row["code"] == "shape_unknown" else row["note"]
                place = row["path"].replace(file.label, file.path, 1)
                yield Fault(path=place, line=row["line"], code=row["code"], note=note)
