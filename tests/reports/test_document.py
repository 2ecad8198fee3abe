"""The whole page against expected ones, byte by byte.

After a change that is meant, look at the difference and write the expected pages anew:
`UPDATE_GOLDEN=1 pytest tests/reports/test_document.py`.
"""

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from reports.document import render, write_report
from sdpo_core.errors import DataError
from sdpo_core.specs import CellSpec
from tests.reports.synthetic import FACTS, VARIANTS, Synthetic, experiment, synthetic, with_holes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def written(folder: Path, made: Synthetic) -> dict[str, bytes]:
    """Every file of a report, by relative path."""
    write_report(made.experiment, made.cells, made.bases, FACTS, arms=made.arms, folder=folder)
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_golden(name: str, made: Synthetic) -> None:
    """Compare a page with its expected text; fingerprints, which follow every field of a spec, read as their cell."""
    text = render(made.page())
    for cell in made.cells:
        text = text.replace(str(cell.fingerprint), f"fingerprint of {cell.spec.label}")
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_page_of_a_finished_experiment(tmp_path: Path, cell_spec: CellSpec) -> None:
    check_golden("results-done.expected", synthetic(tmp_path, cell_spec))


def test_page_with_a_cell_in_every_state(tmp_path: Path, cell_spec: CellSpec) -> None:
    check_golden("results-holes.expected", with_holes(tmp_path, cell_spec))


def test_page_of_one_seed_has_no_sd(tmp_path: Path, cell_spec: CellSpec) -> None:
    made = synthetic(tmp_path, cell_spec, seeds=(42,))
    check_golden("results-one-seed.expected", made)
    text = render(made.page())
    assert "\u00b1 n/a (n=1)" in text
    assert not re.search(r"\u00b1 [\d<]", text)


def test_page_of_many_kinds_of_arms(tmp_path: Path, cell_spec: CellSpec) -> None:
    check_golden("results-variants.expected", synthetic(tmp_path, cell_spec, arms=VARIANTS, seeds=(42,)))


def test_page_says_where_rollouts_do_not_repeat(tmp_path: Path, cell_spec: CellSpec) -> None:
    page = synthetic(tmp_path, cell_spec, seeds=(42,)).page()
    assert "Rollouts are" not in render(page)
    kinds = ("exact", "not repeatable", "up to rounding", "not repeatable")
    cells = tuple(
        replace(cell, environment={**cell.environment, "rollouts": kind})
        for cell, kind in zip(page.cells, itertools.cycle(kinds), strict=False)
    )
    text = render(replace(page, cells=cells))
    assert (
        "- Rollouts are not repeatable or up to rounding (see Environment): trained again with the same seeds" in text
    )
    assert "| rollouts | `exact` (" in text
    exact = tuple(replace(cell, environment={**cell.environment, "rollouts": "exact"}) for cell in page.cells)
    assert "Rollouts are" not in render(replace(page, cells=exact))


def test_page_takes_no_teachers_base_for_the_students(tmp_path: Path, cell_spec: CellSpec) -> None:
    page = synthetic(tmp_path, cell_spec, arms={name: VARIANTS[name] for name in ("grpo", "opd")}, seeds=(42,)).page()
    teachers = replace(page, bases=tuple(base for base in page.bases if base.is_teacher))
    assert teachers.base_of("spell_backward") is None
    text = render(teachers)
    assert "| spell_backward | missing | missing |" in text
    assert "| spell_backward | strong (teacher) | 0.960 |" in text


def test_page_before_anything_ran_holds_no_number_for_a_result(tmp_path: Path, cell_spec: CellSpec) -> None:
    """No cell, no base, no data: every table cell of a result reads `missing`, and no figure is linked."""
    made = synthetic(tmp_path, cell_spec, is_done=lambda _: False)
    text = render(replace(made.page(), bases=(), facts=()))
    results = text[text.index("## Test accuracy") : text.index("## Provenance")]
    body = [line.strip("| ").split(" | ") for line in results.splitlines() if line.startswith("|")]
    seeds = {"42", "1234", "2026"}
    for row in body:
        numbers = {cell for cell in row if re.fullmatch(r"-?\d[\d.,e-]*", cell)}
        assert numbers <= seeds, row
    assert "![" not in text
    assert "missing" in text


def test_write_report_same_records_give_the_same_bytes(tmp_path: Path, cell_spec: CellSpec) -> None:
    made = synthetic(tmp_path / "home", cell_spec)
    first, second = written(tmp_path / "one", made), written(tmp_path / "two", made)
    assert first == second
    assert set(first) == {
        "results.md",
        "cells.csv",
        "results.json",
        "figures/dev-accuracy.png",
        "figures/train-reward.png",
        "figures/divergence.png",
    }


def test_write_report_links_only_what_it_wrote_and_drops_old_figures(tmp_path: Path, cell_spec: CellSpec) -> None:
    made = synthetic(tmp_path / "home", cell_spec)
    written(tmp_path / "page", made)
    grpo = replace(made, cells=tuple(cell for cell in made.cells if cell.teacher is None))
    files = written(tmp_path / "page", grpo)
    assert "figures/divergence.png" not in files
    links = re.findall(r"\]\(([^)]+)\)", files["results.md"].decode())
    assert links
    assert set(links) <= set(files)


def test_write_report_refuses_no_cells(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="report of e900: got 0 cells"):
        write_report(experiment(), (), (), FACTS, arms=(), folder=tmp_path)


def test_page_escapes_what_users_wrote(tmp_path: Path, cell_spec: CellSpec) -> None:
    made = with_holes(tmp_path, cell_spec)
    question = "Is `a|b` <img src=x onerror=alert(1)> better?\n| x | y |\n| - | - |"
    text = render(replace(made.page(), experiment=experiment(question=question)))
    assert "<img" not in text
    assert "<b>" not in text
    assert "> \\| x \\| y \\|" in text


def test_page_warns_of_an_arm_that_a_guess_matches(tmp_path: Path, cell_spec: CellSpec) -> None:
    """Best guess 0.4125: GRPO reaches 0.40, the static teacher 0.42 with sd 0.02."""
    text = render(synthetic(tmp_path, cell_spec).page())
    assert "**sciknoweval-physics, grpo** does not beat its best guess: 0.400" in text
    assert "**sciknoweval-physics, sdpo-static** is not set apart from its best guess by its seeds: 0.420" in text
    assert "**spell_backward, grpo**" not in text
