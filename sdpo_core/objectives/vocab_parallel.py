"""Collectives of a vocabulary that lies in equal shares on the processes of a group; without a group they do nothing.

Every process calls the same ones in the same order, whatever its data: what may raise is decided on their results.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup


def all_max(values: Float[Tensor, "*shape"], *, group: ProcessGroup | None) -> Float[Tensor, "*shape"]:
    """The largest of each place over the processes."""
    return _reduced(values, op=dist.ReduceOp.MAX, group=group)


def all_sum(values: Float[Tensor, "*shape"], *, group: ProcessGroup | None) -> Float[Tensor, "*shape"]:
    """The sum of each place over the processes."""
    return _reduced(values, op=dist.ReduceOp.SUM, group=group)


def gather_columns(values: Shaped[Tensor, "row k"], *, group: ProcessGroup | None) -> Shaped[Tensor, "row all"]:
    """The columns of all processes side by side, in rank order."""
    if group is None:
        return values
    rows, columns = values.shape
    gathered = values.new_empty(group.size() * rows, columns)
    dist.all_gather_single(gathered, values.contiguous(), group=group)
    return gathered.view(group.size(), rows, columns).transpose(0, 1).flatten(1)


def copy_to_group(hidden: Float[Tensor, "token hidden"], *, group: ProcessGroup | None) -> Tensor:
    """`hidden` itself; its gradient is the sum of what the processes find for their shares of the vocabulary."""
    if group is None:
        return hidden
    copied: Tensor = _CopyToGroup.apply(hidden, group)  # type: ignore[no-untyped-call]
    return copied


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_sum(gradient, group=ctx.group), None


def _reduced(
    values: Float[Tensor, "*shape"], *, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None
) -> Float[Tensor, "*shape"]:
    if group is None:
        return values
    result = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=group)
    return result
