"""Submitting, watching and stopping Ray jobs. A job may outlive who submitted it, so its id is built to be found again.

Submission ids are `<key>-<attempt>`: Ray never takes an id twice, also not of a job that has ended. A head forgets
its jobs when it is restarted; then a job is simply submitted again and finds its own checkpoints.
"""

import logging
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import requests
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from sdpo_core.errors import CellError

JobState = Literal["pending", "running", "succeeded", "failed", "stopped"]
LIVE: tuple[JobState, ...] = ("pending", "running")
# Time for a driver to end its workers after SIGTERM; Ray's default of 3 s can cut it off.
STOP_WAIT_SECONDS = 20
# A dashboard that is busy starting a job may refuse a connection for a moment.
TRIES = 3
TRY_AGAIN_SECONDS = 0.5
ANSWER_SECONDS = 30
LOG_CHARACTERS = 20_000
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHandle:
    """A submitted job. `attached` is True when it was already there."""

    key: str
    attempt: int
    attached: bool

    @property
    def submission_id(self) -> str:
        return f"{self.key}-{self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """State of a job with Ray's own words on it."""

    state: JobState
    message: str

    @property
    def is_over(self) -> bool:
        return self.state not in LIVE


class _TimedClient(JobSubmissionClient):
    """Ray's client waits for ever for a head that hangs; this one does not."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=ANSWER_SECONDS, **options)


class RayJobs:
    """The jobs of one run on one Ray head. Safe to use from several threads."""

    def __init__(self, address: str, *, token_path: Path) -> None:
        self._address = address
        token = token_path.read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {token}"}
        self._client = self._ask(lambda: _TimedClient(address, headers=headers))
        self._handles: dict[str, JobHandle] = {}
        self._lock = threading.Lock()
        self._is_stopping = False

    def submit_or_attach(
        self,
        key: str,
        *,
        entrypoint: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        cpus: float,
        gpus: float = 0,
    ) -> JobHandle:
        """Attach to the live job of `key`, or submit a new attempt that runs `entrypoint` in `folder`.

        The job's driver holds `cpus` and `gpus` while it lives, and Ray queues what does not fit; actors the driver
        starts must not ask for them again (docs/decisions/0004). `env` is seen by the driver and its actors; no secret
        belongs there, since the dashboard shows it.

        Raises:
            CellError: the head does not answer, or `stop_all` was called.
        """
        with self._lock:
            if self._is_stopping:
                raise CellError(
                    f"job {key}: got a submission after the run was stopped, expected none. Start the run again."
                )
            # One look for both: a job that appears between two looks would be missed by the first only.
            attempts = self._attempts(key)
            live = [attempt for attempt, state in attempts.items() if state in LIVE]
            handle = (
                JobHandle(key=key, attempt=max(live), attached=True)
                if live
                else self._submit(
                    JobHandle(key=key, attempt=max(attempts, default=0) + 1, attached=False),
                    command=f"cd {shlex.quote(str(folder))} && exec {shlex.join(entrypoint)}",
                    env={**env, "PYTHONPATH": str(folder), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)},
                    cpus=cpus,
                    gpus=gpus,
                )
            )
            self._handles[handle.submission_id] = handle
            return handle

    def status(self, handle: JobHandle) -> JobRecord:
        """Where the job stands. CellError when the head does not answer or does not know it (it was restarted)."""
        details = self._ask(lambda: self._client.get_job_info(handle.submission_id))
        return JobRecord(state=_state(details), message=(details.message or "").strip())

    def logs(self, handle: JobHandle) -> str:
        """The end of what the job's driver printed."""
        return self._ask(lambda: self._client.get_job_logs(handle.submission_id))[-LOG_CHARACTERS:]

    def wait(self, handle: JobHandle, *, seconds: float, poll_seconds: float = 0.5) -> JobRecord:
        """Wait for the job's end, at most `seconds`; the last state seen."""
        deadline = time.monotonic() + seconds
        while not (record := self.status(handle)).is_over and time.monotonic() < deadline:
            time.sleep(poll_seconds)
        return record

    def stop_all(self, *, wait_seconds: float = STOP_WAIT_SECONDS + 5) -> None:
        """Stop every job this object submitted or attached to, and refuse new ones from now on.

        Jobs get SIGTERM at once and have `STOP_WAIT_SECONDS` to end. A head that is gone has no jobs.
        """
        with self._lock:
            self._is_stopping = True
            handles = list(self._handles.values())
        try:
            stopped = [handle for handle in handles if not self.status(handle).is_over]
            for handle in stopped:
                self._ask(partial(self._client.stop_job, handle.submission_id))
            deadline = time.monotonic() + wait_seconds
            for handle in stopped:
                self.wait(handle, seconds=max(0.0, deadline - time.monotonic()), poll_seconds=0.2)
        except CellError as error:
            logger.warning("stopping jobs: %s", error)

    def _attempts(self, key: str) -> dict[int, JobState]:
        pattern = re.compile(rf"{re.escape(key)}-(\d+)")
        matches = (
            (pattern.fullmatch(details.submission_id or ""), details) for details in self._ask(self._client.list_jobs)
        )
        return {int(match[1]): _state(details) for match, details in matches if match}

    def _submit(
        self, handle: JobHandle, *, command: str, env: Mapping[str, str], cpus: float, gpus: float
    ) -> JobHandle:
        try:
            # Not through `_ask`: a submission whose answer was lost must not be sent twice.
            self._client.submit_job(
                entrypoint=command,
                submission_id=handle.submission_id,
                runtime_env={"env_vars": dict(env)},
                entrypoint_num_cpus=cpus,
                entrypoint_num_gpus=gpus,
            )
        except (ConnectionError, requests.RequestException, RuntimeError) as error:
            # Another run may have submitted the same cell a moment ago, or the answer got lost on its way.
            if handle.attempt in self._attempts(handle.key):
                return replace(handle, attached=True)
            raise CellError(
                f"job {handle.submission_id}: got {_first_line(error)}, expected Ray to take it. "
                "Run again: a cell goes on from its last checkpoint."
            ) from None
        return handle

    def _ask(self, question: Callable[[], T]) -> T:
        for number in range(1, TRIES + 1):
            try:
                return question()
            except (ConnectionError, requests.RequestException, RuntimeError) as error:
                # RuntimeError carries an answer of the server: asking again would not change it.
                if number == TRIES or isinstance(error, RuntimeError):
                    raise CellError(
                        f"Ray head {self._address}: got {_first_line(error)}, expected an answer. "
                        "Run again: a cell goes on from its last checkpoint."
                    ) from None
            time.sleep(TRY_AGAIN_SECONDS)
        raise AssertionError("unreachable: the last try returns or raises")


def _state(details: JobDetails) -> JobState:
    states: dict[JobStatus, JobState] = {
        JobStatus.PENDING: "pending",
        JobStatus.RUNNING: "running",
        JobStatus.SUCCEEDED: "succeeded",
        JobStatus.FAILED: "failed",
        JobStatus.STOPPED: "stopped",
    }
    return states[details.status]


def _first_line(error: Exception) -> str:
    if isinstance(error, ConnectionError | requests.ConnectionError):
        return "no connection"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
