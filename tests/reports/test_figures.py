"""Learning curves: what is averaged, and that a picture depends on the records alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from reports.figures import FIGURES, draw, mean_series, planned_figures
from reports.page import Page
from reports.rows import CellRow
from sdpo_core.journal import CellState, MetricRecord
from sdpo_core.specs import CellSpec
from tests.reports.synthetic import synthetic


def page_of(home: Path, spec: CellSpec) -> Page:
    return synthetic(home, spec).page()


def with_curve(cell: CellRow, *points: tuple[int, float | None]) -> CellRow:
    records = [
        MetricRecord(step=step, moment="step", time=0.0, metrics={"train/loss": value}) for step, value in points
    ]
    return replace(cell, curves=tuple(records))


def test_mean_series_leaves_a_gap_where_a_seed_has_no_value(tmp_path: Path, cell_spec: CellSpec) -> None:
    first, second = page_of(tmp_path, cell_spec).cells[:2]
    cells = [with_curve(first, (1, 1.0), (2, 2.0), (3, 3.0)), with_curve(second, (1, 2.0), (2, None))]
    assert mean_series(cells, metric="train/loss") == ((1, 1.5), (2, None), (3, None))


def test_draw_is_deterministic_and_names_no_software(tmp_path: Path, cell_spec: CellSpec) -> None:
    page = page_of(tmp_path, cell_spec)
    for figure in FIGURES:
        first, second = draw(page, figure=figure), draw(page, figure=figure)
        assert first == second
        assert first.startswith(b"\x89PNG")
        assert b"tEXt" not in first


def test_draw_changes_with_a_point(tmp_path: Path, cell_spec: CellSpec) -> None:
    page = page_of(tmp_path, cell_spec)
    cell = page.cells[0]
    moved = MetricRecord(step=6, moment="evaluate", time=0.0, metrics={"eval/accuracy": 0.1})
    changed = replace(page, cells=(replace(cell, curves=(*cell.curves[:-2], moved)), *page.cells[1:]))
    assert draw(page, figure=FIGURES[0]) != draw(changed, figure=FIGURES[0])


@pytest.mark.parametrize("state", ["missing", "running", "failed", "stale"])
def test_planned_figures_need_a_finished_cell(tmp_path: Path, cell_spec: CellSpec, state: CellState) -> None:
    page = page_of(tmp_path, cell_spec)
    unfinished = tuple(replace(cell, state=state) for cell in page.cells)
    assert planned_figures(replace(page, cells=unfinished)) == ()
    assert planned_figures(page) == FIGURES
