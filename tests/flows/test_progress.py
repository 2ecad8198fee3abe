"""Progress lines, from journals that change between two looks."""

import logging

import pytest

from flows.matrix import Matrix
from flows.progress import Progress
from sdpo_core.journal import MetricRecord, write_json


class Clock:
    """Seconds as the test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "flows.progress"]
    caplog.clear()
    return lines


def test_progress_names_each_change_once_and_what_runs_now_and_then(
    matrix: Matrix, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    journals = [matrix.store.journal(str(cell.fingerprint)) for cell in matrix.planned()]
    progress = Progress(matrix, clock=clock)
    progress.tick()
    assert _lines(caplog) == []

    evaluated = MetricRecord(step=2, moment="evaluate", time=1.0, metrics={"eval/accuracy": 0.25})
    journals[0].append_metrics(evaluated)
    journals[1].metrics_path.write_text('{"damaged\n')
    clock.now = 16.0
    with journals[0].lease({}), journals[1].lease({}):
        progress.tick()
    (line,) = _lines(caplog)
    assert line.startswith("[0/3 done] running: sciknoweval-physics/grpo/42 step 2/4 dev 0.250; ")
    assert str(journals[1].metrics_path) in line

    write_json(journals[0].result_path, {"metrics": {"test/accuracy": 0.5}})
    write_json(journals[2].error_path, {"error": "sciknoweval-physics/sdpo-ema/42: got nan.", "time": 1.0})
    for expected in (2, 0):
        progress.tick()
        lines = _lines(caplog)
        assert len(lines) == expected
        if lines:
            assert lines[0] == "[1/3 done] sciknoweval-physics/grpo/42 done: test accuracy 0.500"
            assert lines[1].startswith("[1/3 done] sciknoweval-physics/sdpo-ema/42 failed: ")
    clock.now = 60.0
    progress.tick()
    assert _lines(caplog) == [], "nothing runs"
