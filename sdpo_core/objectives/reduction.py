"""How per-token losses of a mini-batch become one number."""

from collections.abc import Sequence

from sdpo_core.errors import DataError
from sdpo_core.specs import Reduction


def token_weights(lengths: Sequence[int], active: Sequence[bool], *, reduction: Reduction) -> list[float]:
    """Weight of every token of each sequence, such that loss = sum over sequences and tokens of weight * token loss.

    "token_mean" weighs all tokens alike, "sequence_mean" all sequences alike. Pass the whole mini-batch, of all ranks:
    the weights then hold in any micro-batch, and splitting changes nothing. Source: notation.md, "Reduction".

    Args:
        lengths: response tokens of each sequence.
        active: False where the sequence carries no loss (no teacher context). It leaves numerator and denominator, as
            does a sequence without tokens.
        reduction: the mean to take.

    Returns:
        One weight a sequence; over the tokens of the active sequences they sum to 1. All 0 if nothing is active: the
        caller then skips the optimizer step.

    Raises:
        DataError: lengths and active differ in number, or a length is negative.
    """
    if len(lengths) != len(active) or any(length < 0 for length in lengths):
        raise DataError(
            f"token_weights: got lengths {list(lengths)} with {len(active)} active flags, "
            "expected one flag for each length, and no negative length."
        )
    carried = [length if is_active else 0 for length, is_active in zip(lengths, active, strict=True)]
    if reduction == "token_mean":
        total = sum(carried)
        return [1.0 / total if length else 0.0 for length in carried]
    num_sequences = sum(1 for length in carried if length)
    return [1.0 / (num_sequences * length) if length else 0.0 for length in carried]
