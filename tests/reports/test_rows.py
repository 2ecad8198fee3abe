"""What is read from the store, and what each state of a cell gives."""

from dataclasses import replace
from pathlib import Path

import pytest

from reports.rows import CellRow, PlannedCell, load_bases, load_cells, teacher_text
from sdpo_core.errors import DataError
from sdpo_core.journal import Store, read_json, write_json
from sdpo_core.specs import CellSpec
from tests.reports.synthetic import (
    VARIANTS,
    plan,
    planned_cell,
    synthetic,
    variant,
    with_holes,
    write_bases,
    write_done,
)

FOLDER: dict[str, object] = {"kind": "folder", "name": "qwen", "sha256": "a" * 64}
CHECKPOINT: dict[str, object] = {"kind": "checkpoint", "cell": "0123456789abcdef0123", "step": 40}


def only(cells: tuple[CellRow, ...], label: str) -> CellRow:
    (cell,) = (cell for cell in cells if cell.spec.label == label)
    return cell


def test_load_cells_reads_a_done_cell(tmp_path: Path, cell_spec: CellSpec) -> None:
    cell = only(synthetic(tmp_path, cell_spec).cells, "spell_backward/sdpo-ema/1234")
    assert (cell.state, cell.algorithm, cell.teacher) == ("done", "sdpo", "EMA 0.05")
    assert cell.value("test/accuracy") == pytest.approx(0.97)
    assert cell.value("cost/ema_updates") == 6.0
    assert cell.run_id == "run-sdpo-ema-1234"
    assert cell.seconds == 31.25
    assert [step for step, _ in cell.series("eval/accuracy")] == [0, 2, 4, 6]
    assert cell.environment["memory"] == "resident"


def test_value_is_not_applicable_where_the_arm_has_no_such_metric(tmp_path: Path, cell_spec: CellSpec) -> None:
    cells = synthetic(tmp_path, cell_spec).cells
    assert only(cells, "spell_backward/grpo/42").value("distill/divergence") == "n/a"
    assert only(cells, "spell_backward/sdpo-static/42").value("cost/ema_updates") == "n/a"


def test_value_is_missing_where_a_done_cell_lost_what_it_promised(tmp_path: Path, cell_spec: CellSpec) -> None:
    cell = only(synthetic(tmp_path, cell_spec).cells, "spell_backward/sdpo-static/42")
    assert replace(cell, metrics={}).value("distill/divergence") == "missing"
    assert replace(cell, metrics={"distill/divergence": None}).value("distill/divergence") == "n/a"


def test_load_cells_names_every_state(tmp_path: Path, cell_spec: CellSpec) -> None:
    cells = with_holes(tmp_path, cell_spec).cells
    failed = only(cells, "spell_backward/grpo/1234")
    assert (failed.state, failed.value("test/accuracy"), failed.seconds) == ("failed", "failed", "failed")
    assert failed.note.startswith("loss: got nan")
    running = only(cells, "spell_backward/sdpo-ema/42")
    assert running.state == "running"
    assert running.value("eval/accuracy") == "running"
    assert len(running.curves) == 1
    assert only(cells, "spell_backward/sdpo-static/2026").value("train/loss") == "missing"
    assert only(cells, "spell_backward/sdpo-ema/2026").value("train/loss") == "stale"


def test_load_cells_without_a_base_is_missing_and_says_why(tmp_path: Path, cell_spec: CellSpec) -> None:
    planned = PlannedCell(
        spec=cell_spec,
        fingerprint=None,
        data_digest="d",
        base_digest=None,
        base_fingerprint="not-made",
        teacher_digest=None,
        teacher_fingerprint=None,
    )
    (cell,) = load_cells(Store(tmp_path), [planned])
    assert (cell.state, cell.note, cell.fingerprint) == ("missing", "its base model is not made yet", None)
    assert load_bases(Store(tmp_path), [planned]) == ()


def test_load_cells_without_its_teachers_base_says_whose_is_missing_or_failed(
    tmp_path: Path, cell_spec: CellSpec
) -> None:
    store, (planned, *_) = Store(tmp_path), plan(cell_spec, arms={"opd": VARIANTS["opd"]}, seeds=(42,))
    waiting = replace(planned, fingerprint=None, teacher_digest=None)
    assert load_cells(store, [waiting])[0].note == "its teacher's base model is not made yet"
    write_json(
        store.bases / str(planned.teacher_fingerprint) / "error.json", {"error": "base strong: got nan.", "time": 1}
    )
    (cell,) = load_cells(store, [waiting])
    assert (cell.state, cell.note) == ("failed", "base strong: got nan.")


def test_load_cells_refuses_an_incomplete_result(tmp_path: Path, cell_spec: CellSpec) -> None:
    store, planned = Store(tmp_path), planned_cell(variant_of(cell_spec))
    write_done(store, planned)
    path = store.journal(str(planned.fingerprint)).result_path
    write_json(path, {key: value for key, value in read_json(path).items() if key != "workers"})
    with pytest.raises(
        DataError, match=r"result\.json: got a result without 'workers'.*Delete .* spell_backward/grpo/42"
    ):
        load_cells(store, [planned])


def test_load_cells_without_tracking_has_no_run(tmp_path: Path, cell_spec: CellSpec) -> None:
    store, planned = Store(tmp_path), planned_cell(variant_of(cell_spec))
    write_done(store, planned)
    store.journal(str(planned.fingerprint)).tracking_path.unlink()
    assert load_cells(store, [planned])[0].run_id is None


def test_load_bases_gives_one_row_a_dataset(tmp_path: Path, cell_spec: CellSpec) -> None:
    bases = synthetic(tmp_path, cell_spec).bases
    assert [(base.dataset, base.is_teacher) for base in bases] == [
        ("spell_backward", False),
        ("sciknoweval-physics", False),
    ]
    assert bases[0].demonstration_accuracy == 0.9
    assert bases[1].feedback_accuracy is None


def test_load_bases_reads_the_teachers_after_the_students(tmp_path: Path, cell_spec: CellSpec) -> None:
    made = synthetic(tmp_path, cell_spec, arms={name: VARIANTS[name] for name in ("opd", "grpo", "opd-topk")})
    assert [(base.dataset, base.name, base.is_teacher, base.dev_accuracy) for base in made.bases] == [
        ("spell_backward", "tiny", False, 0.5),
        ("sciknoweval-physics", "tiny", False, 0.2),
        ("spell_backward", "strong", True, 0.96),
        ("sciknoweval-physics", "strong", True, 0.6),
    ]


def test_load_bases_refuses_an_incomplete_probe(tmp_path: Path, cell_spec: CellSpec) -> None:
    store, planned = Store(tmp_path), planned_cell(variant_of(cell_spec))
    write_bases(store)
    write_json(store.bases / "base-spell_backward" / "probe-spell_backward.json", {"dataset": "spell_backward"})
    with pytest.raises(DataError, match="without 'dev_problems'"):
        load_bases(store, [planned])


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ({"name": "grpo"}, None),
        ({"name": "sdpo", "teacher": {"schedule": "static"}}, "static"),
        ({"name": "sdpo", "teacher": {"schedule": "live"}}, "live"),
        ({"name": "sdpo", "teacher": {"schedule": "ema", "rate": 0.1}}, "EMA 0.1"),
        ({"name": "sdpo", "teacher": {"schedule": "trust_region", "rate": 0.05}}, "trust region 0.05"),
        ({"name": "grpo", "opd": {"teacher": {"schedule": "static", "weights": "profile"}}}, "static, from strong"),
        ({"name": "opsd", "teacher": {"schedule": "static", "weights": FOLDER}}, "static, from models/qwen"),
        (
            {"name": "opsd", "teacher": {"schedule": "live", "weights": CHECKPOINT}},
            "live, from cell 0123456789abcdef0123 (step 40)",
        ),
        (
            {"name": "opsd", "teacher": {"schedule": "live", "weights": CHECKPOINT | {"step": "best"}}},
            "live, from cell 0123456789abcdef0123 (best)",
        ),
    ],
)
def test_teacher_text(cell_spec: CellSpec, algorithm: dict[str, object], text: str | None) -> None:
    spec = variant(cell_spec, dataset="spell_backward", arm="any", seed=42, algorithm=algorithm)
    assert teacher_text(spec) == text


def variant_of(spec: CellSpec) -> CellSpec:
    return variant(spec, dataset="spell_backward", arm="grpo", seed=42, algorithm={"name": "grpo"})
