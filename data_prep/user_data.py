"""Data sets that a user names in the place of one of the table: `file:PATH` and `hub:NAME@REVISION[:CONFIG]`.

A file's name in all that is written is its stem and a digest of its content. Where it lies stays out of ids and
fingerprints, and a changed file is another data set.

A file that is one JSON object declares a data set made of others, named as anywhere else:

    {"parts": {"sciknoweval-physics": 2, "file:mine.jsonl": 1}, "task": "mcq", "permute": 7}

`task`, needed where the parts differ in it, says whose numbers a profile gives it. `permute` is optional.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from data_prep.collect import outcomes
from data_prep.entry import DatasetEntry, Part
from data_prep.hub import PREFIX as HUB
from data_prep.hub import hub_name
from data_prep.sources import SourceFile, files_below, open_sources
from data_prep.splits import HashedSplits
from sdpo_core.errors import SpecError
from sdpo_core.fingerprint import digest, file_digest
from sdpo_core.records import Problem

FILE = "file:"

_DIGITS = 12
_MAX_STEM = 40
_MAX_DECLARATION_BYTES = 1 << 16
_KEYS = frozenset({"parts", "task", "permute"})
_EXPECTED = 'expected {"parts": {NAME: WEIGHT, ...}} with task and permute where wanted'

Lookup = Callable[[str], DatasetEntry]


def is_named_by_user(name: str) -> bool:
    """Whether a data set's name is one of the two forms."""
    return name.startswith((FILE, HUB))


def user_entry(name: str, *, lookup: Lookup) -> DatasetEntry:
    """The data set of such a name; `lookup` finds those that a declaration names.

    Raises:
        SpecError: a name without a commit, a path without a file, a faulty declaration.
    """
    if name.startswith(HUB):
        return _hub_entry(name)
    path = Path(name.removeprefix(FILE))
    if not path.exists():
        raise SpecError(f"data set: got {name!r}, expected a file or folder there. Correct the path.")
    declaration = _declaration(path)
    return _file_entry(path) if declaration is None else _mixture(path, declaration, lookup=lookup)


def mixture_entry(
    name: str,
    *,
    parts: tuple[Part, ...],
    task: str | None = None,
    permute: int | None = None,
    notes: Sequence[str] = (),
) -> DatasetEntry:
    """A mixture; without `task` the parts' own, which must then be one."""
    tasks = sorted({str(part.entry.task) for part in parts})
    if task is None and (len(tasks) > 1 or parts[0].entry.task is None):
        raise SpecError(
            f"data set {name}: got parts of the tasks {', '.join(tasks)}, expected one task, or `task` to say whose "
            "numbers a profile gives to all of them. Add it."
        )
    return DatasetEntry(name=name, task=task or tasks[0], tasks=None, parts=parts, permute=permute, notes=notes)


def _hub_entry(name: str) -> DatasetEntry:
    hub = hub_name(name)
    config = "" if hub.config is None else f"-{hub.config}"
    slug = re.sub(r"[^a-z0-9_-]+", "-", f"{hub.name}-{hub.revision[:_DIGITS]}{config}".lower())
    file = SourceFile(path=name, split=None, where="hub", source="hub")
    return DatasetEntry(name=slug, task=None, tasks=None, files=(file,), policy=HashedSplits())


def _file_entry(path: Path) -> DatasetEntry:
    states = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_below(path))
    return _read_entry(path, states)


@cache
def _read_entry(path: Path, states: tuple[tuple[str, int, int], ...]) -> DatasetEntry:
    """The entry of files in these states: reading them all is worth remembering."""
    names = [Path(file).relative_to(path).as_posix() for file, _, _ in states]
    digests = [file_digest(Path(file)) for file, _, _ in states]
    content = digests[0] if path.is_file() else digest(list(zip(names, digests, strict=True)))
    name = f"{_slug(path)}-{content[:_DIGITS]}"
    file = SourceFile(path=str(path), split=None, where="named", source="file", label=name)
    entry = DatasetEntry(name=name, task=None, tasks=None, files=(file,), policy=HashedSplits())
    problems = (item.result for item in outcomes(entry, open_sources(file, home=Path())))
    return replace(entry, task=next((item.task for item in problems if isinstance(item, Problem)), None))


def _declaration(path: Path) -> Mapping[str, Any] | None:
    """The object of a file that holds one, with parts; None where it holds rows."""
    if not path.is_file() or path.stat().st_size > _MAX_DECLARATION_BYTES:
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "parts" in value else None


def _mixture(path: Path, value: Mapping[str, Any], *, lookup: Lookup) -> DatasetEntry:
    parts, task, permute = value["parts"], value.get("task"), value.get("permute")
    faults = [f"the keys {', '.join(sorted(unknown))}"] if (unknown := value.keys() - _KEYS) else []
    if not isinstance(parts, dict) or not parts or not all(_is_weight(weight) for weight in parts.values()):
        faults.append("parts that are no names with weights above 0")
    if not isinstance(task, str | None) or not isinstance(permute, int | None) or isinstance(permute, bool):
        faults.append("a task that is no text or a permute that is no whole number")
    if faults:
        raise SpecError(f"{path}: got {' and '.join(faults)}, {_EXPECTED}. Correct it.")
    found = tuple(Part(entry=lookup(_beside(path, name)), weight=float(weight)) for name, weight in parts.items())
    # The parts by the names that stand for their content: paths have no say in what this is.
    content = digest({"parts": {part.entry.name: part.weight for part in found}, "task": task, "permute": permute})
    return mixture_entry(f"{_slug(path)}-{content[:_DIGITS]}", parts=found, task=task, permute=permute)


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _beside(path: Path, name: str) -> str:
    """The name of a part; a path in it starts from the folder of the declaration."""
    return f"{FILE}{path.parent / name.removeprefix(FILE)}" if name.startswith(FILE) else name


def _slug(path: Path) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", path.absolute().stem.lower()).strip("-")[:_MAX_STEM] or "data"
