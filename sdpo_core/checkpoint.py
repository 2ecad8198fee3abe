"""Checkpoints of a cell: weights, optimizer, teacher and the driver's state, committed by one rename.

    checkpoints/step-000020/
        student/    weights, optimizer state: safetensors; of several processes shares, with a manifest
        teacher/    weights, for arms with a teacher
        state.json  DriverState, the SHA-256 of every other file, and a digest of both

Each worker writes its part into a folder aside; the driver writes `state.json` and renames, once all have answered. A
folder without a final name was never a checkpoint. Nothing here is unpickled.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from sdpo_core.errors import CellError, DataError
from sdpo_core.fingerprint import digest, file_digest
from sdpo_core.journal import Journal, read_json, write_json

_STATE = "state.json"


@runtime_checkable
class Savable(Protocol):
    """A worker with a part of the checkpoint."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverState:
    """What the driver must know to go on after `step`.

    Random streams are functions of seed, step and position, so step and cursor are their whole state.
    """

    step: int
    cursor: int
    journal_sizes: Mapping[str, int]
    best_step: int
    best_accuracy: float
    weights_sha256_start: Mapping[str, str]
    started: float
    trained_seconds: float


def checkpoint_folder(journal: Journal, step: int) -> Path:
    """Where the checkpoint of `step` stands."""
    return journal.checkpoints / f"step-{step:06d}"


def save_checkpoint(journal: Journal, state: DriverState, *, workers: Mapping[str, Savable]) -> None:
    """Commit a checkpoint, then delete those that are neither the newest nor the best on dev."""
    final = checkpoint_folder(journal, state.step)
    aside = final.with_name(f".{final.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for name, worker in workers.items():
        worker.save(aside / name)
    paths = [path for path in sorted(aside.rglob("*")) if path.is_file()]
    appended = [path for path in (journal.metrics_path, journal.samples_path) if path.exists()]
    for path in (*paths, *appended):
        flush(path)
    files = {str(path.relative_to(aside)): file_digest(path) for path in paths}
    content = {"state": asdict(state), "sha256": files}
    write_json(aside / _STATE, {**content, "digest": digest(content)})
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)
    # Only once the new one is sure to be on disk may an older one go.
    flush(final.parent)
    for folder in journal.checkpoints.iterdir():
        if folder not in (final, checkpoint_folder(journal, state.best_step)):
            shutil.rmtree(folder)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(journal: Journal, *, workers: Mapping[str, Savable]) -> DriverState | None:
    """Restore the newest checkpoint into `workers`; None when there is none.

    Raises:
        CellError: a file is damaged. Nothing is deleted, and no older state is used instead.
    """
    step = journal.committed_step()
    folder = checkpoint_folder(journal, step)
    if not folder.is_dir():
        return None
    state = read_state(folder)
    for name, worker in workers.items():
        worker.load(folder / name)
    return state


def read_state(folder: Path) -> DriverState:
    """The driver's state of a checkpoint, after every file's checksum was compared."""
    try:
        content = read_json(folder / _STATE)
        expected = content.pop("digest")
    except (DataError, KeyError, OSError) as error:
        raise _damaged(folder / _STATE, why=str(error)) from None
    if digest(content) != expected:
        raise _damaged(folder / _STATE, why="another digest")
    files, state = content["sha256"], DriverState(**content["state"])
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, why="no such file")
        if file_digest(path) != expected:
            raise _damaged(path, why="another checksum")
    return state


def _damaged(path: Path, *, why: str) -> CellError:
    folder = next(parent for parent in path.parents if parent.name.startswith("step-"))
    return CellError(
        f"checkpoint {path}: got a damaged file ({why}), expected what was written. "
        f"Delete {folder} to resume from an earlier checkpoint, or the cell's folder to train it afresh."
    )
