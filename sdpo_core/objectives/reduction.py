"""How per-token losses of a mini-batch become one number."""

from collections.abc import Sequence

from sdpo_core.algorithm_specs import Reduction
from sdpo_core.errors import DataError


def token_weights(lengths: Sequence[int], active: Sequence[bool], *, reduction: Reduction) -> list[float]:
    """Weight of every token of each sequence, such that loss = sum over sequences and tokens of weight * token loss.

    "token_mean" weighs all active tokens alike, "sequence_mean" all active sequences alike; "sequence_mean_of_all" does
    so with every sequence in the denominator, the inactive and the empty ones included.

    Pass the whole of what the denominators count, of all ranks: a mini-batch, or all sequences of the step, whose
    weights are then dealt to its mini-batches. They hold in any micro-batch, and splitting changes nothing. With the
    step's denominators the mini-batches' losses add up to the step's mean. Source: notation.md, "Reduction".

    Args:
        lengths: response tokens of each sequence.
        active: False where the sequence carries no loss (no teacher context). It leaves the numerator and, but for
            "sequence_mean_of_all", the denominator, as does a sequence without tokens.
        reduction: the mean to take.

    Returns:
        One weight a sequence; over the tokens of the active sequences they sum to 1 ("sequence_mean_of_all": to their
        share of all). All 0 if nothing is active: the caller then skips the optimizer step.

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
    is_of_all = reduction == "sequence_mean_of_all"
    num_sequences = len(lengths) if is_of_all else sum(1 for length in carried if length)
    return [1.0 / (num_sequences * length) if length else 0.0 for length in carried]
