"""One cell's journal in the store: the truth that everything else is a projection of. Torch-free.

    <home>/cells/<fingerprint>/
        spec.json      the CellSpec, the fingerprint, the digests of data and bases, the numerics version
        lease.json     who trains it now; an exclusive lock on this file is the lease itself
        metrics.jsonl  one line a record: {"step", "moment", "time", "metrics"}
        samples.jsonl  one line a kept rollout
        checkpoints/   step-NNNNNN/ (see checkpoint.py)
        result.json    written last: its presence means `done`
        error.json     the last failure: {"error", "time"}
        tracking.json  the MLflow run this journal was sent to

Every file but the two `.jsonl` is replaced atomically; those are appended to, and cut back to the last checkpoint on
resume, so that no step appears twice.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sdpo_core.errors import DataError
from sdpo_core.fingerprint import NUMERICS_VERSION, cell_fingerprint
from sdpo_core.metrics import Moment
from sdpo_core.specs import CellSpec

CellState = Literal["done", "running", "failed", "missing", "stale"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a damaged file is a DataError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: got damaged JSON ({error}), expected one object. Delete its folder to start it afresh."
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: got {type(value).__name__}, expected one JSON object. Delete its folder.")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` beside `path`, flush it to disk and rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRecord:
    """One line of `metrics.jsonl`; `time` is in Unix seconds; a value of None is a mean over nothing."""

    step: int
    moment: Moment
    time: float
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellStatus:
    """State of a cell with a line that explains it (an error, how far it came, why it is stale)."""

    state: CellState
    note: str = ""


class Journal:
    """The folder of one cell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def spec_path(self) -> Path:
        return self.folder / "spec.json"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.folder / "samples.jsonl"

    @property
    def result_path(self) -> Path:
        return self.folder / "result.json"

    @property
    def error_path(self) -> Path:
        return self.folder / "error.json"

    @property
    def lease_path(self) -> Path:
        return self.folder / "lease.json"

    @property
    def tracking_path(self) -> Path:
        return self.folder / "tracking.json"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def write_spec(
        self,
        spec: CellSpec,
        *,
        fingerprint: str,
        data_digest: str,
        base_digest: str,
        base_fingerprint: str,
        teacher_digest: str | None,
        teacher_fingerprint: str | None,
    ) -> None:
        """`base_fingerprint`, `teacher_fingerprint`: the folders under `bases` that hold the weights."""
        write_json(
            self.spec_path,
            {
                "fingerprint": fingerprint,
                "numerics_version": NUMERICS_VERSION,
                "data_digest": data_digest,
                "base_digest": base_digest,
                "base_fingerprint": base_fingerprint,
                "teacher_digest": teacher_digest,
                "teacher_fingerprint": teacher_fingerprint,
                "spec": spec.model_dump(mode="json"),
            },
        )

    def read_spec(self) -> CellSpec:
        return CellSpec.model_validate(read_json(self.spec_path)["spec"])

    def append_metrics(self, record: MetricRecord) -> None:
        line = {
            "step": record.step,
            "moment": record.moment,
            "time": round(record.time, 3),
            "metrics": dict(record.metrics),
        }
        _append_line(self.metrics_path, line)

    def append_sample(self, sample: Mapping[str, Any]) -> None:
        _append_line(self.samples_path, sample)

    def read_metrics(self) -> tuple[MetricRecord, ...]:
        return tuple(
            MetricRecord(step=row["step"], moment=row["moment"], time=row["time"], metrics=row["metrics"])
            for row in _read_lines(self.metrics_path)
        )

    def read_samples(self) -> tuple[dict[str, Any], ...]:
        return tuple(_read_lines(self.samples_path))

    def sizes(self) -> dict[str, int]:
        """Bytes of the two appended files, for the checkpoint."""
        return {path.name: path.stat().st_size if path.exists() else 0 for path in self._appended()}

    def truncate(self, sizes: Mapping[str, int]) -> None:
        """Cut the appended files back to `sizes` (those of a checkpoint, or empty ones)."""
        for path in self._appended():
            size = sizes.get(path.name, 0)
            if not path.exists() and size == 0:
                continue
            if not path.exists() or path.stat().st_size < size:
                raise DataError(
                    f"{path}: got a file shorter than its checkpoint says ({size} bytes), expected the whole journal. "
                    f"Delete {self.folder} to train the cell afresh."
                )
            os.truncate(path, size)

    def _appended(self) -> tuple[Path, Path]:
        return (self.metrics_path, self.samples_path)

    def committed_step(self) -> int:
        """Step of the newest committed checkpoint, 0 without one."""
        if not self.checkpoints.is_dir():
            return 0
        steps = [int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-??????")]
        return max(steps, default=0)

    def status(self) -> CellStatus:
        """State from the files alone; `stale` is found by `Store.status`, which knows the neighbours."""
        if self.result_path.exists():
            return CellStatus(state="done")
        if self.is_leased():
            return CellStatus(state="running", note=f"checkpoint at step {self.committed_step()}")
        if self.error_path.exists():
            return CellStatus(state="failed", note=str(read_json(self.error_path)["error"]))
        step = self.committed_step()
        return CellStatus(state="missing", note=f"interrupted, resumes from step {step}" if step else "")

    def is_leased(self) -> bool:
        """True while a driver holds the lease."""
        if not self.lease_path.exists():
            return False
        with self.lease_path.open() as file:
            try:
                # Shared, so that two who look at once do not see each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @contextmanager
    def lease(self, holder: Mapping[str, Any]) -> Iterator[bool]:
        """Take the lease for the block; yields False when another driver holds it. A kill releases it.

        `holder` (job id, process id, start) is written for people and for whoever wants to attach.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.lease_path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            file.truncate(0)
            json.dump(dict(holder), file)
            file.flush()
            yield True


class Store:
    """All journals under one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home

    @property
    def cells(self) -> Path:
        return self.home / "cells"

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def bases(self) -> Path:
        return self.home / "bases"

    @property
    def models(self) -> Path:
        """Hugging Face folders that the user places."""
        return self.home / "models"

    def journal(self, fingerprint: str) -> Journal:
        return Journal(self.cells / fingerprint)

    def status(self, spec: CellSpec, *, data_digest: str, base_digest: str, teacher_digest: str | None) -> CellStatus:
        """State of a cell under the current numerics version; `stale` when only an older version is done."""
        fingerprint_at = partial(
            cell_fingerprint, spec, data_digest=data_digest, base_digest=base_digest, teacher_digest=teacher_digest
        )
        fingerprint = fingerprint_at()
        status = self.journal(fingerprint).status()
        if status.state != "missing" or status.note:
            return status
        for version in range(1, NUMERICS_VERSION):
            older = fingerprint_at(numerics_version=version)
            if self.journal(older).result_path.exists():
                return CellStatus(state="stale", note=f"done as {older} under numerics version {version}")
        return status


def _append_line(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines only: a writer may be in the middle of the last one."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number}: got damaged JSON ({error}), expected one object a line. "
                    f"Delete {path.parent} to train the cell afresh."
                ) from None
