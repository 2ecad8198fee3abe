"""What a trainable model promises the step loop, and the records that travel to it.

Arrays on the wire are numpy; every per-token array of a row has one entry a response token. Where rows come in a
sequence the axis is `_`: each has its own number of tokens.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.algorithm_specs import Support
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

    `logps`: of the response's own tokens. `support_ids`: the K ids it ranks highest at each position, `table` their
    log-probabilities, the tail last; None where K is 0. `values`: of the value head, where the policy has one.
    """

    logps: Float[np.ndarray, " token"]
    support_ids: Int[np.ndarray, "token k"] | None = None
    table: Float[np.ndarray, "token cell"] | None = None
    values: Float[np.ndarray, " token"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherQuestion:
    """One response to score under the teacher's prompt. `student_ids`: the student's support, where it has a say."""

    row: TokenRow
    student_ids: Int[np.ndarray, "token k"] | None = None

    def __post_init__(self) -> None:
        size = len(self.row.response_ids)
        if self.student_ids is not None and len(self.student_ids) != size:
            raise DataError(
                f"TeacherQuestion.student_ids: got {len(self.student_ids)} entries, expected {size}, one a response "
                "token. Build it from the same response ids."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherScores:
    """What a scoring model says of a response.

    `logps` and `entropies` of the response's own tokens. `support_ids` [token, k]: the cells' ids, -1 (last in a row)
    where a union has fewer; `table` [token, k + 1] their log-probabilities, the tail last, -inf in an empty cell.
    `overlap`: share of the student's ids among as many of this model's best. `states`: final hidden states, for a
    divergence over the whole vocabulary; the projection comes from `ScoringModel.projection`.
    """

    logps: Float[np.ndarray, " token"]
    entropies: Float[np.ndarray, " token"]
    support_ids: Int[np.ndarray, "token k"] | None = None
    table: Float[np.ndarray, "token cell"] | None = None
    overlap: Float[np.ndarray, " token"] | None = None
    states: Float[np.ndarray, "token hidden"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherFailure:
    """Why one question has no answer. It is counted, and its rollout left out; nothing stands in for the scores."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """The output projection of a model, as it travels: everything of `objectives.head.Head` but the temperature.

    `version` counts the changes of the weights it was taken from.
    """

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None
    logit_scale: float
    soft_cap: float | None
    vocab: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow:
    """One response of a mini-batch with what its objective needs.

    `weight` multiplies each token's policy term, `distill_weight` its distillation term (denominators are inside; 0:
    the row has no such term). `old_logps` None means on-policy: the current log-probabilities, detached.
    `teacher_logps` [token, k + 1]: the teacher's table at `support_ids`, tail last; `teacher_states` in the place of
    both for a divergence over the whole vocabulary. `teacher_own_logps` and `anchor_logps`: of the sampled tokens.
    """

    row: TokenRow
    weight: float = 0.0
    distill_weight: float = 0.0
    advantages: Float[np.ndarray, " token"] | None = None
    task_advantage: float | None = None
    old_logps: Float[np.ndarray, " token"] | None = None
    sampling_logps: Float[np.ndarray, " token"] | None = None
    support_ids: Int[np.ndarray, "token k"] | None = None
    teacher_logps: Float[np.ndarray, "token cell"] | None = None
    teacher_states: Float[np.ndarray, "token hidden"] | None = None
    teacher_own_logps: Float[np.ndarray, " token"] | None = None
    anchor_logps: Float[np.ndarray, " token"] | None = None
    old_values: Float[np.ndarray, " token"] | None = None
    returns: Float[np.ndarray, " token"] | None = None

    def __post_init__(self) -> None:
        size = len(self.row.response_ids)
        for name, value in self.arrays().items():
            if len(value) != size:
                raise DataError(
                    f"TrainRow.{name}: got {len(value)} entries, expected {size}, one a response token. "
                    "Build it from the same response ids."
                )

    def arrays(self) -> dict[str, np.ndarray]:
        """The per-token fields that the row has, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Response tokens, flattened, as an objective sees them: rows of one kind, which have the same fields.

    `logp`, `student_logp`, `divergence` (whole vocabulary) and `value` carry gradient, the others are constants.
    `sequence` numbers each token's response, from 0.
    """

    logp: Float[Tensor, " token"]
    old_logp: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    weight: Float[Tensor, " token"]
    distill_weight: Float[Tensor, " token"]
    sequence: Int[Tensor, " token"]
    advantage: Float[Tensor, " token"] | None = None
    task_advantage: Float[Tensor, " token"] | None = None
    sampling_logp: Float[Tensor, " token"] | None = None
    student_logp: Float[Tensor, "token cell"] | None = None
    teacher_logp: Float[Tensor, "token cell"] | None = None
    divergence: Float[Tensor, " token"] | None = None
    teacher_own_logp: Float[Tensor, " token"] | None = None
    anchor_logp: Float[Tensor, " token"] | None = None
    value: Float[Tensor, " token"] | None = None
    old_value: Float[Tensor, " token"] | None = None
    returns: Float[Tensor, " token"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Each token's share of the loss, weights and denominators included, and sums over tokens that become metrics."""

    loss: Float[Tensor, " token"]
    sums: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeVocabulary:
    """A divergence over every id, which only the projection itself can take (see `objectives.fused`)."""

    alpha: float
    entry_clip: float | None


@runtime_checkable
class Objective(Protocol):
    """A pure function of small per-token tables; picklable, since it travels to the policy's worker.

    `needs_whole_sequences`: False allows the policy to show it any part of the tokens at a time.
    `whole_vocabulary`: the divergence that the policy takes for it, where rows carry `teacher_states`.
    """

    @property
    def needs_whole_sequences(self) -> bool: ...

    @property
    def whole_vocabulary(self) -> WholeVocabulary | None: ...

    def token_losses(self, batch: TokenBatch) -> TokenLosses: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateStats:
    """One optimizer step: loss, gradient norm before clipping, and the objective's sums."""

    loss: float
    grad_norm: float
    sums: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsAt:
    """Where a worker finds a model: a Hugging Face folder, and a folder whose weights go over its own.

    Checkpoints hold weights alone, so the folder of their base stands beside them. `sha256`: what the weights must
    be, where that is known.
    """

    folder: Path
    weights: Path | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """Identity of a worker: process id, SHA-256 of its weights, the kind of memory its peak is of."""

    pid: int
    weights_sha256: str
    memory_kind: str


@runtime_checkable
class ScoringModel(Protocol):
    """A model that scores given responses without gradient: what a teacher is made of."""

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores | TeacherFailure, ...]:
        """Scores at the cells of `support`, its own part of them `top_k` wide; None: of the sampled tokens alone."""
        ...

    def projection(self) -> Projection: ...

    def projection_version(self) -> int: ...

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

    def hold_projection(self, projection: Projection) -> None:
        """Keep the teacher's output projection for divergences over the whole vocabulary."""
        ...

    def weights(self) -> dict[str, Tensor]: ...

    def weights_version(self) -> int:
        """How often the weights have changed."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...

    def peak_memory_bytes(self) -> int: ...
