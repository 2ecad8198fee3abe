"""What the jobs read from the store: problems, grading bound to a feedback level, and the facts of this machine."""

import importlib.metadata
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.graders.table import grade
from sdpo_core.cell import CellData
from sdpo_core.fingerprint import NUMERICS_VERSION
from sdpo_core.journal import Store
from sdpo_core.records import Grade, Problem, Split, read_problems
from sdpo_core.rollout.table import repeatability
from sdpo_core.specs import CellSpec, FeedbackLevel

_PACKAGES = ("torch", "transformers", "ray", "numpy")


def split(store: Store, dataset: str, name: Split) -> tuple[Problem, ...]:
    """One split of a prepared data set."""
    return read_problems(store.data / dataset / f"{name}.jsonl")


def cell_data(store: Store, dataset: str) -> CellData:
    """The splits a cell trains, chooses and tests on."""
    return CellData(
        train=split(store, dataset, "train"), dev=split(store, dataset, "dev"), test=split(store, dataset, "test")
    )


def grade_at(level: FeedbackLevel) -> Grade:
    """The grader with feedback of `level`."""
    return partial(grade, level=level)


def environment(spec: CellSpec, *, gpus: int) -> dict[str, Any]:
    """Versions, machine, and how far rollouts repeat there, for provenance: nothing of it enters a fingerprint."""
    return {
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": spec.threads_per_worker,
        "rollouts": repeatability(spec, gpus=gpus),
        "commit": _commit(),
        "numerics_version": NUMERICS_VERSION,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the code, marked when files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.stdout.strip() if shown.returncode == 0 else "unknown"
