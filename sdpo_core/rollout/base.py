"""What a rollout engine promises: ids in, ids out, one random stream a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sdpo_core.errors import DataError
from sdpo_core.records import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One response to sample. `stream_key` seeds its own stream, so it does not depend on its neighbours' draws."""

    prompt_ids: tuple[int, ...]
    stream_key: int

    def __post_init__(self) -> None:
        if len(self.prompt_ids) < 2:
            raise DataError(
                f"RolloutRequest: got {len(self.prompt_ids)} prompt ids, expected at least 2. "
                "Render the prompt with the chat template."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Plain sampling: no top-p and no top-k, so that log-probabilities are those of the whole vocabulary."""

    temperature: float
    max_response_tokens: int


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples one rollout a request, in the order of the requests, with the weights it holds now."""

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]: ...
