"""What the policy and the scoring model ask of a model, whatever it is made of and however it lies on processes.

A worker's processes are all given the same rows. Micro-batches are planned from lengths alone, so that every process
plans the same; each then runs its own, and of them holds the tokens that lie on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.backends.base import Projection, TokenRow, WorkerFacts
from sdpo_core.objectives.head import Head


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldStates:
    """Final hidden states that predict response tokens, of those tokens of a micro-batch that this process holds.

    `tokens`: their numbers among the micro-batch's response tokens, flattened in row order, ascending. `hidden` goes
    into a head that may be a share of the vocabulary: its gradient is summed over the processes that share it out.
    `replicated`: the same states for what every one of them computes alike; None unless asked for.
    """

    hidden: Float[Tensor, "held hidden"]
    tokens: Int[Tensor, " held"]
    replicated: Float[Tensor, "held hidden"] | None = None


@runtime_checkable
class RowModel(Protocol):
    """A causal model seen as rows of hidden states, or one process's share of it.

    `weights_version` counts how often this object's weights have changed. `value_head`: a linear map of the replicated
    states, or None. `counts_whole_rows`: whether this process reports sums that each process of a row's tokens knows.
    """

    device: torch.device
    weights_version: int
    value_head: torch.nn.Linear | None

    @property
    def counts_whole_rows(self) -> bool: ...

    @property
    def soft_cap(self) -> float | None: ...

    def projection_head(self, *, temperature: float) -> Head: ...

    def whole_projection(self) -> Projection:
        """The projection of all ids, on the CPU; a copy."""
        ...

    def head_of(self, projection: Projection, *, temperature: float) -> Head:
        """Another model's projection, cut as this model's own is."""
        ...

    def plan(self, rows: Sequence[TokenRow], *, max_tokens: int) -> list[list[int]]:
        """Indices of the rows of each micro-batch that this process runs; an empty one is run without rows."""
        ...

    def held_states(self, rows: Sequence[TokenRow], *, replicated: bool = False) -> HeldStates:
        """States of one micro-batch of `plan`, with gradient where that is on. All processes of a row call it."""
        ...

    def whole_rows(self, columns: Mapping[str, Tensor], *, held: Int[Tensor, " held"], total: int) -> dict[str, Tensor]:
        """Columns of all tokens of a micro-batch from those that the processes hold; gradient to one's own alone."""
        ...

    def gathered(
        self, columns: Mapping[str, Tensor], *, numbers: Int[Tensor, " held"], total: int
    ) -> dict[str, Tensor]:
        """Columns of all tokens of all micro-batches, on every process; constants. `numbers` says which are here."""
        ...

    def added(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Amounts of the processes that hold different rows or tokens, put together in a fixed order (`amounts`)."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Parameters by Hugging Face name on the CPU, tied ones once; a copy, whole on every process."""
        ...

    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        """parameter <- (1 - rate) * parameter + rate * weights; every process is given all of them, of all names."""
        ...

    def save_weights(self, folder: Path) -> None: ...

    def load_weights(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts: ...


@runtime_checkable
class ModelOptimizer(Protocol):
    """The optimizer of a `RowModel` and its value head. One step: zero, add gradients, `gradient_norm`, `step`."""

    def zero_gradients(self) -> None: ...

    def gradient_of(self, parameter: Tensor) -> Tensor:
        """Where a gradient that autograd does not see is added in place."""
        ...

    def gradient_norm(self) -> float:
        """The norm over all parameters on all processes; from now on gradients are complete."""
        ...

    def step(self, *, learning_rate: float) -> None:
        """Clip by the norm just taken, and change the weights."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
