"""Preparing a data set: sources to canonical JSON Lines, quarantine, manifest and card, in one atomic step.

<home>/data/<name>/
    train.jsonl, dev.jsonl, test.jsonl[, warmup.jsonl]   canonical problems
    quarantine.jsonl   rows read and not kept, with code and note
    manifest.json      counts, baselines, sources, digest
    card.md            the same for a person to read
"""

import fcntl
import filecmp
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.baselines import Guesses
from data_prep.card import CARD_NAME, render_card
from data_prep.collect import collect
from data_prep.entry import DatasetEntry
from data_prep.manifest import MANIFEST_NAME, Manifest, data_digest, read_manifest, require_train
from data_prep.mixture import collect_parts
from data_prep.rules import apply_rules, thin
from data_prep.sources import Source, open_sources, supplied_path
from data_prep.spool import SPLITS, Spool
from data_prep.table import dataset_entry
from data_prep.write import Written, write_rows
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import file_digest
from sdpo_core.journal import write_json

_SPOOL_NAME = "spool"


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What was made of a data set. `barren`: inputs of which no row survived, with what became of their rows."""

    manifest: Manifest
    barren: tuple[str, ...]


def prepare_dataset(name: str, *, home: Path) -> Manifest:
    """Prepare a data set under `home`; the same input gives the same bytes, which are left alone.

    Raises:
        SpecError: no such data set, or a mixture with a part that has no training rows.
        DataError: a source is damaged, or nothing of it survives.
    """
    return _prepare(dataset_entry(name), home=home)


def build(entry: DatasetEntry, *, home: Path, folder: Path) -> Built:
    """Write a data set into an empty folder, whatever becomes of its rows. Parts of a mixture are prepared already."""
    sources = tuple(source for file in entry.files for source in open_sources(file, home=home))
    counts: Sequence[int] = ()
    with Spool(folder / _SPOOL_NAME) as spool:
        if entry.parts:
            collect_parts(entry, home=home, spool=spool)
        else:
            counts = collect(entry, sources, spool=spool)
        records = spool.records()
        verdicts = apply_rules(records)
        if entry.parts:
            thin(records, weights=[part.weight for part in entry.parts], fate=verdicts.fate)
        written = write_rows(entry, spool, records=records, verdicts=verdicts, folder=folder)
    (folder / _SPOOL_NAME).unlink()
    manifest = _manifest(entry, written, source=_source_facts(entry, sources, counts=counts, home=home), folder=folder)
    write_json(folder / MANIFEST_NAME, manifest.to_json())
    (folder / CARD_NAME).write_text(render_card(entry, manifest), encoding="utf-8")
    return Built(manifest=manifest, barren=tuple(_barren(entry, sources, written=written)))


def _prepare(entry: DatasetEntry, *, home: Path) -> Manifest:
    for part in entry.parts:
        require_train(_prepare(part.entry, home=home))
    with _replaced(home / "data" / entry.name) as folder:
        built = build(entry, home=home, folder=folder)
        if built.barren:
            raise DataError(
                f"{'; '.join(built.barren)}, expected at least one. Compare its rows with docs/data.md, or run "
                "`sdpo prepare --check PATH`."
            )
    return built.manifest


def _manifest(entry: DatasetEntry, written: Written, *, source: dict[str, Any], folder: Path) -> Manifest:
    guesses = _merged(written.guesses.values())
    found = guesses.baselines()
    files: dict[str, str] = {
        split: file_digest(path) for split in SPLITS if (path := folder / f"{split}.jsonl").exists()
    }
    shapes: dict[str, Counter[str]] = {}
    for (_, shape, code), count in sorted(written.fates.items()):
        shapes.setdefault(shape, Counter())[code or "kept"] += count
    codes = sum(shapes.values(), Counter())
    kept = codes.pop("kept", 0)
    leaks = {code: codes[code] for code in ("group_in_test", "group_in_dev") if codes[code]}
    return Manifest(
        name=entry.name,
        digest=data_digest(files),
        splits={split: guesses.rows[split] for split in files},
        rows_read=kept + codes.total(),
        kept=kept,
        quarantined=dict(sorted(codes.items())),
        flagged=dict(sorted(written.flags.items())),
        baselines=found.scores,
        baseline_choices=found.choices,
        files=files,
        source=source,
        tasks=dict(sorted(written.tasks.items())),
        shapes={shape: dict(counts) for shape, counts in sorted(shapes.items())},
        leaks={**leaks, **({"test_stem_in_train": written.stems[False]} if written.stems else {})},
        by_task=_facts((task, counted) for (_, task), counted in written.guesses.items() if task is not None),
        by_part=_facts((part, counted) for (part, _), counted in written.guesses.items() if entry.parts),
    )


def _merged(counted: Iterable[Guesses]) -> Guesses:
    merged = Guesses()
    for guesses in counted:
        merged.merge(guesses)
    return merged


def _facts(named: Iterable[tuple[str, Guesses]]) -> dict[str, dict[str, Any]]:
    """Rows and baselines of what goes by one name."""
    groups: dict[str, list[Guesses]] = {}
    for name, guesses in named:
        groups.setdefault(name, []).append(guesses)
    facts = {}
    for name, members in sorted(groups.items()):
        guesses = _merged(members)
        found = guesses.baselines()
        rows = {split: guesses.rows[split] for split in SPLITS if guesses.rows[split]}
        facts[name] = {"rows": rows, "baselines": found.scores, "baseline_choices": found.choices}
    return facts


def _source_facts(
    entry: DatasetEntry, sources: Sequence[Source], *, counts: Sequence[int], home: Path
) -> dict[str, Any]:
    """Where the rows come from; `ignored`: files beside them that hold none."""
    files = [
        {**source.to_json(), "rows": count}
        for source, count in zip(sources, counts, strict=True)
        if source.rows is not None
    ]
    supplied = [supplied_path(file) for file in entry.files if file.where == "supplied"]
    ignored = [source.label for source in sources if source.rows is None]
    parts = [
        {
            "name": part.entry.name,
            "weight": part.weight,
            "digest": read_manifest(home / "data" / part.entry.name).digest,
        }
        for part in entry.parts
    ]
    facts = {"files": files, "supplied": supplied}
    return {**facts, **({"ignored": ignored} if ignored else {}), **({"parts": parts} if parts else {})}


def _barren(entry: DatasetEntry, sources: Sequence[Source], *, written: Written) -> Iterator[str]:
    """A folder is one input, which may hold files that give nothing."""
    for file in entry.files:
        numbers = {number for number, source in enumerate(sources) if source.file == file}
        codes: Counter[str] = Counter()
        for (source, _, code), count in written.fates.items():
            if source in numbers:
                codes[code] += count
        if numbers and not codes[""]:
            label = sources[min(numbers)].label if len(numbers) == 1 else supplied_path(file)
            yield f"{label}: got no usable row ({dict(codes) if codes.total() else 'there are no rows'})"


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` as a whole at the end, unless that holds the same already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f".{folder.name}.lock")):
        aside, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("new", "old"))
        # Left behind by a run that was killed; the lock says that nobody is at work on them.
        for stale in (aside, old):
            if stale.exists():
                shutil.rmtree(stale)
        aside.mkdir()
        try:
            yield aside
            if not _same_files(aside, folder):
                _flush(aside)
                if folder.exists():
                    folder.rename(old)
                aside.rename(folder)
        finally:
            for stale in (aside, old):
                if stale.exists():
                    shutil.rmtree(stale)


def _same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or sorted(path.name for path in other.iterdir()) != names:
        return False
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Two runs that prepare one data set take turns."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
