"""What a trainable model promises the step loop, and the records that travel to it.

Arrays on the wire are numpy; every per-token array of a row has one entry a response token. Where rows come in a
sequence the axis is `_`: each has its own number of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A prompt and a response as ids. Response token t sits at position P + t and is predicted at P + t - 1."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.prompt_ids) < 2 or not self.response_ids:
            raise DataError(
                f"TokenRow: got {len(self.prompt_ids)} prompt ids and {len(self.response_ids)} response ids, expected "
                "at least 2 and 1. Render the prompt with the chat template."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowScores:
    """What a policy says of a response under its current weights, at the sampling temperature.

    `logps`: of the response's own tokens. `support_ids`: the K ids it ranks highest at each position.
    """

    logps: Float[np.ndarray, " token"]
    support_ids: Int[np.ndarray, "token k"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow:
    """One response of a mini-batch with what its objective needs.

    `weight` multiplies each token's loss (denominators are inside it). `old_logps` None means on-policy: the current
    log-probabilities, detached. `teacher_logps` [token, k + 1]: the teacher's table at `support_ids`, tail last.
    """

    row: TokenRow
    weight: float
    advantages: Float[np.ndarray, " token"] | None = None
    old_logps: Float[np.ndarray, " token"] | None = None
    support_ids: Int[np.ndarray, "token k"] | None = None
    teacher_logps: Float[np.ndarray, "token cell"] | None = None

    def __post_init__(self) -> None:
        size = len(self.row.response_ids)
        for name in ("advantages", "old_logps", "support_ids", "teacher_logps"):
            value = getattr(self, name)
            if value is not None and len(value) != size:
                raise DataError(
                    f"TrainRow.{name}: got {len(value)} entries, expected {size}, one a response token. "
                    "Build it from the same response ids."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """The response tokens of a micro-batch, flattened, as an objective sees them.

    `logp` and `student_logp` carry gradient; the others are constants.
    """

    logp: Float[Tensor, " token"]
    old_logp: Float[Tensor, " token"]
    advantage: Float[Tensor, " token"] | None
    student_logp: Float[Tensor, "token cell"] | None
    teacher_logp: Float[Tensor, "token cell"] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Per-token losses, and sums over tokens that become metrics."""

    loss: Float[Tensor, " token"]
    sums: Mapping[str, float]


@runtime_checkable
class Objective(Protocol):
    """A pure function of small per-token tables; picklable, since it travels to the policy's worker."""

    def token_losses(self, batch: TokenBatch) -> TokenLosses: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One optimizer step: loss, gradient norm before clipping, and the objective's sums."""

    loss: float
    grad_norm: float
    sums: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """Identity of a worker: process id, SHA-256 of its weights, the kind of memory its peak is of."""

    pid: int
    weights_sha256: str
    memory_kind: str


@runtime_checkable
class ScoringModel(Protocol):
    """A model that scores given responses without gradient: what a teacher is made of."""

    def tables(
        self, rows: Sequence[TokenRow], support_ids: Sequence[Int[np.ndarray, "_ k"]]
    ) -> tuple[Float[np.ndarray, "_ cell"], ...]: ...

    def weights(self) -> dict[str, Tensor]: ...

    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...


@runtime_checkable
class Policy(Protocol):
    """The student: scores its own responses and is trained."""

    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]: ...

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats: ...

    def weights(self) -> dict[str, Tensor]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...
