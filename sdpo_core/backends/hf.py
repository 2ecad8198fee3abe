"""The `hf` backend: student and teacher as Hugging Face models on one device."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdpo_core.backends.base import WeightsAt
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.specs import CellSpec, OptimizerSpec
from sdpo_core.text import ChatTokenizer

OPTIMIZER_FILE = "optimizer.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"


def load_policy(spec: CellSpec, *, folder: Path, device: str) -> ModelPolicy:
    """The student of a cell, with the weights in `folder`."""
    model, training = load_model(spec, folder=folder, device=device), spec.training
    if "value" in spec.traits:
        model.add_value_head()
    return hf_policy(model, spec.optimizer, temperature=training.temperature, max_tokens=training.microbatch_tokens)


def load_scorer(spec: CellSpec, *, at: WeightsAt, device: str, shares: Sequence[float]) -> ModelScorer:
    """A scoring model of a cell: one copy of the weights a share."""
    models = [load_model(spec, folder=at.folder, device=device) for _ in shares]
    if at.weights is not None:
        for model in models:
            model.load_weights(at.weights)
    parts = [Part(model=model, share=share) for model, share in zip(models, shares, strict=True)]
    return ModelScorer(parts, temperature=spec.training.temperature, max_tokens=spec.training.microbatch_tokens)


def load_model(spec: CellSpec, *, folder: Path, device: str) -> HfModel:
    """The model of a Hugging Face folder in the cell's dtype."""
    vocab = ChatTokenizer.load(folder).vocab_size
    return HfModel(folder, dtype=getattr(torch, spec.dtype), device=torch.device(device), valid_vocab=vocab)


def hf_policy(model: HfModel, optimizer: OptimizerSpec, *, temperature: float, max_tokens: int) -> ModelPolicy:
    """The student on `model`, with its value head if it has one."""
    return ModelPolicy(model, HfOptimizer(model, optimizer), temperature=temperature, max_tokens=max_tokens)


class HfOptimizer:
    """AdamW with clipping over the parameters of one model; weight decay spares vectors (norms)."""

    def __init__(self, model: HfModel, spec: OptimizerSpec) -> None:
        self._spec = spec
        self._model = model
        self.parameters = dict(model.model.named_parameters())
        if model.value_head is not None:
            self.parameters |= {f"value_head.{name}": value for name, value in model.value_head.named_parameters()}
        groups = (
            {"params": [p for p in self.parameters.values() if p.dim() > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in self.parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        )
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=spec.learning_rate, betas=(spec.beta1, spec.beta2)
        )
        self._norm = torch.zeros(())

    def zero_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def gradient_of(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def gradient_norm(self) -> float:
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients)
        return float(self._norm)

    def step(self, *, learning_rate: float) -> None:
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._spec.max_grad_norm, self._norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def save(self, folder: Path) -> None:
        """Moments by name of the parameter, and the value head, whose weights are no part of the model."""
        if self._model.value_head is not None:
            save_file(self._model.value_head.state_dict(), folder / VALUE_HEAD_FILE)
        tensors = {
            f"{name}/{key}": torch.as_tensor(value).cpu().clone()
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        if self._model.value_head is not None:
            self._model.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
        self._optimizer.state.clear()
        for key, value in load_file(folder / OPTIMIZER_FILE).items():
            name, entry = key.rsplit("/", 1)
            state = self._optimizer.state[self.parameters[name]]
            state[entry] = value if entry == "step" else value.to(self._model.device)
