"""What the objectives' tests say often: float64 tensors, tables of given logits, and the gradient of a value."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sdpo_core.objectives.fused import tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest


def double(values: Sequence[object], *, requires_grad: bool = False) -> Tensor:
    """A float64 tensor of (nested) numbers."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def table_of_logits(logits: Tensor, ids: Tensor, *, temperature: float) -> Tensor:
    """The table of finite logits, differentiable in them: they are the hidden states of a head that is the identity."""
    head = Head(weight=torch.eye(logits.shape[1], dtype=logits.dtype), temperature=temperature, vocab=logits.shape[1])
    own = torch.zeros(len(logits), dtype=torch.int64)
    found = tables(logits, head, TableRequest(own_ids=own, support_ids=ids)).support_logp
    assert found is not None
    return found


def gradient(value: Tensor, *, at: Tensor) -> Tensor:
    """The gradient of the sum of `value`; the graph stays for another."""
    return torch.autograd.grad(value.sum(), at, retain_graph=True)[0]


def depends(value: Tensor, *, on: Tensor) -> bool:
    """Whether the graph of `value` leads to `on`."""
    return torch.autograd.grad(value.sum(), on, retain_graph=True, allow_unused=True)[0] is not None


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest distance of a row (or of a number, in a list of numbers) from the expected one, over its length."""
    rows, targets = (value.detach().double().reshape(len(value), -1) for value in (found, expected))
    distance, length = (rows - targets).norm(dim=1), targets.norm(dim=1)
    # 0 where both are 0; infinite where only the expected one is.
    return float(torch.where(distance == 0, 0.0, distance / length).max())
