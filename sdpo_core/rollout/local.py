"""The local engine: samples from a model in the same process, prompts run once and shared by their rollouts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.backends.base import Policy
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import SpecError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer


def load_engine(
    spec: CellSpec,
    *,
    policy: Policy,
    folder: Path,
    device: str,  # noqa: ARG001 -- the policy's
    scratch: Path | None = None,  # noqa: ARG001 -- it keeps no log
) -> "LocalEngine":
    """The engine that samples with the very weights `policy` trains."""
    if not isinstance(policy, ModelPolicy) or not isinstance(policy.model, HfModel):
        found = type(policy.model if isinstance(policy, ModelPolicy) else policy).__name__
        raise SpecError(
            f"load_engine: got a {found} for engine 'local', expected the HfModel of backend 'hf'. "
            "Choose an engine of that backend in the profile."
        )
    end_id = ChatTokenizer.load(folder).end_id
    return LocalEngine(policy.model, end_id=end_id, max_tokens=spec.training.microbatch_tokens)


def engine_of_folder(folder: Path, *, text: ChatTokenizer, max_tokens: int, threads: int, device: str) -> "LocalEngine":
    """An engine for weights that nobody trains, in float32."""
    torch.set_num_threads(threads)
    model = HfModel(folder, dtype=torch.float32, device=torch.device(device), valid_vocab=text.vocab_size)
    return LocalEngine(model, end_id=text.end_id, max_tokens=max_tokens)


class LocalEngine:
    """Samples by inverse transform: token t of a rollout is where its own t-th uniform number falls in the CDF."""

    def __init__(self, model: HfModel, *, end_id: int, max_tokens: int) -> None:
        self._model = model
        self._end_id = end_id
        self._max_tokens = max_tokens

    @torch.inference_mode()
    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        """Sample one rollout a request, in order."""
        rollouts: dict[int, Rollout] = {}
        for batch in self._batches(requests, sampling=sampling):
            for index, rollout in zip(batch, self._sample([requests[i] for i in batch], sampling), strict=True):
                rollouts[index] = rollout
        return tuple(rollouts[index] for index in range(len(requests)))

    def _batches(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> list[list[int]]:
        """Requests sorted by prompt, cut at the token budget."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids, i))
        batches: list[list[int]] = []
        tokens = 0
        for index in order:
            size = len(requests[index].prompt_ids) + sampling.max_response_tokens
            self._model.check_length(size, where="LocalEngine.generate")
            if not batches or tokens + size > self._max_tokens:
                batches.append([])
                tokens = 0
            batches[-1].append(index)
            tokens += size
        return batches

    def _sample(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Rollout]:
        prompts = sorted({request.prompt_ids for request in requests}, key=lambda prompt: (len(prompt), prompt))
        owner = {prompt: index for index, prompt in enumerate(prompts)}
        prefix = self._model.prefix(prompts, [owner[request.prompt_ids] for request in requests])
        uniforms = torch.tensor(
            np.stack([_uniforms(request.stream_key, sampling.max_response_tokens) for request in requests]),
            device=self._model.device,
        )
        ids, mask, positions = prefix.last_ids, prefix.mask, prefix.last_positions
        done = torch.zeros(len(requests), dtype=torch.bool, device=self._model.device)
        tokens, logps = [], []
        for step in range(sampling.max_response_tokens):
            hidden = self._model.extend(prefix, ids, mask=mask, positions=positions)
            logits = self._model.logits(hidden[:, -1]) / sampling.temperature
            ids, logp = _draw(logits, uniforms[:, step])
            tokens.append(ids)
            logps.append(logp)
            done |= ids == self._end_id
            if bool(done.all()):
                break
            ids, positions = ids[:, None], positions + 1
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
        return self._rollouts(requests, torch.stack(tokens, dim=1), torch.stack(logps, dim=1))

    def _rollouts(self, requests: Sequence[RolloutRequest], tokens: Tensor, logps: Tensor) -> list[Rollout]:
        rollouts = []
        for request, row, row_logps in zip(requests, tokens.tolist(), logps.tolist(), strict=True):
            stopped = self._end_id in row
            length = row.index(self._end_id) + 1 if stopped else len(row)
            rollouts.append(
                Rollout(
                    prompt_ids=request.prompt_ids,
                    response_ids=tuple(row[:length]),
                    sampling_logps=tuple(row_logps[:length]),
                    finish="stop" if stopped else "length",
                    weights_version=self._model.weights_version,
                )
            )
        return rollouts


def _uniforms(stream_key: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=stream_key)).random(count)


def _draw(logits: Float[Tensor, "row vocab"], uniforms: Float[Tensor, " row"]) -> tuple[Tensor, Float[Tensor, " row"]]:
    """Token ids at the given quantiles, and their log-probabilities."""
    logps = logits.log_softmax(dim=-1)
    cdf = logps.double().exp().cumsum(dim=-1)
    # Scaled to the row's own total, so that rounding cannot push a quantile past the last token.
    ids = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return ids, logps.gather(1, ids[:, None])[:, 0]
