"""What a teacher promises: scores at the student's ids, and weights with a life of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.backends.base import TokenRow, WorkerFacts


@runtime_checkable
class HasWeights(Protocol):
    """Whoever a teacher can follow."""

    def weights(self) -> dict[str, Tensor]: ...


@runtime_checkable
class Teacher(Protocol):
    """The teacher never samples: it reads the student's response under its own prompt."""

    def tables(
        self, rows: Sequence[TokenRow], support_ids: Sequence[Int[np.ndarray, "_ k"]]
    ) -> tuple[Float[np.ndarray, "_ cell"], ...]: ...

    def follow(self, student: HasWeights) -> bool:
        """Commit the student's weights by the schedule; False when the schedule has no commit."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...
