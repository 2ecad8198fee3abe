"""Following a job of ours from submission to its end."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.ray_jobs import JobRecord, RayJobs

_ROOT = Path(__file__).resolve().parent.parent
_FOR_EVER = float("inf")
# Every cell of a matrix is watched at once; Ray starts the next job by itself, so nothing waits for this.
_POLL_SECONDS = 2.0


def job_command(module: str, *, home: Path, fingerprint: str) -> tuple[str, ...]:
    """Command line of one of our job modules."""
    return (sys.executable, "-m", module, "--home", str(home), "--fingerprint", fingerprint)


def job_environment(threads: int) -> dict[str, str]:
    """Thread counts must be known before torch is imported."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def follow(
    jobs: RayJobs, *, key: str, command: Sequence[str], env: Mapping[str, str], cpus: float, log: Path, gpus: float = 0
) -> JobRecord:
    """Submit or attach, and wait for the end; a failed job's output is kept at `log`, since Ray's own goes with it."""
    handle = jobs.submit_or_attach(key, entrypoint=command, folder=_ROOT, env=env, cpus=cpus, gpus=gpus)
    record = jobs.wait(handle, seconds=_FOR_EVER, poll_seconds=_POLL_SECONDS)
    if record.state == "failed":
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(jobs.logs(handle), encoding="utf-8")
    return record
