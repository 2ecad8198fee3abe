"""Source files: the bundled data, verified on read, files that a user supplies or names, data sets of the hub."""

import hashlib
import io
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep.hub import hub_name, hub_rows
from data_prep.readers import SourceRow, file_rows, format_of, line_rows, stream_rows
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import file_digest
from sdpo_core.journal import read_json
from sdpo_core.records import Split

BUNDLED = Path(__file__).parent / "bundled"
SUPPLIED = "supplied by the user"

Where = Literal["bundled", "supplied", "named", "hub"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a data set, or a folder of them.

    `path`: below `bundled/`; below `<home>/sources/` where the user may supply it; anywhere on this machine where the
    user named it; or `hub:NAME@REVISION[:CONFIG]`. `split` is the split its rows come in, None where it says nothing.
    `source` is the middle part of its problems' ids. `label` stands for the path of a named file in all that is
    written: where it lies is this machine's business alone.
    """

    path: str
    split: Split | None
    where: Where = "bundled"
    source: str = ""
    label: str = ""
    is_word_list: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file that was found. `rows` reads it from the start, one row after the other; None where it holds no rows."""

    file: SourceFile
    label: str
    sha256: str
    repository: str
    revision: str
    licence: str
    rows: Callable[[], Iterator[SourceRow]] | None

    def to_json(self) -> dict[str, Any]:
        """The file's entry in the manifest."""
        return {
            "path": self.label,
            "split": self.file.split,
            "sha256": self.sha256,
            "repository": self.repository,
            "revision": self.revision,
            "licence": self.licence,
        }


def supplied_path(file: SourceFile) -> str:
    """Where a user places the file, below the home folder."""
    return f"sources/{file.path}"


def open_sources(file: SourceFile, *, home: Path, bundled: Path = BUNDLED) -> tuple[Source, ...]:
    """The files behind an entry, in order of their names; none where the user may supply some and did not.

    Raises:
        DataError: a bundled file is not what it was; a named one is not there or holds no rows.
    """
    if file.where == "bundled":
        return _bundled(file, folder=bundled)
    if file.where == "hub":
        return (_hub(file, home=home),)
    path = home / supplied_path(file) if file.where == "supplied" else Path(file.path)
    label = supplied_path(file) if file.where == "supplied" else file.label
    return _on_disk(file, path=path, label=label)


def files_below(path: Path) -> tuple[Path, ...]:
    """The file itself, or the files of a folder in order of their names, hidden ones left out."""
    if not path.is_dir():
        return (path,)
    found = (item for item in path.rglob("*") if item.is_file())
    return tuple(sorted(item for item in found if not any(part[0] == "." for part in item.relative_to(path).parts)))


def bundled_bytes(path: str, *, bundled: Path = BUNDLED) -> bytes:
    """The content of a bundled file, checked against its SHA-256."""
    file = SourceFile(path=path, split=None)
    return _unpacked(bundled / f"{path}.xz", sha256=_entries(file, folder=bundled)[0]["sha256"])


def _bundled(file: SourceFile, *, folder: Path) -> tuple[Source, ...]:
    return tuple(
        Source(
            file=file,
            label=entry["path"],
            sha256=entry["sha256"],
            repository=entry["repository"],
            revision=entry["revision"],
            licence=entry["licence"],
            rows=_bundled_rows(folder / f"{entry['path']}.xz", entry=entry, is_word_list=file.is_word_list),
        )
        for entry in _entries(file, folder=folder)
    )


def _entries(file: SourceFile, *, folder: Path) -> list[dict[str, Any]]:
    listing = folder / "sources.json"
    below = f"{file.path}/"
    entries = [
        entry for entry in read_json(listing)["files"] if entry["path"] == file.path or entry["path"].startswith(below)
    ]
    if not entries:
        raise DataError(f"{folder / file.path}: got no entry in {listing}, expected one. Install the package again.")
    return entries


def _bundled_rows(path: Path, *, entry: dict[str, Any], is_word_list: bool) -> Callable[[], Iterator[SourceRow]]:
    def rows() -> Iterator[SourceRow]:
        content = io.BytesIO(_unpacked(path, sha256=entry["sha256"]))
        return line_rows(content) if is_word_list else stream_rows(content, where=entry["path"])

    return rows


def _unpacked(path: Path, *, sha256: str) -> bytes:
    try:
        content = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{path}: got {error}, expected a readable .xz file. Install the package again.") from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(f"{path}: got content with SHA-256 {found}, expected {sha256}. Install the package again.")
    return content


def _on_disk(file: SourceFile, *, path: Path, label: str) -> tuple[Source, ...]:
    if not path.exists():
        if file.where == "supplied":
            return ()
        raise DataError(f"{path}: got no such file, expected one with rows. Correct the path.")
    return tuple(
        Source(
            file=file,
            label=label if item == path else f"{label}/{item.relative_to(path).as_posix()}",
            sha256=file_digest(item),
            repository=SUPPLIED,
            revision="",
            licence="",
            rows=None if format_of(item) is None else _disk_rows(item),
        )
        for item in files_below(path)
    )


def _disk_rows(path: Path) -> Callable[[], Iterator[SourceRow]]:
    return lambda: file_rows(path, where=str(path))


def _hub(file: SourceFile, *, home: Path) -> Source:
    hub = hub_name(file.path)

    def rows() -> Iterator[SourceRow]:
        for number, (row, split) in enumerate(hub_rows(hub, home=home), start=1):
            yield SourceRow(number=number, content=row, split=split)

    return Source(
        file=file,
        label=hub.label,
        sha256="",
        repository=f"huggingface.co/datasets/{hub.name}",
        revision=hub.revision,
        licence="as its page says",
        rows=rows,
    )
