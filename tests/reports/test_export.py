"""Cells as JSON and CSV."""

import csv
import io
import json
from pathlib import Path

from reports.export import cells_csv, cells_json
from sdpo_core.metrics import METRICS
from sdpo_core.specs import CellSpec
from tests.reports.synthetic import with_holes


def test_cells_json_shape(tmp_path: Path, cell_spec: CellSpec) -> None:
    cells = with_holes(tmp_path, cell_spec).cells
    rows = json.loads(json.dumps(cells_json(cells), allow_nan=False))
    assert len(rows) == 18
    assert all(set(row) == {"dataset", "arm", "seed", "state", "fingerprint", "metrics"} for row in rows)
    for row in rows:
        assert set(row["metrics"]) == (set(METRICS) if row["state"] == "done" else set())
    grpo = next(row for row in rows if row["arm"] == "grpo" and row["state"] == "done")
    assert grpo["metrics"]["distill/divergence"] is None
    assert isinstance(grpo["metrics"]["test/accuracy"], float)


def test_cells_csv_has_a_word_in_every_hole(tmp_path: Path, cell_spec: CellSpec) -> None:
    cells = with_holes(tmp_path, cell_spec).cells
    rows = list(csv.DictReader(io.StringIO(cells_csv(cells))))
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        for name in METRICS:
            if cell.state != "done":
                assert row[name] == cell.state
            elif cell.metrics.get(name) is None:
                assert row[name] == "n/a"
            else:
                assert float(row[name]) == cell.metrics[name]


def test_cells_csv_quotes_a_note_with_commas(tmp_path: Path, cell_spec: CellSpec) -> None:
    rows = list(csv.DictReader(io.StringIO(cells_csv(with_holes(tmp_path, cell_spec).cells))))
    notes = {row["state"]: row["note"] for row in rows}
    assert notes["failed"] == "loss: got nan at step 3 | <b>expected</b> a number."
