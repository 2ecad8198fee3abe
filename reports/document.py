"""The results page of an experiment: results.md, figures, cells.csv and results.json in one folder.

The same records give the same bytes: nothing here reads a clock, a host name or an environment variable.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from reports.export import cells_csv, cells_json
from reports.figures import draw, planned_figures
from reports.page import Page
from reports.rows import BaseRow, CellRow, DatasetFacts
from reports.sections import (
    arms,
    base_model,
    cost,
    distillation,
    headline,
    how_to_read,
    learning_curves,
    parts,
    provenance,
    question,
    training,
)
from sdpo_core.errors import DataError
from sdpo_core.specs import ArmSpec, ExperimentSpec

SECTIONS = (
    question.render,
    headline.render,
    parts.render,
    how_to_read.render,
    arms.render,
    base_model.render,
    learning_curves.render,
    training.render,
    distillation.render,
    cost.render,
    provenance.render,
)


def write_report(
    experiment: ExperimentSpec,
    cells: Sequence[CellRow],
    bases: Sequence[BaseRow],
    datasets: Sequence[DatasetFacts],
    *,
    arms: Sequence[ArmSpec],
    folder: Path,
) -> Path:
    """Write the page and what it links to; each file is replaced atomically, results.md last.

    Returns:
        Path of results.md.

    Raises:
        DataError: there is no cell to report.
    """
    if not cells:
        raise DataError(f"report of {experiment.name}: got 0 cells, expected at least 1. Widen the selection.")
    page = Page(
        experiment=experiment,
        cells=tuple(cells),
        bases=tuple(bases),
        facts=tuple(datasets),
        declared_arms=tuple(arms),
    )
    pictures = {figure.file_name: draw(page, figure=figure) for figure in planned_figures(page)}
    for name, picture in pictures.items():
        _replace(folder / "figures" / name, picture)
    _replace(folder / "cells.csv", cells_csv(page.cells).encode())
    listing = json.dumps(cells_json(page.cells), indent=1, ensure_ascii=False, allow_nan=False)
    _replace(folder / "results.json", f"{listing}\n".encode())
    path = folder / "results.md"
    _replace(path, render(page).encode())
    for stale in (folder / "figures").glob("*.png"):
        if stale.name not in pictures:
            stale.unlink()
    return path


def render(page: Page) -> str:
    """The whole page as Markdown; a section with nothing to say is left out."""
    sections = (section(page).strip() for section in SECTIONS)
    return "\n\n".join(section for section in sections if section) + "\n"


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_bytes(content)
    aside.replace(path)
