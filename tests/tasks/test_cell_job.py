"""The entry point of a cell's job: exit codes, one line on a failure, one driver at a time. No Ray is reached."""

import json
import threading
from pathlib import Path

import pytest

from sdpo_core.journal import Journal, Store, read_json, write_json
from sdpo_core.specs import CellSpec
from tasks.cell_job import main


@pytest.fixture
def journal(tmp_path: Path, cell_spec: CellSpec) -> Journal:
    """A cell without data and without base weights."""
    journal = Store(tmp_path).journal("cell")
    journal.write_spec(
        cell_spec,
        fingerprint="cell",
        data_digest="d",
        base_digest="b",
        base_fingerprint="base",
        teacher_digest=None,
        teacher_fingerprint=None,
    )
    return journal


def _main(tmp_path: Path) -> int:
    return main(["--home", str(tmp_path), "--fingerprint", "cell"])


def _empty_splits(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "spell_backward"
    folder.mkdir(parents=True)
    for name in ("train", "dev", "test"):
        (folder / f"{name}.jsonl").touch()


def test_done_cell_is_left_alone(tmp_path: Path, journal: Journal) -> None:
    write_json(journal.result_path, {"label": "done before"})
    assert _main(tmp_path) == 0
    assert read_json(journal.result_path) == {"label": "done before"}
    assert not journal.lease_path.exists()


def test_failure_leaves_one_line_that_names_the_cell_once(tmp_path: Path, journal: Journal) -> None:
    _empty_splits(tmp_path)
    assert _main(tmp_path) == 1
    error = read_json(journal.error_path)["error"]
    assert error.startswith("spell_backward/sdpo-ema/42: ")
    assert "got 0 rows, expected at least 1." in error
    assert error.count("spell_backward/sdpo-ema/42") == 1
    assert error.endswith(f"Log: {journal.folder / 'log.txt'}")
    assert "\n" not in error
    assert journal.status().state == "failed"


def test_unexpected_failure_is_told_and_keeps_its_traceback(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(FileNotFoundError):
        _main(tmp_path)
    error = read_json(journal.error_path)["error"]
    assert error.startswith("spell_backward/sdpo-ema/42: got FileNotFoundError: ")
    assert "train.jsonl" in error


def test_damaged_spec_is_named(tmp_path: Path, journal: Journal) -> None:
    journal.spec_path.write_text("{")
    assert _main(tmp_path) == 1
    assert str(journal.spec_path) in read_json(journal.error_path)["error"]


def test_second_driver_waits_for_the_first_and_trains_nothing(tmp_path: Path, journal: Journal) -> None:
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(_main(tmp_path)))
    with journal.lease({"pid": 1}) as is_mine:
        assert is_mine
        waiting.start()
        waiting.join(timeout=1.0)
        assert waiting.is_alive()
        write_json(journal.result_path, {"label": "by the first"})
    waiting.join(timeout=20)
    assert codes == [0]
    assert json.loads(journal.result_path.read_text()) == {"label": "by the first"}
    assert not journal.error_path.exists()
