"""The `megatron` backend: student and teacher on megatron-core, each on the processes of its layout."""

from collections.abc import Sequence
from pathlib import Path

import torch

from sdpo_core.backends.base import WeightsAt
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.backends.megatron.optimizer import MegatronOptimizer
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer


def load_policy(spec: CellSpec, *, folder: Path, device: str) -> ModelPolicy:
    """This process's share of a cell's student, with the weights in `folder`."""
    model = _load_model(spec, spec.layout, folder=folder, device=device, has_value_head="value" in spec.traits)
    training = spec.training
    return ModelPolicy(
        model,
        MegatronOptimizer(model, spec.optimizer),
        temperature=training.temperature,
        max_tokens=training.microbatch_tokens,
    )


def load_scorer(spec: CellSpec, *, at: WeightsAt, device: str, shares: Sequence[float]) -> ModelScorer:
    """This process's share of a scoring model of a cell: one copy of the weights a share of the mixture."""
    models = [_load_model(spec, spec.scorer_layout, folder=at.folder, device=device) for _ in shares]
    if at.weights is not None:
        for model in models:
            model.load_weights(at.weights)
    parts = [Part(model=model, share=share) for model, share in zip(models, shares, strict=True)]
    return ModelScorer(parts, temperature=spec.training.temperature, max_tokens=spec.training.microbatch_tokens)


def _load_model(
    spec: CellSpec, layout: LayoutSpec, *, folder: Path, device: str, has_value_head: bool = False
) -> MegatronModel:
    return MegatronModel(
        folder,
        layout=layout,
        dtype=getattr(torch, spec.dtype),
        device=torch.device(device),
        valid_vocab=ChatTokenizer.load(folder).vocab_size,
        has_value_head=has_value_head,
    )
