"""Sending journals: an outage is one line and no error, and one damaged journal does not keep the others back."""

import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from sdpo_core.journal import MetricRecord, Store
from sdpo_core.specs import CellSpec
from tasks.collect import send_cells, send_summary


def _cells(home: Path, spec: CellSpec) -> list[str]:
    """Two cells at step 1, the first with a damaged journal, and the name of a third that has none."""
    store = Store(home)
    for name in ("damaged", "sound"):
        journal = store.journal(name)
        journal.write_spec(
            spec,
            fingerprint=name,
            data_digest="d",
            base_digest="b",
            base_fingerprint="f",
            teacher_digest=None,
            teacher_fingerprint=None,
        )
        journal.append_metrics(MetricRecord(step=1, moment="step", time=1.0, metrics={"train/reward": 0.5}))
        (journal.checkpoints / "step-000001").mkdir(parents=True)
    store.journal("damaged").metrics_path.write_text('{"step"\n')
    return ["none", "damaged", "sound"]


def test_damaged_journal_does_not_keep_the_others_back(
    tmp_path: Path, cell_spec: CellSpec, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{tmp_path}/tracking/mlflow.db"
    fingerprints = _cells(tmp_path, cell_spec)
    assert send_cells(fingerprints, home=tmp_path, tracking_uri=uri, experiment="e000", final=False)
    client = MlflowClient(uri)
    (experiment,) = (found for found in client.search_experiments() if found.name == "sdpo-matrix/e000")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["fingerprint"] == "sound"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "damaged/metrics.jsonl:1" in warning


def test_outage_is_one_line_and_no_error(tmp_path: Path, cell_spec: CellSpec, caplog: pytest.LogCaptureFixture) -> None:
    """Port 9 is discard: nobody listens there."""
    fingerprints, uri = _cells(tmp_path, cell_spec)[2:], "http://127.0.0.1:9"
    assert not send_cells(fingerprints, home=tmp_path, tracking_uri=uri, experiment="e000", final=True)
    assert not send_summary({"seed": [1]}, files=[], tracking_uri=uri, experiment="e000", profile="smoke")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("expected to be taken. It is sent again next time." in warning for warning in warnings)
