"""The cells as plain data for other programs: JSON and CSV."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from reports.rows import CellRow
from sdpo_core.metrics import METRICS

_CSV_COLUMNS = (
    "dataset",
    "arm",
    "algorithm",
    "teacher",
    "seed",
    "state",
    "note",
    "fingerprint",
    "mlflow_run_id",
    "seconds",
)


def cells_json(cells: Sequence[CellRow]) -> list[dict[str, Any]]:
    """One object a cell. `metrics` of a done cell has every declared name (null: the arm does not have it).

    A cell that is not done has no metrics at all, so nobody can take its holes for numbers.
    """
    return [
        {
            "dataset": cell.dataset,
            "arm": cell.arm,
            "seed": cell.seed,
            "state": cell.state,
            "fingerprint": cell.fingerprint,
            "metrics": {name: cell.metrics.get(name) for name in METRICS} if cell.state == "done" else {},
        }
        for cell in cells
    ]


def cells_csv(cells: Sequence[CellRow]) -> str:
    """One line a cell, one column a metric, full precision; a hole holds its word."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_CSV_COLUMNS, *METRICS))
    for cell in cells:
        writer.writerow(
            (
                cell.dataset,
                cell.arm,
                cell.algorithm,
                cell.teacher or "n/a",
                cell.seed,
                cell.state,
                cell.note,
                cell.fingerprint or "missing",
                cell.run_id or "missing",
                cell.seconds,
                *(cell.value(name) for name in METRICS),
            )
        )
    return text.getvalue()
