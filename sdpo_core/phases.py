"""Where a step's seconds go: one running total a phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sdpo_core.metrics import PHASES


class PhaseClock:
    """Adds up seconds by phase; `clock` returns seconds from any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] += self._clock() - start

    def now(self) -> float:
        return self._clock()
