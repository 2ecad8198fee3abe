"""AdamW of megatron-core over the shares of one model: gradients summed, clipped and stepped over all processes.

The loss brings its denominators along, so gradients are added up over the processes and never averaged.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdpo_core.backends.megatron.compat import cpu_guard
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.errors import DataError
from sdpo_core.specs import OptimizerSpec

# Steps taken: torch's AdamW counts them for each parameter, the fused optimizers of CUDA for each group.
_COUNT = "step"


class MegatronOptimizer:
    """One optimizer a process; weight decay spares vectors (norms)."""

    def __init__(self, model: MegatronModel, spec: OptimizerSpec) -> None:
        self._model, self._spec = model, spec
        layout = model.layout
        half = model.module.head_weight().dtype == torch.bfloat16
        with cpu_guard():
            self._parallel = DistributedDataParallel(
                model.module.config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    overlap_grad_reduce=False,
                    use_distributed_optimizer=layout.distributed_optimizer,
                ),
                model.module,
            )
            whole = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=spec.learning_rate,
                    weight_decay=spec.weight_decay,
                    adam_beta1=spec.beta1,
                    adam_beta2=spec.beta2,
                    clip_grad=spec.max_grad_norm,
                    bf16=half,
                    params_dtype=torch.bfloat16 if half else torch.float32,
                    use_distributed_optimizer=layout.distributed_optimizer,
                ),
                [self._parallel],
            )
        (self._optimizer,) = getattr(whole, "chained_optimizers", [whole])
        self._keeps_master = half
        self._norm = 0.0

    def zero_gradients(self) -> None:
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()

    def gradient_of(self, parameter: Tensor) -> Tensor:
        gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
        return gradient

    def gradient_norm(self) -> float:
        """Sums the gradients over the processes, those of norms over the parts of a sequence too; then their norm."""
        with cpu_guard():
            finalize_model_grads([self._parallel], None)
            self._optimizer.prepare_grads()
            self._norm = float(self._optimizer.get_grad_norm())
        return self._norm

    def step(self, *, learning_rate: float) -> None:
        # Megatron's own scheduler, which is not used here, would apply these factors; unapplied, norms decay.
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._spec.weight_decay * group["wd_mult"]
        with cpu_guard():
            clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self._spec.max_grad_norm, self._norm)
            self._optimizer.step_with_ready_grads()

    def save(self, folder: Path) -> None:
        """Moments, master weights where the model's are bfloat16, and the value head: by group, place and entry.

        Processes with the same share of the weights hold copies of all that, unless they share it out.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if self._model.layout.distributed_optimizer or self._model.groups.shared_weights.rank() == 0:
            save_file({name: value.cpu().clone() for name, value in self._tensors().items()}, self._file(folder))

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, at the layout that it was written at.

        Raises:
            DataError: it is of another layout or another model.
        """
        path = self._file(folder)
        if not path.is_file():
            raise DataError(
                f"optimizer {path}: got no such file, expected the state that this layout has saved. "
                "Resume at the layout of the checkpoint; weights alone load at any."
            )
        self._optimizer.optimizer.state.clear()
        found = load_file(path)
        with torch.no_grad():
            for name, value in self._fixed().items():
                value.copy_(_fitting(found, name, like=value, path=path))
        for number, group in enumerate(self._optimizer.optimizer.param_groups):
            group.pop(_COUNT, None)
            if f"{number}.{_COUNT}" in found:
                group[_COUNT] = int(found.pop(f"{number}.{_COUNT}"))
        for name, parameter in self._places().items():
            for key in [key for key in found if key.startswith(f"{name}/")]:
                entry = key.rsplit("/", 1)[1]
                value = found.pop(key)
                # Each parameter has a count of its own: a shared one would rise once a parameter.
                self._optimizer.optimizer.state[parameter][entry] = (
                    value.clone() if entry == _COUNT else value.to(parameter.device)
                )
        if found:
            raise DataError(
                f"optimizer {path}: got {sorted(found)[:3]} beside what this model has, expected no more. "
                "Resume with the spec that wrote it."
            )

    def _tensors(self) -> dict[str, Tensor]:
        moments = {
            f"{name}/{entry}": torch.as_tensor(value)
            for name, parameter in self._places().items()
            for entry, value in self._optimizer.optimizer.state.get(parameter, {}).items()
        }
        counts = {
            f"{number}.{_COUNT}": torch.as_tensor(group[_COUNT])
            for number, group in enumerate(self._optimizer.optimizer.param_groups)
            if _COUNT in group
        }
        return {**self._fixed(), **counts, **moments}

    def _places(self) -> dict[str, Any]:
        """What the inner optimizer steps, by group and place: megatron-core orders both alike at every start."""
        return {
            f"{number}.{place}": parameter
            for number, group in enumerate(self._optimizer.optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        }

    def _fixed(self) -> dict[str, Tensor]:
        """Weights that are no part of the saved model: master copies and the value head."""
        head = self._model.value_head
        values = {} if head is None else {f"value_head.{name}": value for name, value in head.named_parameters()}
        masters = {f"master.{name}": value for name, value in self._places().items()} if self._keeps_master else {}
        return {name: value.detach() for name, value in {**values, **masters}.items()}

    def _file(self, folder: Path) -> Path:
        layout, groups = self._model.layout, self._model.groups
        if not layout.distributed_optimizer:
            return folder / f"optimizer-{groups.tensor.rank():05d}-of-{layout.tensor:05d}.safetensors"
        share = f"{groups.shared_weights.rank():05d}-of-{groups.shared_weights.size():05d}"
        return folder / f"optimizer-{groups.tensor.rank():05d}-of-{layout.tensor:05d}-{share}.safetensors"


def _fitting(found: dict[str, Tensor], name: str, *, like: Tensor, path: Path) -> Tensor:
    value = found.pop(name, None)
    if value is None or value.shape != like.shape:
        shape = None if value is None else tuple(value.shape)
        raise DataError(
            f"optimizer {path}: got {shape} for {name}, expected {tuple(like.shape)}. "
            "Resume at the layout, and with the spec, that wrote it."
        )
    return value
