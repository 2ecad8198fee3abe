"""What every per-token input must be: finite, and as long as the sequences it is made of."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import DataError


def check_finite(values: Mapping[str, Float[Tensor, " token"]], *, where: str) -> None:
    """DataError that names the first value which is NaN or infinite, and its token."""
    for name, value in values.items():
        is_finite = torch.isfinite(value.detach())
        if not is_finite.all():
            row = int((~is_finite).nonzero()[0])
            raise DataError(
                f"{where}: got {name} {float(value.detach()[row])} at token {row}, expected a finite number. "
                "Pass response tokens only; if this is one, look for the step where the weights diverged."
            )


def check_lengths(num_tokens: int, lengths: Sequence[int], *, where: str) -> None:
    """DataError unless the sequences' lengths, none negative, add up to the tokens."""
    if any(length < 0 for length in lengths) or sum(lengths) != num_tokens:
        raise DataError(
            f"{where}: got lengths that sum to {sum(lengths)} for {num_tokens} tokens, expected the tokens of each "
            "sequence, none negative."
        )
