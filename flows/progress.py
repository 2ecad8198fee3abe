"""Progress a person can follow: one line when a cell changes its state, one line on all of them now and then."""

import logging
import time
from collections.abc import Callable

from flows.matrix import Matrix
from sdpo_core.errors import DataError
from sdpo_core.journal import CellState, Journal, read_json

_log = logging.getLogger(__name__)
_SUMMARY_SECONDS = 15.0


class Progress:
    """Looks at the journals; `tick` is called as often as the caller likes. Cells without a base have no journal."""

    def __init__(self, matrix: Matrix, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = len(matrix.cells)
        self._cells = [
            (cell.spec, matrix.store.journal(cell.fingerprint))
            for cell in matrix.planned()
            if cell.fingerprint is not None
        ]
        self._clock = clock
        self._states: dict[str, CellState] = {spec.label: journal.status().state for spec, journal in self._cells}
        self._next_summary = clock() + _SUMMARY_SECONDS

    def tick(self) -> None:
        """Log what changed since the last call."""
        for spec, journal in self._cells:
            before = self._states[spec.label]
            if before == "done":
                continue
            state = self._states[spec.label] = journal.status().state
            if state != before and state in ("done", "failed"):
                _log.info("[%s] %s %s%s", self._count(), spec.label, state, _outcome(journal))
        if self._clock() >= self._next_summary:
            self._next_summary = self._clock() + _SUMMARY_SECONDS
            running = [
                f"{spec.label} {_where(journal, steps=spec.training.steps)}"
                for spec, journal in self._cells
                if self._states[spec.label] == "running"
            ]
            if running:
                _log.info("[%s] running: %s", self._count(), "; ".join(running))

    def _count(self) -> str:
        return f"{sum(state == 'done' for state in self._states.values())}/{self._total} done"


def _where(journal: Journal, *, steps: int) -> str:
    try:
        records = journal.read_metrics()
    except DataError as error:
        # One unreadable journal is no reason to end the others' run; the cell's own driver fails on it.
        return f"({error})"
    last = max((record.step for record in records), default=0)
    dev = [record.metrics["eval/accuracy"] for record in records if record.moment == "evaluate"]
    return f"step {last}/{steps}" + (f" dev {dev[-1]:.3f}" if dev and dev[-1] is not None else "")


def _outcome(journal: Journal) -> str:
    status = journal.status()
    if status.state == "failed":
        return f": {status.note}"
    accuracy = read_json(journal.result_path)["metrics"]["test/accuracy"]
    return f": test accuracy {accuracy:.3f}"
