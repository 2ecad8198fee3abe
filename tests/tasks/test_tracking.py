"""Projection to a real MLflow store: what is sent, when, and that sending again changes nothing."""

import json
import sqlite3
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from sdpo_core.journal import Journal, MetricRecord, write_json
from sdpo_core.specs import CellSpec
from tasks.tracking import TrackedRun, TrackingError, chart_url, compare_url, flatten, project_cell, project_matrix

START = 1_700_000_000.25


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: making its tables takes seconds. Tests keep apart by fingerprint."""
    return f"sqlite:///{tmp_path_factory.mktemp('tracking')}/mlflow.db"


@pytest.fixture
def journal(tmp_path: Path, cell_spec: CellSpec) -> Journal:
    """A cell at step 3 whose last checkpoint is at step 2."""
    journal = Journal(tmp_path / "cells" / "cell")
    journal.write_spec(
        cell_spec,
        fingerprint=f"fp-{tmp_path.name}",
        data_digest="d",
        base_digest="b",
        base_fingerprint="f",
        teacher_digest=None,
        teacher_fingerprint=None,
    )
    journal.append_metrics(MetricRecord(step=0, moment="evaluate", time=START, metrics={"eval/accuracy": 0.5}))
    for step in (1, 2, 3):
        _append_step(journal, step)
        if step < 3:
            (journal.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    return journal


def _append_step(journal: Journal, step: int) -> None:
    values = {"train/reward": step / 10, "distill/divergence": None if step == 2 else 1.0}
    journal.append_metrics(MetricRecord(step=step, moment="step", time=START + step, metrics=values))


def _finish(journal: Journal) -> None:
    journal.append_metrics(MetricRecord(step=3, moment="end", time=START + 9, metrics={"test/accuracy": 0.75}))
    journal.append_sample({"step": 1, "response": "olleh"})
    write_json(journal.result_path, {"metrics": {"train/reward": 0.2, "test/accuracy": 0.75, "distill/tokens": None}})


def _send(journal: Journal, uri: str, *, final: bool = False) -> TrackedRun:
    return project_cell(journal, tracking_uri=uri, experiment="e000", final=final)


def _run(uri: str, tracked: TrackedRun) -> Run:
    return MlflowClient(uri).get_run(tracked.run_id)


def _rows(uri: str, tracked: TrackedRun) -> list[tuple[str, int, int, float]]:
    """The stored metric rows, from the database itself."""
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        found = database.execute("select key, step, timestamp, value from metrics where run_uuid = ?", [tracked.run_id])
        return sorted(found.fetchall())


def test_only_committed_steps_are_sent_with_the_journals_times(journal: Journal, uri: str) -> None:
    tracked = _send(journal, uri)
    assert _rows(uri, tracked) == [
        ("distill/divergence", 1, 1_700_000_001_250, 1.0),
        ("eval/accuracy", 0, 1_700_000_000_250, 0.5),
        ("train/reward", 1, 1_700_000_001_250, 0.1),
        ("train/reward", 2, 1_700_000_002_250, 0.2),
    ]
    noted = json.loads(journal.tracking_path.read_text())
    assert noted == {
        "run_id": tracked.run_id,
        "experiment_id": tracked.experiment_id,
        "tracking_uri": uri,
        "lines_sent": 3,
    }


def test_end_is_not_sent_before_the_result_is_written(journal: Journal, uri: str) -> None:
    (journal.checkpoints / "step-000003").mkdir()
    _finish(journal)
    journal.result_path.unlink()
    names = {name for name, *_ in _rows(uri, _send(journal, uri))}
    assert names == {"distill/divergence", "eval/accuracy", "train/reward"}


def test_nothing_is_sent_before_the_first_checkpoint(journal: Journal, uri: str) -> None:
    for path in journal.checkpoints.iterdir():
        path.rmdir()
    assert _rows(uri, _send(journal, uri)) == []


def test_run_carries_tags_and_parameters(journal: Journal, uri: str) -> None:
    run = _run(uri, _send(journal, uri))
    assert run.info.run_name == "spell_backward/sdpo-ema/42"
    assert run.info.start_time == 1_700_000_000_250
    assert run.data.params["algorithm.teacher.rate"] == "0.05"
    assert run.data.params["base.datasets"] == '["spell_backward"]'
    expected = {"experiment": "e000", "arm": "sdpo-ema", "seed": "42", "profile": "tiny", "state": "missing"}
    assert expected.items() <= run.data.tags.items()


@pytest.mark.parametrize("note_is_lost", [False, True])
def test_sending_again_adds_no_rows(journal: Journal, uri: str, note_is_lost: bool) -> None:
    _finish(journal)
    first = _send(journal, uri)
    rows = _rows(uri, first)
    if note_is_lost:
        journal.tracking_path.unlink()
    else:
        MlflowClient(uri).update_run(first.run_id, status="RUNNING")
    assert _send(journal, uri) == first
    assert _rows(uri, first) == rows


def test_resumed_cell_goes_on_in_its_run(journal: Journal, uri: str) -> None:
    """An interrupted cell is cut back to its checkpoint and repeats a step at another time."""
    first = _send(journal, uri, final=True)
    assert _run(uri, first).info.status == "KILLED"
    lines = journal.metrics_path.read_text().splitlines(keepends=True)
    journal.metrics_path.write_text("".join(lines[:-1]))
    journal.append_metrics(MetricRecord(step=3, moment="step", time=START + 100, metrics={"train/reward": 0.3}))
    _finish(journal)
    assert _send(journal, uri, final=True) == first
    assert [row for row in _rows(uri, first) if row[:2] == ("train/reward", 3)] == [
        ("train/reward", 3, 1_700_000_100_250, 0.3)
    ]


def test_cell_whose_folder_was_deleted_gets_a_run_of_its_own(journal: Journal, uri: str) -> None:
    first = _send(journal, uri)
    journal.tracking_path.unlink()
    journal.metrics_path.write_text(journal.metrics_path.read_text().replace("1700000000.25", "1700000000.75"))
    assert _send(journal, uri).run_id != first.run_id


def test_done_cell_is_finished_with_summaries_and_artifacts(journal: Journal, uri: str) -> None:
    _finish(journal)
    tracked = _send(journal, uri, final=True)
    run = _run(uri, tracked)
    assert (run.info.status, run.info.end_time, run.data.tags["state"]) == ("FINISHED", 1_700_000_009_250, "done")
    assert run.data.metrics["test/accuracy"] == 0.75
    assert run.data.metrics["summary/train/reward"] == 0.2
    assert run.data.metrics["train/reward"] == 0.3
    assert not {"summary/test/accuracy", "summary/distill/tokens"} & run.data.metrics.keys()
    names = {artifact.path for artifact in MlflowClient(uri).list_artifacts(tracked.run_id)}
    assert names == {"spec.json", "result.json", "samples_head.jsonl"}


def test_failed_cell_says_why_and_forgets_it_when_it_heals(journal: Journal, uri: str) -> None:
    write_json(journal.error_path, {"error": "loss: got nan, expected a number.", "time": START + 4})
    run = _run(uri, _send(journal, uri))
    assert (run.info.status, run.data.tags["error"]) == ("FAILED", "loss: got nan, expected a number.")
    journal.error_path.unlink()
    with journal.lease({}) as is_ours:
        assert is_ours
        run = _run(uri, _send(journal, uri))
    assert (run.info.status, run.data.tags["state"], run.data.tags["error"]) == ("RUNNING", "running", "")


def test_matrix_summary_is_one_run_with_the_latest_table(tmp_path: Path, uri: str) -> None:
    page = tmp_path / "results.md"

    def send(text: str, table: dict[str, list[str | float | None]]) -> TrackedRun:
        page.write_text(text)
        return project_matrix("e000", tracking_uri=uri, table=table, files=[page], tags={"profile": "tiny"})

    first = send("old", {"arm": ["grpo"], "accuracy": [0.5]})
    assert send("new", {"arm": ["grpo", "sdpo-ema"], "accuracy": [0.5, None]}) == first
    client = MlflowClient(uri)
    table = json.loads(Path(client.download_artifacts(first.run_id, "matrix.json")).read_text())
    assert table == {"columns": ["arm", "accuracy"], "data": [["grpo", 0.5], ["sdpo-ema", None]]}
    assert Path(client.download_artifacts(first.run_id, "results.md")).read_text() == "new"
    assert page.parent.joinpath("mlruns").exists() is False


@pytest.mark.parametrize("broken", ["http://127.0.0.1:9", "sqlite:///{folder}/file/mlflow.db"])
def test_outage_is_one_named_error_within_seconds(journal: Journal, tmp_path: Path, broken: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    started = time.monotonic()
    with pytest.raises(TrackingError, match="It is sent again next time"):
        _send(journal, broken.format(folder=tmp_path))
    assert time.monotonic() - started < 5
    assert not journal.tracking_path.exists()


def test_flatten_writes_json_for_what_is_not_text() -> None:
    assert flatten({"a": {"b": 1, "c": None}, "d": "x", "e": [1, "y"]}) == {
        "a.b": "1",
        "a.c": "null",
        "d": "x",
        "e": '[1, "y"]',
    }


def test_pages_exist_only_on_a_server() -> None:
    assert chart_url("sqlite:///x.db", experiment_id="7") is None
    url = compare_url("http://host:5000/", experiment_id="7", run_ids=["a", "b"])
    assert url == (
        "http://host:5000/#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%227%22%5D"
        "&workflowType=machine_learning"
    )
