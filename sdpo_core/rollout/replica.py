"""The replica engine: samples from a Hugging Face copy of weights that another backend trains.

Every process of the student holds a copy and samples its part of the rollouts. The copy follows at the next call after
the weights have changed; each time the canary has to agree.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float

from sdpo_core.backends.base import Policy, TokenRow
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.local import LocalEngine
from sdpo_core.rollout.publish import TOLERANCES, canary_rows, check_canary, publish
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer


def load_engine(
    spec: CellSpec,
    *,
    policy: Policy,
    folder: Path,
    device: str,
    scratch: Path | None = None,  # noqa: ARG001 -- it keeps no log
) -> "ReplicaEngine":
    """An engine that holds a copy of the weights `policy` trains."""
    text, dtype = ChatTokenizer.load(folder), getattr(torch, spec.dtype)
    model = HfModel(folder, dtype=dtype, device=torch.device(device), valid_vocab=text.vocab_size)
    return ReplicaEngine(
        policy,
        model,
        text=text,
        temperature=spec.training.temperature,
        max_tokens=spec.training.microbatch_tokens,
        tolerance=TOLERANCES[spec.dtype],
    )


class ReplicaEngine:
    """Samples with the policy's weights of the moment. `temperature`: that of the policy's own scores."""

    def __init__(
        self,
        policy: Policy,
        model: HfModel,
        *,
        text: ChatTokenizer,
        temperature: float,
        max_tokens: int,
        tolerance: float,
    ) -> None:
        self._policy = policy
        self._model = model
        self._vocab = text.vocab_size
        self._temperature = temperature
        self._tolerance = tolerance
        self._engine = LocalEngine(model, end_id=text.end_id, max_tokens=max_tokens)
        self._version: int | None = None

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        """One rollout a request, in order; all processes of the student call it and have all of them."""
        if not requests:
            return ()
        if self._version != self._policy.weights_version():
            self._follow([request.prompt_ids for request in requests])
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        own = self._engine.generate(requests[rank::size], sampling=sampling)
        parts: list[tuple[Rollout, ...]] = [own] * size
        if size > 1:
            dist.all_gather_object(parts, own)
        return tuple(parts[index % size][index // size] for index in range(len(requests)))

    def _follow(self, prompts: Sequence[tuple[int, ...]]) -> None:
        publication = publish(self._policy, canary=canary_rows(prompts, vocab=self._vocab))
        self._model.blend(publication.weights, rate=1.0)
        self._model.weights_version = publication.version
        with torch.inference_mode():
            found = [self._logps(row) for row in publication.canary]
        check_canary(publication, found, tolerance=self._tolerance, where="replica engine")
        self._version = publication.version

    def _logps(self, row: TokenRow) -> Float[np.ndarray, " token"]:
        logits = self._model.logits(self._model.response_states([row])) / self._temperature
        own = torch.tensor(row.response_ids, device=logits.device)
        logps: np.ndarray = logits.log_softmax(dim=1).gather(1, own[:, None])[:, 0].float().cpu().numpy()
        return logps
