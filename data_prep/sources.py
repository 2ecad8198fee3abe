"""Source files: the bundled reference data, verified on read, and files that a user supplies."""

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdpo_core.errors import DataError
from sdpo_core.journal import read_json
from sdpo_core.records import Split

BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a data set. `path`: below `bundled/`, or below `<home>/sources/` where the user supplies it.

    A supplied file may be absent. `split` is the split its rows come in; policies may move them.
    """

    path: str
    split: Split
    is_supplied: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContent:
    """What was read: the lines (bytes, without line ends; blank ones are None) and where they come from."""

    file: SourceFile
    lines: tuple[bytes | None, ...]
    sha256: str
    repository: str
    revision: str
    licence: str

    def to_json(self) -> dict[str, Any]:
        """The file's entry in the manifest."""
        return {
            "path": supplied_path(self.file) if self.file.is_supplied else self.file.path,
            "split": self.file.split,
            "rows": sum(line is not None for line in self.lines),
            "sha256": self.sha256,
            "repository": self.repository,
            "revision": self.revision,
            "licence": self.licence,
        }


def supplied_path(file: SourceFile) -> str:
    """Where a user places the file, below the home folder."""
    return f"sources/{file.path}"


def read_source(file: SourceFile, *, home: Path, bundled: Path = BUNDLED) -> SourceContent | None:
    """Read a source file; None where the user may supply one and did not."""
    if file.is_supplied:
        path = home / supplied_path(file)
        return _supplied(file, path=path) if path.exists() else None
    return _bundled(file, folder=bundled)


def _bundled(file: SourceFile, *, folder: Path) -> SourceContent:
    entries = {entry["path"]: entry for entry in read_json(folder / "sources.json")["files"]}
    path = folder / f"{file.path}.xz"
    advice = "Install the package again."
    if file.path not in entries:
        raise DataError(f"{path}: got no entry in {folder / 'sources.json'}, expected one. {advice}")
    entry = entries[file.path]
    try:
        content = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{path}: got {error}, expected a readable .xz file. {advice}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != entry["sha256"]:
        raise DataError(f"{path}: got content with SHA-256 {sha256}, expected {entry['sha256']}. {advice}")
    return SourceContent(
        file=file,
        lines=_lines(content),
        sha256=sha256,
        repository=entry["repository"],
        revision=entry["revision"],
        licence=entry["licence"],
    )


def _supplied(file: SourceFile, *, path: Path) -> SourceContent:
    content = path.read_bytes()
    is_array = content.lstrip()[:1] == b"["
    return SourceContent(
        file=file,
        lines=_array_lines(content, path=path) if is_array else _lines(content),
        sha256=hashlib.sha256(content).hexdigest(),
        repository="supplied by the user",
        revision="",
        licence="",
    )


def _lines(content: bytes) -> tuple[bytes | None, ...]:
    # Only \n ends a row: splitlines() would also break at characters that stand inside JSON strings.
    return tuple(line if line.strip() else None for line in content.rstrip(b"\n").split(b"\n"))


def _array_lines(content: bytes, *, path: Path) -> tuple[bytes | None, ...]:
    try:
        rows = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: got a damaged JSON array ({error}), expected an array of rows or one row a line. Repair the file."
        ) from None
    return tuple(json.dumps(row).encode() for row in rows)
