"""A cell whose rollouts and whose teacher are served by SGLang, through real Prefect and Ray."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flows.store import cell_folders, environment, results, sdpo

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LABEL = "spell_backward/sdpo-ema/42"
SELECTION = ("run", "e000", "--datasets", "spell_backward", "--arms", "sdpo-ema")


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Short, for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="sdpo-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_cell_samples_from_a_server_and_leaves_its_log_alone(tmp_path: Path, temporary: Path) -> None:
    """The gap to the engine stands in every step; no process of the server and no copy of a weight stays."""
    there = environment(tmp_path, temporary=temporary)
    before = {process.pid for process in psutil.process_iter()}
    ran = sdpo(*SELECTION, "--profile", "smoke-sglang", folder=tmp_path, environment=there)
    assert ran.returncode == 0, ran.stderr
    assert results(tmp_path)[LABEL]["steps"] == 4
    folder = cell_folders(tmp_path)[LABEL]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["metrics"]["train/engine_gap_max"] for record in records if record["moment"] == "step"]
    assert len(gaps) == 4
    assert all(gap is None or 0 < gap < 1e-4 for gap in gaps)
    assert any(gaps)
    left = [file.relative_to(folder).as_posix() for file in (folder / "servers").rglob("*") if file.is_file()]
    assert left == ["servers/student/server-0/server.log"]
    new = [process for process in psutil.process_iter() if process.pid not in before]
    assert not [process for process in new if "sdpo_sglang" in " ".join(cmdline(process))]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
