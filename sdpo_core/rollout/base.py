"""What a rollout engine promises: ids in, ids out, one random stream a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sdpo_core.records import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One response to sample. `stream_key` seeds its own stream, so it does not depend on its neighbours' draws."""

    prompt_ids: tuple[int, ...]
    stream_key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Plain sampling: no top-p and no top-k, so that log-probabilities are those of the whole vocabulary."""

    temperature: float
    max_response_tokens: int


class RolloutEngine(Protocol):
    """Samples one rollout a request, in the order of the requests, with the weights it holds now."""

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]: ...
