"""Progress a person can follow: one line when a cell changes its state, one line on all of them now and then."""

import logging
import time
from collections.abc import Callable

from flows.matrix import Matrix
from sdpo_core.errors import DataError
from sdpo_core.journal import CellState, read_json

_log = logging.getLogger(__name__)
_SUMMARY_SECONDS = 15.0


class Progress:
    """Looks at the journals; `tick` is called as often as the caller likes."""

    def __init__(self, matrix: Matrix, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._matrix = matrix
        self._clock = clock
        self._states: dict[str, CellState] = {}
        self._next_summary = clock() + _SUMMARY_SECONDS

    def tick(self) -> None:
        """Log what changed since the last call."""
        running = []
        for cell in self._matrix.planned():
            label = cell.spec.label
            status = self._matrix.status(cell)
            if status.state == "running" and cell.fingerprint is not None:
                running.append(f"{label} {self._where(cell.fingerprint, steps=cell.spec.training.steps)}")
            if self._states.get(label) != status.state:
                self._states[label] = status.state
                if status.state in ("done", "failed") and cell.fingerprint is not None:
                    _log.info("[%s] %s %s%s", self._count(), label, status.state, self._outcome(cell.fingerprint))
        if self._clock() >= self._next_summary:
            self._next_summary = self._clock() + _SUMMARY_SECONDS
            _log.info("[%s] running: %s", self._count(), "; ".join(running) or "nothing yet")

    def _count(self) -> str:
        done = sum(state == "done" for state in self._states.values())
        return f"{done}/{len(self._matrix.cells)} done"

    def _where(self, fingerprint: str, *, steps: int) -> str:
        try:
            records = self._matrix.store.journal(fingerprint).read_metrics()
        except DataError as error:
            # One unreadable journal is no reason to end the others' run; the cell's own driver fails on it.
            return f"({error})"
        last = max((record.step for record in records), default=0)
        dev = [record.metrics["eval/accuracy"] for record in records if record.moment == "evaluate"]
        return f"step {last}/{steps}" + (f" dev {dev[-1]:.3f}" if dev and dev[-1] is not None else "")

    def _outcome(self, fingerprint: str) -> str:
        journal = self._matrix.store.journal(fingerprint)
        status = journal.status()
        if status.state == "failed":
            return f": {status.note}"
        accuracy = read_json(journal.result_path)["metrics"]["test/accuracy"]
        return f": test accuracy {accuracy:.3f}"
