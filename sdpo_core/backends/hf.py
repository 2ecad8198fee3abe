"""The `hf` backend: student and teacher as Hugging Face models on one device."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdpo_core.backends.base import (
    Objective,
    RowScores,
    TokenBatch,
    TokenRow,
    TrainRow,
    UpdateStats,
    WorkerFacts,
)
from sdpo_core.backends.hf_model import HfModel, microbatches, peak_memory_bytes
from sdpo_core.errors import CellError, DataError
from sdpo_core.objectives.support import bucket_logps_of_logits, top_ids
from sdpo_core.specs import CellSpec, OptimizerSpec
from sdpo_core.text import ChatTokenizer

OPTIMIZER_FILE = "optimizer.safetensors"


def load_policy(spec: CellSpec, *, folder: Path, device: str) -> "HfPolicy":
    """The student of a cell, with the weights in `folder`."""
    training = spec.training
    return HfPolicy(
        _load_model(spec, folder=folder, device=device),
        optimizer=spec.optimizer,
        temperature=training.temperature,
        max_tokens=training.microbatch_tokens,
    )


def load_scorer(spec: CellSpec, *, folder: Path, device: str) -> "HfScorer":
    """The teacher's model of a cell, with the weights in `folder`."""
    model = _load_model(spec, folder=folder, device=device)
    return HfScorer(model, temperature=spec.training.temperature, max_tokens=spec.training.microbatch_tokens)


def _load_model(spec: CellSpec, *, folder: Path, device: str) -> HfModel:
    vocab = ChatTokenizer.load(folder).vocab_size
    return HfModel(folder, dtype=getattr(torch, spec.dtype), device=torch.device(device), valid_vocab=vocab)


class HfScorer:
    """A model that scores given responses at given ids, without gradient."""

    def __init__(self, model: HfModel, *, temperature: float, max_tokens: int) -> None:
        self._model = model
        self._temperature = temperature
        self._max_tokens = max_tokens

    @torch.inference_mode()
    def tables(
        self, rows: Sequence[TokenRow], support_ids: Sequence[Int[np.ndarray, "_ k"]]
    ) -> tuple[Float[np.ndarray, "_ cell"], ...]:
        """For each row the log-probabilities of its ids and of the tail, float32, at the sampling temperature."""
        tables: dict[int, np.ndarray] = {}
        for batch in microbatches(rows, max_tokens=self._max_tokens):
            logits = response_logits(self._model, [rows[index] for index in batch])
            ids = torch.tensor(np.concatenate([support_ids[index] for index in batch]), device=self._model.device)
            table = bucket_logps_of_logits(logits, ids, temperature=self._temperature).cpu().numpy()
            lengths = [len(rows[index].response_ids) for index in batch]
            for index, part in zip(batch, np.split(table, np.cumsum(lengths)[:-1]), strict=True):
                tables[index] = part
        return tuple(tables[index] for index in range(len(rows)))

    def weights(self) -> dict[str, Tensor]:
        return self._model.weights()

    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        self._model.blend(weights, rate=rate)

    def save(self, folder: Path) -> None:
        self._model.save_weights(folder)

    def load(self, folder: Path) -> None:
        self._model.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self._model.facts()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self._model.device)


class HfPolicy:
    """The student: AdamW with clipping over one model; weight decay spares vectors (norms)."""

    def __init__(self, model: HfModel, *, optimizer: OptimizerSpec, temperature: float, max_tokens: int) -> None:
        self.model = model
        self._spec = optimizer
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._parameters = dict(model.model.named_parameters())
        groups = (
            {"params": [p for p in self._parameters.values() if p.dim() > 1], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self._parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        )
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
        )

    @torch.inference_mode()
    def score(self, rows: Sequence[TokenRow], *, top_k: int) -> tuple[RowScores, ...]:
        """Log-probabilities of each row's own tokens and the `top_k` ids the policy ranks highest (none for 0)."""
        scores: dict[int, RowScores] = {}
        for batch in microbatches(rows, max_tokens=self._max_tokens):
            logits = response_logits(self.model, [rows[index] for index in batch])
            logps = self._own_logps(logits, [rows[index] for index in batch]).cpu().numpy()
            ids = top_ids(logits, k=top_k).cpu().numpy() if top_k else np.zeros((len(logps), 0), dtype=np.int64)
            cuts = np.cumsum([len(rows[index].response_ids) for index in batch])[:-1]
            for index, row_logps, row_ids in zip(batch, np.split(logps, cuts), np.split(ids, cuts), strict=True):
                scores[index] = RowScores(logps=row_logps, support_ids=row_ids)
        return tuple(scores[index] for index in range(len(rows)))

    def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
        """One optimizer step on sum over tokens of weight x loss, accumulated over micro-batches.

        Raises:
            CellError: the gradient norm is not finite; the weights are left as they were.
        """
        self._optimizer.zero_grad(set_to_none=True)
        loss, sums = 0.0, dict[str, float]()
        for batch in microbatches([row.row for row in rows], max_tokens=self._max_tokens):
            part, part_sums = self._backward([rows[index] for index in batch], objective)
            loss += part
            for name, value in part_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._spec.max_grad_norm)
        if not torch.isfinite(norm):
            raise CellError(
                f"HfPolicy.update: got gradient norm {float(norm)} with loss {loss}, expected finite numbers. "
                "Lower the learning rate, or look at the last samples of the journal."
            )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.model.weights_version += 1
        return UpdateStats(loss=loss, grad_norm=float(norm), sums=sums)

    def _backward(self, rows: Sequence[TrainRow], objective: Objective) -> tuple[float, Mapping[str, float]]:
        logits = response_logits(self.model, [row.row for row in rows])
        batch = self._token_batch(rows, logits)
        weights = logits.new_tensor([row.weight for row in rows for _ in row.row.response_ids])
        losses = objective.token_losses(batch)
        total = (weights * losses.loss).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach()), losses.sums

    def _token_batch(self, rows: Sequence[TrainRow], logits: Float[Tensor, "token vocab"]) -> TokenBatch:
        def table(values: list[np.ndarray | None]) -> Tensor | None:
            present = [value for value in values if value is not None]
            if len(present) not in (0, len(rows)):
                raise DataError(
                    f"HfPolicy.update: got a field on {len(present)} of {len(rows)} rows, expected all or none. "
                    "An algorithm builds every row of a mini-batch alike."
                )
            return torch.tensor(np.concatenate(present), device=logits.device) if present else None

        logp = self._own_logps(logits, [row.row for row in rows])
        old = table([row.old_logps for row in rows])
        ids = table([row.support_ids for row in rows])
        return TokenBatch(
            logp=logp,
            old_logp=logp.detach() if old is None else old,
            advantage=table([row.advantages for row in rows]),
            student_logp=None if ids is None else bucket_logps_of_logits(logits, ids, temperature=self._temperature),
            teacher_logp=table([row.teacher_logps for row in rows]),
        )

    def _own_logps(self, logits: Float[Tensor, "token vocab"], rows: Sequence[TokenRow]) -> Float[Tensor, " token"]:
        """Log-probabilities of the responses' own tokens."""
        own = torch.tensor([token for row in rows for token in row.response_ids], device=logits.device)
        return bucket_logps_of_logits(logits, own[:, None], temperature=self._temperature)[:, 0]

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def save(self, folder: Path) -> None:
        """Weights and optimizer state, as safetensors."""
        self.model.save_weights(folder)
        tensors = {
            f"{name}/{key}": torch.as_tensor(value).cpu().clone()
            for name, parameter in self._parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }
        save_file(tensors, folder / OPTIMIZER_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.model.load_weights(folder)
        self._optimizer.state.clear()
        for key, value in load_file(folder / OPTIMIZER_FILE).items():
            name, entry = key.rsplit("/", 1)
            state = self._optimizer.state[self._parameters[name]]
            state[entry] = value if entry == "step" else value.to(self.model.device)

    def load_weights(self, folder: Path) -> None:
        """Weights only: to evaluate an earlier step."""
        self.model.load_weights(folder)

    def facts(self) -> WorkerFacts:
        return self.model.facts()

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.model.device)


def response_logits(model: HfModel, rows: Sequence[TokenRow]) -> Float[Tensor, "token vocab"]:
    """Logits that predict the response tokens, rows flattened in order, padded vocabulary cut off."""
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    model.check_length(longest, where="response_logits")
    return model.logits(model.response_states(rows))
