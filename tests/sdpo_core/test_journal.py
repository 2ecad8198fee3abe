"""The journal is the truth: replaced whole or not at all, cut back exactly, leased by one process at a time."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdpo_core import journal as journal_module
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import NUMERICS_VERSION, cell_fingerprint
from sdpo_core.journal import CellStatus, Journal, MetricRecord, Store, read_json, write_json
from sdpo_core.specs import CellSpec


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "cells" / "abc")


@pytest.fixture
def holder(journal: Journal) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the cell's lease until it is killed."""
    script = (
        "import sys, time; from pathlib import Path; from sdpo_core.journal import Journal\n"
        "with Journal(Path(sys.argv[1])).lease({'job': 'other'}) as is_mine:\n"
        "    print(is_mine, flush=True)\n"
        "    time.sleep(120)\n"
    )
    command = [sys.executable, "-c", script, str(journal.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def _record(step: int, **metrics: float | None) -> MetricRecord:
    return MetricRecord(step=step, moment="step", time=1000.0 + step, metrics=metrics)


def test_write_json_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_json(path, {"long": "x" * 1000})
    write_json(path, {"a": "\u00e9"})
    assert read_json(path) == {"a": "\u00e9"}
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_write_json_leaves_a_reader_with_the_file_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with path.open(encoding="utf-8") as reader:
        write_json(path, {"a": 2})
        assert json.load(reader) == {"a": 1}


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_write_json_keeps_the_old_file_when_it_fails(tmp_path: Path, value: object) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": value})
    assert read_json(path) == {"a": 1}


def test_write_json_shows_readers_the_old_file_until_the_new_one_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands under the name at the moment of the flush is what a power cut would leave."""
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    seen: list[dict[str, Any]] = []
    flush = os.fsync

    def watch(descriptor: int) -> None:
        flush(descriptor)
        seen.append(read_json(path))

    monkeypatch.setattr(os, "fsync", watch)
    write_json(path, {"a": 2})
    assert seen == [{"a": 1}]
    assert read_json(path) == {"a": 2}


@pytest.mark.parametrize("text", ['{"a": ', "", "\x00", '{"a": 1} {'])
def test_read_json_names_the_damaged_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"spec\.json: got damaged JSON \(.*expected one object\. Delete its folder"):
        read_json(path)


def test_read_json_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="damaged JSON"):
        read_json(path)


def test_read_json_refuses_another_value(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(DataError, match="got list, expected one JSON object"):
        read_json(path)


def test_journal_reads_the_spec_it_wrote(journal: Journal, cell_spec: CellSpec) -> None:
    journal.write_spec(
        cell_spec,
        fingerprint="abc",
        data_digest="d",
        base_digest="b",
        base_fingerprint="f",
        teacher_digest="t",
        teacher_fingerprint="g",
    )
    assert journal.read_spec() == cell_spec
    written = read_json(journal.spec_path)
    assert (written["fingerprint"], written["numerics_version"]) == ("abc", NUMERICS_VERSION)
    assert (written["data_digest"], written["base_digest"], written["teacher_digest"]) == ("d", "b", "t")
    assert (written["base_fingerprint"], written["teacher_fingerprint"]) == ("f", "g")


def test_journal_reads_the_records_it_appended(journal: Journal) -> None:
    records = (_record(1, loss=0.5), _record(2, loss=None))
    for record in records:
        journal.append_metrics(record)
    journal.append_sample({"step": 1, "response": "line\nbreak \u00e9"})
    assert journal.read_metrics() == records
    assert journal.read_samples() == ({"step": 1, "response": "line\nbreak \u00e9"},)


def test_journal_without_files_is_empty(journal: Journal) -> None:
    assert journal.read_metrics() == ()
    assert journal.read_samples() == ()
    assert journal.sizes() == {"metrics.jsonl": 0, "samples.jsonl": 0}


def test_journal_refuses_a_metric_that_is_no_number(journal: Journal) -> None:
    """NaN is no JSON; a reader would choke on it long after the run."""
    with pytest.raises(ValueError, match="JSON compliant"):
        journal.append_metrics(_record(1, loss=float("nan")))
    assert journal.read_metrics() == ()


def test_read_metrics_leaves_out_a_line_still_being_written(journal: Journal) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    with journal.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "mom')
    assert [record.step for record in journal.read_metrics()] == [1]


def test_read_metrics_names_the_damaged_line(journal: Journal) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    with journal.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "mom\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: got damaged JSON .*Delete .*abc to train the cell afresh"):
        journal.read_metrics()


def test_truncate_cuts_back_to_the_checkpoint(journal: Journal) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    journal.append_sample({"step": 1})
    sizes = journal.sizes()
    before = journal.metrics_path.read_bytes()
    journal.append_metrics(_record(2, loss=0.4))
    journal.append_sample({"step": 2})
    journal.truncate(sizes)
    assert journal.metrics_path.read_bytes() == before
    assert journal.read_samples() == ({"step": 1},)
    journal.append_metrics(_record(2, loss=0.4))
    assert [record.step for record in journal.read_metrics()] == [1, 2]


def test_truncate_without_a_checkpoint_empties(journal: Journal) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    journal.truncate({})
    assert journal.read_metrics() == ()


def test_truncate_lets_a_file_be_absent_that_was_never_written(journal: Journal) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    journal.truncate(journal.sizes())
    assert not journal.samples_path.exists()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_truncate_refuses_a_journal_shorter_than_its_checkpoint(journal: Journal, is_deleted: bool) -> None:
    journal.append_metrics(_record(1, loss=0.5))
    sizes = journal.sizes()
    if is_deleted:
        journal.metrics_path.unlink()
    else:
        os.truncate(journal.metrics_path, sizes["metrics.jsonl"] - 1)
    with pytest.raises(DataError, match=r"metrics\.jsonl: got a file shorter .*Delete .*abc to train"):
        journal.truncate(sizes)


def test_committed_step_is_the_newest_whole_checkpoint(journal: Journal) -> None:
    assert journal.committed_step() == 0
    for name in ("step-000005", "step-000010", "step-000020.partial", ".step-000030"):
        (journal.checkpoints / name).mkdir(parents=True)
    assert journal.committed_step() == 10


def test_status_of_a_new_cell_is_missing(journal: Journal) -> None:
    assert journal.status() == CellStatus(state="missing")


def test_status_of_an_interrupted_cell_says_where_it_resumes(journal: Journal) -> None:
    (journal.checkpoints / "step-000010").mkdir(parents=True)
    assert journal.status() == CellStatus(state="missing", note="interrupted, resumes from step 10")


def test_status_of_a_failed_cell_says_why(journal: Journal) -> None:
    write_json(journal.error_path, {"error": "out of memory", "time": 1.0})
    assert journal.status() == CellStatus(state="failed", note="out of memory")


def test_status_of_a_held_cell_is_running(journal: Journal) -> None:
    """A lease outweighs the error of the try before."""
    write_json(journal.error_path, {"error": "out of memory", "time": 1.0})
    with journal.lease({"job": "j"}) as is_mine:
        assert is_mine
        assert journal.status() == CellStatus(state="running", note="checkpoint at step 0")
    assert journal.status().state == "failed"


def test_status_of_a_cell_with_a_result_is_done(journal: Journal) -> None:
    write_json(journal.error_path, {"error": "an earlier try", "time": 1.0})
    write_json(journal.result_path, {"fingerprint": "abc"})
    assert journal.status() == CellStatus(state="done")


def test_store_finds_a_cell_of_an_older_version_stale(
    tmp_path: Path, cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    digests: dict[str, Any] = {"data_digest": "d", "base_digest": "b", "teacher_digest": None}
    older = cell_fingerprint(cell_spec, **digests, numerics_version=NUMERICS_VERSION)
    write_json(store.journal(older).result_path, {"fingerprint": older})
    assert store.status(cell_spec, **digests).state == "done"

    later = NUMERICS_VERSION + 1
    monkeypatch.setattr(journal_module, "NUMERICS_VERSION", later)
    monkeypatch.setattr(
        journal_module,
        "cell_fingerprint",
        lambda spec, *, numerics_version=later, **digests: cell_fingerprint(
            spec, **digests, numerics_version=numerics_version
        ),
    )
    status = store.status(cell_spec, **digests)
    assert status == CellStatus(state="stale", note=f"done as {older} under numerics version {NUMERICS_VERSION}")
    assert store.status(cell_spec, **digests | {"data_digest": "other"}).state == "missing"
    assert store.status(cell_spec, **digests | {"teacher_digest": "t"}).state == "missing"


def test_lease_writes_its_holder_for_people(journal: Journal) -> None:
    with journal.lease({"job": "a long name that is replaced"}):
        pass
    with journal.lease({"job": "j", "pid": 7}) as is_mine:
        assert is_mine
        assert json.loads(journal.lease_path.read_text(encoding="utf-8")) == {"job": "j", "pid": 7}


def test_lease_ends_with_its_block(journal: Journal) -> None:
    assert not journal.is_leased()

    def train() -> None:
        with journal.lease({}) as is_mine:
            assert is_mine
            raise RuntimeError("training broke")

    with pytest.raises(RuntimeError, match="training broke"):
        train()
    assert not journal.is_leased()
    with journal.lease({}) as is_mine:
        assert is_mine


def test_lease_is_held_against_another_process(journal: Journal, holder: subprocess.Popen[str]) -> None:
    assert holder.poll() is None
    assert journal.is_leased()
    assert journal.status().state == "running"
    with journal.lease({"job": "mine"}) as is_mine:
        assert not is_mine
    # The loser neither wrote its name into the lease nor ended it.
    assert read_json(journal.lease_path) == {"job": "other"}
    assert journal.is_leased()


def test_lease_ends_when_its_holder_is_killed(journal: Journal, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    assert holder.wait(timeout=30) == -signal.SIGKILL
    assert not journal.is_leased()
    assert journal.status().state == "missing"
    with journal.lease({"job": "mine"}) as is_mine:
        assert is_mine
    assert read_json(journal.lease_path) == {"job": "mine"}
