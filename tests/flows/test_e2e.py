"""The experiment e000 through real Prefect, Ray and MLflow: run, run again, killed, resumed, damaged.

Tests run in the order of the file and share two stores: one whose run nobody disturbs, and one, with the same data
and base weights, whose runs are killed.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from tests.flows.store import cell_folders, environment, kill_tree, results, sdpo, start, steps_done

CELLS = [
    f"{dataset}/{arm}/42"
    for dataset in ("spell_backward", "sciknoweval-physics")
    for arm in ("grpo", "sdpo-static", "sdpo-ema")
]
SPELL = ("--datasets", "spell_backward")
# The first test pays for the run that all of them read: a minute and a half, and more on a busy machine.
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """A store, the folder commands run in, and their environment."""

    home: Path
    folder: Path
    environment: dict[str, str]

    @property
    def page(self) -> Path:
        return self.folder / "results" / "e000"


def _workshop(folder: Path, *, temporary: Path) -> Workshop:
    folder.mkdir(exist_ok=True)
    return Workshop(home=folder / "home", folder=folder, environment=environment(folder / "home", temporary=temporary))


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """Short, for Ray's sockets; a killed head leaves its files there."""
    folder = Path(tempfile.mkdtemp(prefix="sdpo-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Workshop:
    """`sdpo run e000`, once."""
    workshop = _workshop(tmp_path_factory.mktemp("undisturbed"), temporary=temporary)
    ran = sdpo("run", "e000", folder=workshop.folder, environment=workshop.environment)
    assert ran.returncode == 0, ran.stderr
    assert "6 cells done" in ran.stdout
    assert "Traceback" not in ran.stderr
    lines = ran.stderr.splitlines()
    # Nothing but our own lines of progress: a clock, then words.
    assert [line for line in lines if not re.match(r"\d\d:\d\d:\d\d \S", line)] == []
    assert sum("done: test accuracy" in line for line in lines) == 6
    return workshop


def test_run_trains_every_cell_and_writes_the_page(undisturbed: Workshop) -> None:
    assert sorted(results(undisturbed.home)) == sorted(CELLS)
    page = (undisturbed.page / "results.md").read_text()
    assert "6 cells (data set x arm x seed): 6 done" in page
    listed = json.loads((undisturbed.page / "results.json").read_text())
    assert [f"{row['dataset']}/{row['arm']}/{row['seed']}" for row in listed] == CELLS
    assert len((undisturbed.page / "cells.csv").read_text().splitlines()) == 7
    for name in re.findall(r"\]\((figures/[^)]+)\)", page):
        assert (undisturbed.page / name).stat().st_size > 1000
    assert list((undisturbed.page / "figures").glob("*.png"))


def test_student_and_teacher_are_processes_with_weights_of_their_own(undisturbed: Workshop) -> None:
    for label, result in results(undisturbed.home).items():
        workers = result["workers"]
        arm = label.split("/")[1]
        assert set(workers) == ({"student"} if arm == "grpo" else {"student", "teacher"})
        pids = {worker["pid"] for worker in workers.values()}
        assert len(pids) == len(workers)
        starts = {worker["weights_sha256_start"] for worker in workers.values()}
        assert len(starts) == 1, "both start from the base weights"
        if arm == "grpo":
            continue
        student, teacher = workers["student"], workers["teacher"]
        assert student["weights_sha256_start"] != student["weights_sha256_end"]
        teacher_is_unchanged = teacher["weights_sha256_start"] == teacher["weights_sha256_end"]
        assert teacher_is_unchanged == (arm == "sdpo-static")
        assert teacher["weights_sha256_end"] != student["weights_sha256_end"]


def test_sdpo_cells_report_steps_feedback_and_gradient(undisturbed: Workshop) -> None:
    for label, result in results(undisturbed.home).items():
        if "/sdpo-" in label:
            metrics = result["metrics"]
            assert metrics["train/optimizer_steps"] > 0
            assert metrics["feedback/effective_fraction"] > 0
            assert metrics["train/grad_norm"] > 0


def test_mlflow_has_one_flat_run_a_cell_that_equals_its_journal(undisturbed: Workshop) -> None:
    database = undisturbed.home / "tracking" / "mlflow.db"
    client = MlflowClient(f"sqlite:///{database}")
    (experiment,) = (e for e in client.search_experiments() if e.name == "sdpo-matrix/e000")
    runs = client.search_runs([experiment.experiment_id])
    assert all("mlflow.parentRunId" not in run.data.tags for run in runs)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert sorted(run.data.tags["kind"] for run in runs) == ["cell"] * 6 + ["matrix"]
    by_label = {run.data.tags["mlflow.runName"]: run for run in runs}
    for label, result in results(undisturbed.home).items():
        run = by_label[label]
        dataset, arm, seed = label.split("/")
        tags = {"dataset": dataset, "arm": arm, "seed": seed, "experiment": "e000", "profile": "smoke"}
        assert tags.items() <= run.data.tags.items()
        assert run.data.tags["fingerprint"] == result["fingerprint"]
        assert run.data.params["training.steps"] == "4"
        assert _sent(database, run.info.run_id) == _journal(result["folder"])


def _journal(folder: Path) -> set[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(name, row["step"], value) for row in rows for name, value in row["metrics"].items() if value is not None}


def _sent(database: Path, run_id: str) -> set[tuple[str, int, float]]:
    with sqlite3.connect(database) as connection:
        found = connection.execute("select key, step, value from metrics where run_uuid = ?", [run_id]).fetchall()
    return {(name, step, value) for name, step, value in found if not name.startswith("summary/")}


def test_run_again_trains_nothing_and_writes_the_same_page(undisturbed: Workshop) -> None:
    before = _snapshot(undisturbed)
    ray_log = (undisturbed.home / "logs" / "ray.log").read_bytes()
    start_time = time.monotonic()
    ran = sdpo("run", "e000", folder=undisturbed.folder, environment=undisturbed.environment)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - start_time < 30
    assert _snapshot(undisturbed) == before
    assert (undisturbed.home / "logs" / "ray.log").read_bytes() == ray_log, "no Ray was started"


def _snapshot(workshop: Workshop) -> dict[str, Any]:
    pages = {str(path): path.read_bytes() for path in workshop.page.rglob("*") if path.is_file()}
    trained = {
        str(path): path.stat().st_mtime_ns
        for name in ("result.json", "metrics.jsonl")
        for path in workshop.home.glob(f"cells/*/{name}")
    }
    return {**pages, **trained}


def test_report_json_lists_every_cell_with_its_metrics(undisturbed: Workshop) -> None:
    ran = sdpo("report", "e000", "--json", folder=undisturbed.folder, environment=undisturbed.environment)
    rows = json.loads(ran.stdout)
    assert [f"{row['dataset']}/{row['arm']}/{row['seed']}" for row in rows] == CELLS
    done = results(undisturbed.home)
    for row, label in zip(rows, CELLS, strict=True):
        assert set(row) == {"dataset", "arm", "seed", "state", "fingerprint", "metrics"}
        assert (row["state"], row["fingerprint"]) == ("done", done[label]["fingerprint"])
        assert row["metrics"]["test/accuracy"] == done[label]["metrics"]["test/accuracy"]
        has_no_teacher = row["arm"] == "grpo"
        assert (row["metrics"]["distill/kl_reverse"] is None) == has_no_teacher


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, temporary: Path, undisturbed: Workshop) -> Workshop:
    """A store with the data and base weights of the other one, and no cell yet."""
    workshop = _workshop(tmp_path_factory.mktemp("killed"), temporary=temporary)
    for name in ("data", "bases"):
        shutil.copytree(undisturbed.home / name, workshop.home / name)
    return workshop


def _run_and_kill(workshop: Workshop, arms: set[str]) -> dict[str, int]:
    """Run until a driver of each of `arms` stands between its first and last step, then kill everything.

    A driver that has come that far is halted until the others have; arm to steps done.
    """
    # These arms alone: Ray starts waiting jobs in no fixed order, and another cell might end before theirs begin.
    selection = (*SPELL, "--arms", ",".join(sorted(arms)))
    process = start("run", "e000", *selection, folder=workshop.folder, environment=workshop.environment)
    halted: dict[str, int] = {}
    deadline = time.monotonic() + 150
    try:
        while set(halted) != arms and process.poll() is None and time.monotonic() < deadline:
            for label, folder in cell_folders(workshop.home).items():
                arm = label.split("/")[1]
                if arm in arms - set(halted) and steps_done(folder) and not (folder / "result.json").exists():
                    os.kill(json.loads((folder / "lease.json").read_text())["pid"], signal.SIGSTOP)
                    halted[arm] = steps_done(folder)
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()[1]
    finally:
        tree = kill_tree(process)
    assert set(halted) == arms, f"within 150 s, only {sorted(halted)} came between their first and last step"
    assert not [member for member in tree if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    return halted


def _metrics_without_cost(folder: Path) -> list[tuple[int, str, dict[str, float | None]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (
            row["step"],
            row["moment"],
            {name: value for name, value in row["metrics"].items() if not name.startswith("cost/")},
        )
        for row in rows
    ]


def _assert_equal(label: str, *, killed: Workshop, undisturbed: Workshop) -> None:
    resumed, whole = results(killed.home)[label], results(undisturbed.home)[label]
    assert _metrics_without_cost(resumed["folder"]) == _metrics_without_cost(whole["folder"])
    assert (resumed["folder"] / "samples.jsonl").read_bytes() == (whole["folder"] / "samples.jsonl").read_bytes()
    for name in resumed["workers"]:
        ends = [result["workers"][name]["weights_sha256_end"] for result in (resumed, whole)]
        assert ends[0] == ends[1]


def test_killed_cells_resume_to_the_numbers_of_an_undisturbed_run(killed: Workshop, undisturbed: Workshop) -> None:
    """Two kills: the machine may hold only two cells at once, and every arm is to be killed in the middle."""
    first = _run_and_kill(killed, {"grpo", "sdpo-static"})
    assert all(1 <= steps < 4 for steps in first.values()), first
    second = _run_and_kill(killed, {"sdpo-ema"})
    assert 1 <= second["sdpo-ema"] < 4
    ran = sdpo("run", "e000", *SPELL, folder=killed.folder, environment=killed.environment)
    assert ran.returncode == 0, ran.stderr
    for arm in ("grpo", "sdpo-static", "sdpo-ema"):
        _assert_equal(f"spell_backward/{arm}/42", killed=killed, undisturbed=undisturbed)
    page = (killed.page / "results.md").read_text()
    assert "3 done" in page
    assert "3 missing" in page


def test_damaged_checkpoint_fails_its_cell_alone_and_deletes_nothing(killed: Workshop) -> None:
    """As if two cells had been killed before their last word, and the disk had then lost a part of one."""
    folders = cell_folders(killed.home)
    damaged, healthy = folders["spell_backward/sdpo-static/42"], folders["spell_backward/grpo/42"]
    for folder in (damaged, healthy):
        (folder / "result.json").unlink()
    (weights,) = sorted(damaged.glob("checkpoints/step-000004/student/model.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-7])
    before = {path: path.read_bytes() for path in damaged.glob("*.jsonl")}
    ran = sdpo("run", "e000", *SPELL, folder=killed.folder, environment=killed.environment)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("sdpo: 1 of 3 cells are not done: spell_backward/sdpo-static/42 failed: checkpoint ")
    assert last.count("spell_backward/sdpo-static/42") == 1
    assert str(weights.parent.parent) in last
    assert "Delete" in last
    assert "Traceback" not in ran.stderr
    assert (healthy / "result.json").exists()
    assert weights.read_bytes() == content[:-7]
    assert {path: path.read_bytes() for path in damaged.glob("*.jsonl")} == before
    page = (killed.page / "results.md").read_text()
    assert "1 failed" in page


def test_interrupt_stops_jobs_and_services_and_says_how_to_go_on(
    tmp_path_factory: pytest.TempPathFactory, temporary: Path
) -> None:
    workshop = _workshop(tmp_path_factory.mktemp("interrupted"), temporary=temporary)
    process = start("run", "e000", *SPELL, folder=workshop.folder, environment=workshop.environment)
    deadline = time.monotonic() + 100
    # The lock says that the job of the base is at work.
    while not list(workshop.home.glob("bases/*/lock")) and time.monotonic() < deadline:
        time.sleep(0.1)
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[1:] == ["sdpo: interrupted. Run it again: cells go on from their last checkpoints."]
    assert len(tree) > 10
    assert psutil.wait_procs(tree, timeout=5)[1] == []
