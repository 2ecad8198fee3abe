"""Ray jobs on a real head with two CPUs."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.services import RayEndpoint, ray_head
from sdpo_core.errors import CellError
from tasks.ray_jobs import JobHandle, RayJobs

SAVE_ON_SIGTERM = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(4)
    Path(sys.argv[1]).write_text("saved")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("now", "ready", flush=True)  # in two: the log also quotes this code
time.sleep(600)
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayEndpoint]:
    with ray_head(tmp_path_factory.mktemp("home"), num_cpus=2) as ray:
        yield ray.endpoint()


@pytest.fixture
def jobs(endpoint: RayEndpoint) -> Iterator[RayJobs]:
    jobs = RayJobs(endpoint.address, token_path=endpoint.token_path)
    yield jobs
    jobs.stop_all()


def _submit(jobs: RayJobs, key: str, code: str, *arguments: str, folder: Path, cpus: float = 1) -> JobHandle:
    entrypoint = [sys.executable, "-c", code, *arguments]
    return jobs.submit_or_attach(key, entrypoint=entrypoint, folder=folder, env={"ANSWER": "4 2"}, cpus=cpus)


def test_job_runs_in_the_folder_with_its_environment(jobs: RayJobs, tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['ANSWER'], os.environ['PYTHONPATH'])"
    handle = _submit(jobs, "plain", code, folder=tmp_path)
    assert (handle.submission_id, handle.attached) == ("plain-1", False)
    assert jobs.wait(handle, seconds=60).state == "succeeded"
    assert f"{tmp_path} 4 2 {tmp_path}" in jobs.logs(handle)


def test_job_that_exits_badly_is_failed_and_tried_under_a_new_id(jobs: RayJobs, tmp_path: Path) -> None:
    handle = _submit(jobs, "bad", "import sys; print('why', 'it', 'failed'); sys.exit(3)", folder=tmp_path)
    record = jobs.wait(handle, seconds=60)
    assert (record.state, record.is_over) == ("failed", True)
    assert "exit code 3" in record.message
    assert "why it failed" in jobs.logs(handle)
    assert _submit(jobs, "bad", "pass", folder=tmp_path).submission_id == "bad-2"


def test_jobs_queue_by_cpus_and_live_ones_are_attached_to(endpoint: RayEndpoint, jobs: RayJobs, tmp_path: Path) -> None:
    wait = "import sys, time; from pathlib import Path\nwhile not Path(sys.argv[1]).exists(): time.sleep(0.1)"
    gate = tmp_path / "gate"
    first = _submit(jobs, "wide", wait, str(gate), folder=tmp_path, cpus=2)
    _wait_for(jobs, first, "running")
    second = _submit(jobs, "narrow", "pass", folder=tmp_path)
    # A key that only begins like a live one is another key.
    assert _submit(jobs, "wid", "pass", folder=tmp_path).submission_id == "wid-1"

    other = RayJobs(endpoint.address, token_path=endpoint.token_path)
    again = _submit(other, "narrow", "pass", folder=tmp_path)
    assert (again.submission_id, again.attached) == (second.submission_id, True)
    assert _submit(other, "wide", "pass", folder=tmp_path).submission_id == first.submission_id
    time.sleep(1)
    assert jobs.status(second).state == "pending"
    gate.touch()
    assert jobs.wait(first, seconds=60).state == "succeeded"
    assert other.wait(again, seconds=60).state == "succeeded"


def test_stop_all_lets_jobs_save_and_refuses_new_ones(jobs: RayJobs, tmp_path: Path) -> None:
    handles = [
        _submit(jobs, f"save{number}", SAVE_ON_SIGTERM, str(tmp_path / f"{number}.txt"), folder=tmp_path)
        for number in (1, 2)
    ]
    for handle in handles:
        _wait_for(jobs, handle, "running", log="now ready")
    started = time.monotonic()
    jobs.stop_all()
    # One after the other would take over 8 s.
    assert time.monotonic() - started < 8
    assert [jobs.status(handle).state for handle in handles] == ["stopped", "stopped"]
    assert [(tmp_path / f"{number}.txt").read_text() for number in (1, 2)] == ["saved", "saved"]
    with pytest.raises(CellError, match="after the run was stopped"):
        _submit(jobs, "late", "pass", folder=tmp_path)


def test_submissions_of_one_key_from_many_threads_make_one_job(
    endpoint: RayEndpoint, jobs: RayJobs, tmp_path: Path
) -> None:
    others = [RayJobs(endpoint.address, token_path=endpoint.token_path) for _ in range(3)]
    handles: list[JobHandle] = []
    code = "import time; time.sleep(600)"
    threads = [
        threading.Thread(target=lambda each=each: handles.append(_submit(each, "shared", code, folder=tmp_path)))
        for each in [jobs, *others]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [handle.submission_id for handle in handles] == ["shared-1"] * 4
    assert sum(not handle.attached for handle in handles) == 1


def test_dead_head_is_an_error_in_words(endpoint: RayEndpoint) -> None:
    started = time.monotonic()
    with pytest.raises(CellError, match=r"Ray head http://127\.0\.0\.1:9: got .*expected an answer"):
        RayJobs("http://127.0.0.1:9", token_path=endpoint.token_path)
    assert time.monotonic() - started < 10


def test_unknown_job_is_an_error_in_words(jobs: RayJobs) -> None:
    """What a restarted head says of a job of its former life."""
    with pytest.raises(CellError, match="does not exist"):
        jobs.status(JobHandle(key="lost", attempt=1, attached=False))


def _wait_for(jobs: RayJobs, handle: JobHandle, state: str, *, log: str = "") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if jobs.status(handle).state == state and log in jobs.logs(handle):
            return
        time.sleep(0.2)
    raise AssertionError(f"{handle.submission_id} is {jobs.status(handle)}, expected {state}: {jobs.logs(handle)}")
