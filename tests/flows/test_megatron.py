"""Cells on Megatron-core through real Prefect and Ray: they take the steps of one process, and survive a lost rank.

Tests run in the order of the file; the second reads the data, base and cells of the first.
"""

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.flows.store import cell_folders, environment, kill_tree, results, sdpo, start, steps_done

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]

ARMS = ("grpo", "sdpo-ema")
SELECTION = ("run", "e000", "--datasets", "spell_backward", "--arms", ",".join(ARMS))
ON_MEGATRON = (*SELECTION, "--profile", "smoke-megatron")
LABELS = [f"spell_backward/{arm}/42" for arm in ARMS]
# Float32 sums in another order, and what Adam makes of them, which divides by gradients near 0; of `tiny` twelve steps
# agree to 1e-5.
FIRST_STEPS = 5e-4


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Short, for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="sdpo-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> dict[str, Path]:
    """The same cells, with backend `hf` and on two processes each; both start from one base."""
    homes = {name: tmp_path_factory.mktemp(name) for name in ("hf", "megatron")}
    ran = sdpo(*SELECTION, folder=homes["hf"], environment=environment(homes["hf"], temporary=temporary))
    assert ran.returncode == 0, ran.stderr
    copy_inputs(homes["hf"], to=homes["megatron"])
    there = environment(homes["megatron"], temporary=temporary)
    ran = sdpo(*ON_MEGATRON, folder=homes["megatron"], environment=there)
    assert ran.returncode == 0, ran.stderr
    return homes


def copy_inputs(home: Path, *, to: Path) -> None:
    for name in ("data", "bases"):
        shutil.copytree(home / name, to / name)


def metrics(folder: Path) -> list[dict[str, float | None]]:
    """Of each record, without costs, which no two runs share."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {"step": row["step"], **{name: v for name, v in row["metrics"].items() if not name.startswith("cost/")}}
        for row in rows
    ]


@pytest.mark.parametrize("label", LABELS)
def test_first_steps_are_those_of_one_process(stores: dict[str, Path], label: str) -> None:
    """The same rollouts, so the same rewards; losses, norms and divergences to float32's rounding."""
    one, two = (results(home)[label] for home in (stores["hf"], stores["megatron"]))
    starts = [result["workers"]["student"]["weights_sha256_start"] for result in (one, two)]
    assert starts[0] == starts[1]
    pairs = list(zip(metrics(one["folder"]), metrics(two["folder"]), strict=True))
    early = [pair for pair in pairs if (pair[0]["step"] or 0.0) <= 2]
    assert len(early) >= 3
    # Four steps of a model that can do nothing: GRPO has no group to learn from, SDPO has its feedback.
    assert ("sdpo" in label) == any(expected.get("train/loss") for expected, _ in early)
    for expected, found in early:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=FIRST_STEPS, abs=1e-5), name


def test_cell_that_loses_a_rank_ends_and_resumes_to_the_same_numbers(
    stores: dict[str, Path], tmp_path: Path, temporary: Path
) -> None:
    """SIGKILL of one of its processes between two steps; tests of the actors hold that the right one is named."""
    copy_inputs(stores["hf"], to=tmp_path)
    there = environment(tmp_path, temporary=temporary)
    process = start(*ON_MEGATRON, folder=tmp_path, environment=there)
    try:
        lost = kill_a_rank(process.pid, home=tmp_path, deadline=time.monotonic() + 200)
        _, err = process.communicate(timeout=200)
    finally:
        kill_tree(process)
    assert process.returncode == 1
    assert lost in err
    assert re.search(r"(student|teacher), rank [01] of 2: got ActorDiedError", err), err
    assert "Run the experiment again" in err
    ran = sdpo(*ON_MEGATRON, folder=tmp_path, environment=there)
    assert ran.returncode == 0, ran.stderr
    for label in LABELS:
        resumed, whole = (results(home)[label] for home in (tmp_path, stores["megatron"]))
        assert metrics(resumed["folder"]) == metrics(whole["folder"])
        assert (resumed["folder"] / "samples.jsonl").read_bytes() == (whole["folder"] / "samples.jsonl").read_bytes()
        for name, worker in whole["workers"].items():
            assert resumed["workers"][name]["weights_sha256_end"] == worker["weights_sha256_end"]


def kill_a_rank(pid: int, *, home: Path, deadline: float) -> str:
    """Kill a process of the first cell that stands between its first and its last step; the cell's label."""
    while time.monotonic() < deadline:
        for label, folder in cell_folders(home).items():
            if steps_done(folder) and not (folder / "result.json").exists():
                ranks = [child for child in psutil.Process(pid).children(recursive=True) if is_rank(child)]
                os.kill(max(ranks, key=lambda child: child.create_time()).pid, signal.SIGKILL)
                return label
        time.sleep(0.01)
    raise TimeoutError("no cell came between its first and its last step")


def is_rank(process: psutil.Process) -> bool:
    try:
        return "WorkerProcess" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
