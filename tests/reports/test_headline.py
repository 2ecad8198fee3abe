"""The headline table for other sets of arms than the usual three."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.sections.headline import render
from sdpo_core.specs import CellSpec
from tests.reports.synthetic import VARIANTS, synthetic

STATIC: dict[str, Any] = {"name": "sdpo", "teacher": {"schedule": "static"}}


def rows(
    home: Path, spec: CellSpec, *, arms: Mapping[str, dict[str, Any]], seeds: Sequence[int] = (42,)
) -> list[list[str]]:
    """Cells of the table, header first."""
    text = render(synthetic(home, spec, arms=arms, seeds=seeds).page())
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if "---" not in line]


def test_headline_columns_of_the_usual_arms(tmp_path: Path, cell_spec: CellSpec) -> None:
    header, *body = rows(tmp_path, cell_spec, arms={"grpo": {"name": "grpo"}, "sdpo-static": STATIC}, seeds=(42, 1234))
    expected = (
        "Dataset | Split | Student | Teacher | Seed(s) | GRPO | SDPO | Effective feedback | Top-K coverage | "
        "Throughput / memory | Status"
    )
    assert " | ".join(header) == expected
    assert [row[4] for row in body] == ["42", "1234", "**mean \u00b1 sd**"] * 2
    assert body[0][1] == "test (100 problems)"  # the spec's limit, below the 128 of the split
    assert body[3][1] == "test (80 problems)"


def test_headline_without_a_teacher_has_one_block_a_dataset(tmp_path: Path, cell_spec: CellSpec) -> None:
    header, *body = rows(tmp_path, cell_spec, arms={"grpo": {"name": "grpo"}})
    assert "SDPO" not in header
    assert len(body) == 4
    # No teacher: feedback and coverage do not apply, and memory is the student's alone.
    assert (body[0][3], body[0][6], body[0][7]) == ("n/a", "n/a", "n/a")
    assert body[0][8].endswith(" tokens/s / 412 MiB resident")


def test_headline_gives_each_arm_without_a_teacher_its_column(tmp_path: Path, cell_spec: CellSpec) -> None:
    arms: dict[str, dict[str, Any]] = {
        "grpo": {"name": "grpo"},
        "grpo-std": {"name": "grpo", "normalise_std": True},
        "sdpo-static": STATIC,
    }
    header, *body = rows(tmp_path, cell_spec, arms=arms)
    assert header[5:8] == ["GRPO (grpo)", "GRPO (grpo-std)", "SDPO"]
    assert all(len(row) == len(header) for row in body)


def test_headline_tells_arms_with_the_same_teacher_apart(tmp_path: Path, cell_spec: CellSpec) -> None:
    arms = {"sdpo-static": STATIC, "sdpo-forward": STATIC | {"divergence": {"alpha": 0.0}}}
    header, *body = rows(tmp_path, cell_spec, arms=arms)
    assert header[5] == "SDPO"
    assert [row[3] for row in body[::2]] == ["static (sdpo-static)", "static (sdpo-forward)"] * 2


def test_headline_tells_an_algorithm_with_a_teacher_from_the_same_without(tmp_path: Path, cell_spec: CellSpec) -> None:
    header, *body = rows(tmp_path, cell_spec, arms={name: VARIANTS[name] for name in ("grpo", "opd")})
    assert header[5:7] == ["GRPO", "GRPO with a teacher"]
    assert body[0][3] == "static, from strong"
    assert body[0][5] != "n/a"
    assert body[0][6] != "n/a"


def test_headline_of_many_arms_has_a_block_for_each(tmp_path: Path, cell_spec: CellSpec) -> None:
    header, *body = rows(tmp_path, cell_spec, arms=VARIANTS, seeds=(42, 1234))
    assert header[3:7] == ["Arm", "Teacher", "Seed(s)", "Accuracy"]
    assert [row[3] for row in body[::3]] == [*VARIANTS] * 2
    assert all(len(row) == len(header) for row in body)
    assert [row[4] for row in body if row[3] == "gspo"] == ["n/a"] * 6
    accuracies = {row[3]: row[6] for row in body if row[5] == "1234"}
    assert all(float(accuracy) > 0 for accuracy in accuracies.values())
