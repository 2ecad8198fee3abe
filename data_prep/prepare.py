"""Preparing a data set: sources to canonical JSON Lines, quarantine and manifest, in one atomic step.

<home>/data/<name>/
    train.jsonl, dev.jsonl, test.jsonl[, warmup.jsonl]   canonical problems
    quarantine.jsonl   rows read and not kept, with code and note
    manifest.json      counts, baselines, sources, digest
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_prep.baselines import baselines
from data_prep.manifest import MANIFEST_NAME, Manifest, data_digest
from data_prep.rules import Outcome, apply_rules
from data_prep.shapes.base import Origin, Quarantined, RowRejectedError, Shape, parse_json_line
from data_prep.sources import SourceContent, read_source, supplied_path
from data_prep.splits import Candidate, RawRow
from data_prep.table import DATASETS, DatasetEntry
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Problem

_SPLITS = ("train", "dev", "test", "warmup")


def prepare_dataset(name: str, *, home: Path) -> Manifest:
    """Prepare a data set of the table under `home`; the same input gives the same bytes, which are left alone.

    Raises:
        SpecError: no such data set.
        DataError: a source is damaged, or nothing of it survives.
    """
    if name not in DATASETS:
        raise SpecError(f"prepare: got data set {name!r}, expected one of {', '.join(DATASETS)}. Correct the name.")
    entry = DATASETS[name]
    contents = [content for file in entry.files if (content := read_source(file, home=home)) is not None]
    outcome = _collect(name, entry=entry, contents=contents)
    files, manifest = _render(name, entry=entry, contents=contents, outcome=outcome)
    _write_folder(home / "data" / name, files=files)
    return manifest


def _collect(name: str, *, entry: DatasetEntry, contents: Sequence[SourceContent]) -> Outcome:
    rows = [row for content in contents for row in _raw_rows(name, entry=entry, content=content)]
    read = (item for row in entry.policy.order(rows) for item in _read_row(row, shape=entry.shape))
    candidates: list[Candidate] = []
    rejected: list[Quarantined] = []
    for item in entry.policy.assign(read):
        if isinstance(item, Candidate):
            candidates.append(item)
        else:
            rejected.append(item)
    ruled = apply_rules(candidates)
    outcome = Outcome(kept=ruled.kept, quarantined=(*rejected, *ruled.quarantined))
    _check_survivors(contents, outcome=outcome)
    return outcome


def _raw_rows(name: str, *, entry: DatasetEntry, content: SourceContent) -> Iterator[RawRow]:
    path = content.to_json()["path"]
    for number, line in enumerate(content.lines, start=1):
        if line is not None and entry.policy.is_eligible(line):
            origin = Origin(
                dataset=name,
                domain=entry.domain,
                source=entry.source,
                repository=content.repository,
                revision=content.revision,
                path=path,
                line=number,
                split=content.file.split,
            )
            yield RawRow(line=line, origin=origin)


def _read_row(row: RawRow, *, shape: Shape) -> Iterator[Candidate | Quarantined]:
    try:
        is_word = shape.name == "word"
        parsed = {"word": row.line.decode(errors="replace").strip()} if is_word else parse_json_line(row.line)
        for item in shape.problems(parsed, row.origin):
            if isinstance(item, Problem):
                yield Candidate(problem=item, row=row)
            else:
                yield row.quarantined(item.code, item.note)
    except RowRejectedError as rejection:
        yield row.quarantined(rejection.code, rejection.note)


def _check_survivors(contents: Sequence[SourceContent], *, outcome: Outcome) -> None:
    alive = {item.row.origin.path for item in outcome.kept}
    for content in contents:
        path = content.to_json()["path"]
        if path not in alive:
            codes = dict(Counter(item.code for item in outcome.quarantined if item.path == path))
            raise DataError(
                f"{path}: got no usable row ({codes or 'the file is empty'}), expected at least one. "
                "Compare its rows with docs/data.md."
            )


def _render(
    name: str, *, entry: DatasetEntry, contents: Sequence[SourceContent], outcome: Outcome
) -> tuple[dict[str, bytes], Manifest]:
    """File names with their bytes, and the manifest (which is among them)."""
    problems: dict[str, list[Problem]] = {split: [] for split in _SPLITS}
    for item in outcome.kept:
        problems[item.problem.split].append(item.problem)
    if not problems["warmup"]:
        del problems["warmup"]
    files = {f"{split}.jsonl": _json_lines([problem.to_json() for problem in rows]) for split, rows in problems.items()}
    hashes = {split: hashlib.sha256(files[f"{split}.jsonl"]).hexdigest() for split in problems}
    guesses = baselines(entry.task, problems=problems)
    manifest = Manifest(
        name=name,
        digest=data_digest(hashes),
        splits={split: len(rows) for split, rows in problems.items()},
        rows_read=len(outcome.kept) + len(outcome.quarantined),
        kept=len(outcome.kept),
        quarantined=_counts([item.code for item in outcome.quarantined]),
        flagged=_counts([flag for item in outcome.kept for flag in item.problem.flags]),
        baselines=guesses.scores,
        baseline_choices=guesses.choices,
        files=hashes,
        source={
            "files": [content.to_json() for content in contents],
            "supplied": [supplied_path(file) for file in entry.files if file.is_supplied],
        },
    )
    files["quarantine.jsonl"] = _json_lines([item.to_json() for item in outcome.quarantined])
    files[MANIFEST_NAME] = (json.dumps(manifest.to_json(), indent=1, ensure_ascii=False) + "\n").encode()
    return files, manifest


def _counts(codes: Sequence[str]) -> dict[str, int]:
    return dict(sorted(Counter(codes).items()))


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def _write_folder(folder: Path, *, files: Mapping[str, bytes]) -> None:
    """Replace the folder as a whole, unless it holds these bytes already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir() and {path.name: path.read_bytes() for path in folder.iterdir()} == files:
            return
        aside, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
        # Left behind by a run that was killed; the lock says that nobody is at work on them.
        for stale in (aside, old):
            if stale.exists():
                shutil.rmtree(stale)
        aside.mkdir()
        for name, content in files.items():
            with (aside / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        if old.exists():
            shutil.rmtree(old)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two runs that prepare one data set take turns."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
