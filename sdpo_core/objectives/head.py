"""The output projection of a model, or one process's share of it: what turns hidden states into logits.

A share holds whole rows of the weight; the maths is over the valid ids of all shares.

Source: notation.md, "Fused head".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.errors import SpecError

# Rows of the weight in one product on a CPU: a product of few tokens with all rows at once takes 10 to 20 % longer.
CPU_ROWS = 512
# Elsewhere a half-precision weight is widened this many numbers at a time: 64 MiB in float32.
WIDENED_NUMBERS = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Logits z = cap(scale * (h W^T + b)) / temperature over the valid ids; cap(x) = soft_cap * tanh(x / soft_cap).

    Attributes:
        weight: rows of the projection; in a group those of the ids rank * shard to rank * shard + shard - 1.
        temperature: divides the logits; the student and the teacher share it.
        vocab: valid ids of all processes together. Rows from here on are padding: never read, gradient 0.
        bias: added before the scale, or None.
        logit_scale: multiplies the projection.
        soft_cap: bound of the scaled projection, or None.
        group: processes that hold the vocabulary in equal shares, in rank order; None: one process holds all.
    """

    weight: Float[Tensor, "shard hidden"]
    temperature: float
    vocab: int
    bias: Float[Tensor, " shard"] | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        faults = []
        if not 0.0 < self.temperature < math.inf:
            faults.append(f"temperature {self.temperature}, expected a positive number")
        rows = len(self.weight) * (self.group.size() if self.group else 1)
        if not 1 <= self.vocab <= rows:
            faults.append(f"vocab {self.vocab}, expected 1 to {rows}, the rows of the weight")
        if self.soft_cap is not None and not 0.0 < self.soft_cap < math.inf:
            faults.append(f"soft_cap {self.soft_cap}, expected a positive number or None")
        if self.logit_scale == 0.0 or not math.isfinite(self.logit_scale):
            faults.append(f"logit_scale {self.logit_scale}, expected a number other than 0")
        if faults:
            raise SpecError(f"Head: got {'; got '.join(faults)}. Take these from the model's configuration.")

    @property
    def first(self) -> int:
        """The id of row 0."""
        return len(self.weight) * (self.group.rank() if self.group else 0)

    @property
    def width(self) -> int:
        """Rows that are valid ids; 0 where a process holds padding only."""
        return max(0, min(len(self.weight), self.vocab - self.first))

    @property
    def slope(self) -> float:
        """What the chain rule through scale and temperature multiplies a gradient with (the cap aside)."""
        return self.logit_scale / self.temperature

    @property
    def cap(self) -> float | None:
        """Bound of the logits."""
        return None if self.soft_cap is None else self.soft_cap / self.temperature

    def tile(self, columns: slice, *, dtype: torch.dtype) -> "Head":
        """Some of the rows that are valid ids, as a head of its own in `dtype`."""
        return replace(
            self,
            weight=self.weight.detach()[columns].to(dtype),
            bias=None if self.bias is None else self.bias.detach()[columns].to(dtype),
            vocab=columns.stop - columns.start,
            group=None,
        )


def compute_dtype(hidden: Float[Tensor, "token hidden"], head: Head) -> torch.dtype:
    """The dtype of the projection and of all that follows: float32, or float64 where a side is.

    Bfloat16 logits would carry an error of up to 0.4 % of their size, which is larger than a tail of 1e-3.
    """
    return torch.promote_types(torch.promote_types(hidden.dtype, head.weight.dtype), torch.float32)


def project(hidden: Float[Tensor, "row hidden"], head: Head, *, first: int, out: Float[Tensor, "row column"]) -> None:
    """Write the logits of the rows first, first + 1, ... of the weight to `out`, whose dtype is that of `hidden`."""
    for columns, weight in _parts(head, first=first, stop=first + out.shape[1], dtype=out.dtype):
        target = out[:, columns.start - first : columns.stop - first]
        alpha = head.slope if head.soft_cap is None else head.logit_scale
        if head.bias is not None:
            target.copy_(head.bias[columns].to(out.dtype) * alpha)
        target.addmm_(hidden, weight.T, beta=0.0 if head.bias is None else 1.0, alpha=alpha)
    if head.soft_cap is not None:
        out.div_(head.soft_cap).tanh_().mul_(head.soft_cap / head.temperature)


def hidden_slope(slope: Float[Tensor, "row column"], head: Head) -> Float[Tensor, "row hidden"]:
    """The gradient on the hidden states, from that on the logits of this process's valid ids."""
    result = slope.new_zeros(len(slope), head.weight.shape[1])
    for columns, weight in _parts(head, first=0, stop=head.width, dtype=slope.dtype):
        result.addmm_(slope[:, columns], weight, alpha=head.slope)
    return result


def _parts(head: Head, *, first: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Rows first to stop of the weight in `dtype`, in parts that suit the device."""
    step = max(1, stop - first)
    if head.weight.device.type == "cpu":
        step = CPU_ROWS
    elif head.weight.dtype != dtype:
        step = max(1, WIDENED_NUMBERS // head.weight.shape[1])
    for start in range(first, stop, step):
        columns = slice(start, min(start + step, stop))
        yield columns, head.weight[columns].to(dtype)
