"""Loss of the value head. Source: notation.md, "Value loss"."""

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import SpecError
from sdpo_core.objectives.inputs import check_finite


def value_loss(
    value: Float[Tensor, " token"],
    old_value: Float[Tensor, " token"],
    returns: Float[Tensor, " token"],
    *,
    clip: float | None,
) -> Float[Tensor, " token"]:
    """Half the squared error of each token's value, pessimistic about moves of more than `clip`.

    The larger of (b - R)^2 / 2 and (b_old + clamp(b - b_old, -clip, clip) - R)^2 / 2. The gradient is b - R, and 0
    where the second is larger; it reaches `value` only.

    Args:
        value: [token] the value now.
        old_value: [token] the value before the step's first update.
        returns: [token] the target.
        clip: above 0, or None for the plain squared error.

    Raises:
        SpecError: clip is not positive.
        DataError: an input is not finite.
    """
    if clip is not None and not clip > 0.0:
        raise SpecError(f"value_loss: got clip {clip}, expected a positive number, or None.")
    check_finite({"value": value, "old_value": old_value, "returns": returns}, where="value_loss")
    target = returns.detach()
    loss = (value - target).square() / 2
    if clip is None:
        return loss
    near = old_value.detach() + (value - old_value.detach()).clamp(-clip, clip)
    return torch.maximum(loss, (near - target).square() / 2)
