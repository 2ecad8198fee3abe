"""Policy loss by the ratio of the whole sequence, with each token's own advantage.

Source: notation.md, "Sequence policy loss".
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.inputs import check_finite
from sdpo_core.objectives.policy_loss import LOG_RATIO_BOUND


def sequence_policy_loss(
    logp: Float[Tensor, " token"],
    old_logp: Float[Tensor, " token"],
    advantage: Float[Tensor, " token"],
    sequence: Int[Tensor, " token"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " token"]:
    """GSPO in token form: the sequence's ratio as value, the token's own log-probability for the gradient.

    With U = exp(mean over the sequence of log(p / p_old)), a constant, and u = U p / sg(p): max(-A u, -A clip(u,
    1 - clip_low, 1 + clip_high)). The gradient of a token is -A U with its own A, and 0 where the clip of U binds. With
    one A for all its tokens this is GSPO; differentiating U itself would give every token the mean A of its sequence,
    and a term that differs by token (distillation) would be averaged away.

    Args:
        logp: [token] student log-probability of the sampled token, in nats; every token of each sequence.
        old_logp: [token] the same under the weights before the step's first update.
        advantage: [token] the advantage of each token.
        sequence: [token] number of the token's sequence, from 0.
        clip_low: in [0, 1].
        clip_high: at least 0.

    Raises:
        SpecError: a clip out of range.
        DataError: an input is not finite, or a sequence number is negative.
    """
    gaps = sequence_log_ratio(logp, old_logp, sequence)
    return held_ratio_policy_loss(logp, gaps, advantage, clip_low=clip_low, clip_high=clip_high)


def sequence_log_ratio(
    logp: Float[Tensor, " token"], old_logp: Float[Tensor, " token"], sequence: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    """Mean of log(p / p_old) over each token's sequence, held within 20, without gradient.

    Where the tokens of one sequence lie in several processes, exchange the log-probabilities first.

    Raises:
        DataError: an input is not finite, or a sequence number is negative.
    """
    check_finite({"logp": logp, "old_logp": old_logp}, where="sequence_log_ratio")
    if (sequence < 0).any():
        raise DataError(f"sequence_log_ratio: got sequence number {int(sequence.min())}, expected 0 or more.")
    gap = logp.detach().double() - old_logp.detach().double()
    size = int(sequence.max()) + 1 if len(sequence) else 0
    total = gap.new_zeros(size).index_add_(0, sequence, gap)
    count = gap.new_zeros(size).index_add_(0, sequence, torch.ones_like(gap))
    return (total / count)[sequence].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).to(logp.dtype)


def held_ratio_policy_loss(
    logp: Float[Tensor, " token"],
    log_ratio: Float[Tensor, " token"],
    advantage: Float[Tensor, " token"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, " token"]:
    """`sequence_policy_loss` with the sequences' log-ratios given, for tokens that are not the whole sequence."""
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise SpecError(
            f"sequence_policy_loss: got clips {clip_low} and {clip_high}, expected clip_low 0 to 1 and clip_high >= 0."
        )
    check_finite({"logp": logp, "log_ratio": log_ratio, "advantage": advantage}, where="sequence_policy_loss")
    gain = advantage.detach()
    # exp(0) is exactly 1: the value is U, the slope U times that of log p.
    ratio = log_ratio.detach().exp() * (logp - logp.detach()).exp()
    return torch.maximum(-gain * ratio, -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
