"""What the objectives' tests say often: float64 tensors, and the gradient of a value."""

from collections.abc import Sequence

import torch
from torch import Tensor


def double(values: Sequence[object], *, requires_grad: bool = False) -> Tensor:
    """A float64 tensor of (nested) numbers."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def gradient(value: Tensor, *, at: Tensor) -> Tensor:
    """The gradient of the sum of `value`; the graph stays for another."""
    return torch.autograd.grad(value.sum(), at, retain_graph=True)[0]


def depends(value: Tensor, *, on: Tensor) -> bool:
    """Whether the graph of `value` leads to `on`."""
    return torch.autograd.grad(value.sum(), on, retain_graph=True, allow_unused=True)[0] is not None
