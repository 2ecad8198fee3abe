"""What megatron-core needs on a machine without CUDA, where its tests run. With CUDA nothing here changes anything.

Its code asks CUDA for a device in places that no setting reaches. Dropout is 0 in every model here, so that no random
stream is ever drawn from.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Let the layers be built and run where this process is; may be called again."""
    # The public switch for a tracker that forks nothing: the right one while dropout is 0, with CUDA too.
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    if torch.cuda.is_available():
        return
    # Used as `device=` by the mappings, the rotary table and the gradient buffers.
    torch.cuda.current_device = _cpu_device
    # Recomputation keeps the random state of CUDA beside that of the CPU; here they are one.
    random._get_cuda_rng_state = _random_state
    random._set_cuda_rng_state = _set_random_state


def cpu_guard() -> AbstractContextManager[None]:
    """Surrounds what allocates with device="cuda": building gradient buffers and optimizer, finalising, stepping."""
    return nullcontext() if torch.cuda.is_available() else _CudaOnCpu()


class _CudaOnCpu(TorchFunctionMode):
    """Answers a factory of CUDA tensors with CPU ones, and names CPU tensors as the clipping expects them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        # Gradients are sorted by Tensor.type() == "torch.cuda.FloatTensor".
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _cpu_device() -> Any:
    return torch.device("cpu")


def _random_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_random_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)
