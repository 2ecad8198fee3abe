"""Policy losses of a token by its own ratio, and the importance weight of a token whose weights have moved on.

Source: notation.md, "Policy loss". Losses by the ratio of the whole sequence: `sequence_policy.py`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import SpecError
from sdpo_core.objectives.inputs import check_finite

# Bound of the log-ratio before its exponential: e^20 is finite in float32 and bfloat16, and far outside every clip.
LOG_RATIO_BOUND = 20.0


def clipped_policy_loss(
    logp: Float[Tensor, " token"],
    old_logp: Float[Tensor, " token"],
    advantage: Float[Tensor, " token"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Float[Tensor, " token"]:
    """Pessimistic surrogate of each token; the gradient reaches `logp` only.

    With u = p / p_old: max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high)); where A < 0 at most -A dual_clip.
    The gradient is -A u, and 0 where a clip binds. Source: notation.md, "Policy loss".

    Args:
        logp: [token] student log-probability of the sampled token, in nats.
        old_logp: [token] the same under the weights before the step's first update.
        advantage: [token] the advantage of the token's rollout.
        clip_low: in [0, 1].
        clip_high: at least 0.
        dual_clip: above 1, or None for no cap.

    Raises:
        SpecError: a clip out of range.
        DataError: an input is not finite.
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise SpecError(
            f"clipped_policy_loss: got clips {clip_low} and {clip_high}, expected clip_low 0 to 1 and clip_high >= 0."
        )
    if dual_clip is not None and not dual_clip > 1.0:
        raise SpecError(f"clipped_policy_loss: got dual_clip {dual_clip}, expected above 1, or None for no cap.")
    check_finite({"logp": logp, "old_logp": old_logp, "advantage": advantage}, where="clipped_policy_loss")
    gain = advantage.detach()
    ratio = log_ratio(logp, old_logp).exp()
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)


def soft_gate_policy_loss(
    logp: Float[Tensor, " token"],
    old_logp: Float[Tensor, " token"],
    advantage: Float[Tensor, " token"],
    *,
    sign_of: Float[Tensor, " token"],
    temperature_positive: float,
    temperature_negative: float,
) -> Float[Tensor, " token"]:
    """SAPO's surrogate of each token: -A f(u), a sigmoid gate in the place of the clip.

    f(u) = (4 / tau) sigmoid(tau (u - 1)) has slope 1 at u = 1 and falls off smoothly on both sides, faster for a larger
    tau; tau is `temperature_positive` where `sign_of` is above 0. The gradient is -A u f'(u), with f'(u) =
    4 s (1 - s), s the sigmoid; it reaches `logp` only. Source: notation.md, "Policy loss".

    Args:
        logp: [token] student log-probability of the sampled token, in nats.
        old_logp: [token] the same under the weights before the step's first update.
        advantage: [token] what the token is pushed by, with every added term.
        sign_of: [token] the task's advantage: a term added to `advantage` must not move tokens of one response from
            one temperature to the other.
        temperature_positive: above 0.
        temperature_negative: above 0.

    Raises:
        SpecError: a temperature is not positive.
        DataError: an input is not finite.
    """
    if not (temperature_positive > 0.0 and temperature_negative > 0.0):
        raise SpecError(
            f"soft_gate_policy_loss: got temperatures {temperature_positive} and {temperature_negative}, "
            "expected positive numbers."
        )
    check_finite(
        {"logp": logp, "old_logp": old_logp, "advantage": advantage, "sign_of": sign_of}, where="soft_gate_policy_loss"
    )
    excess = log_ratio(logp, old_logp).exp() - 1.0
    temperature = torch.full_like(logp, temperature_negative).masked_fill(sign_of > 0, temperature_positive)
    at = temperature * excess
    # A sigmoid near 1 has its slope s (1 - s) from the rounding of 1 - s.
    gate = torch.where(at > 0, 1.0 - torch.sigmoid(-at), torch.sigmoid(at))
    return -advantage.detach() * 4.0 / temperature * gate


def importance_weight(
    logp: Float[Tensor, " token"], old_logp: Float[Tensor, " token"], *, cap: float
) -> Float[Tensor, " token"]:
    """min(p / p_old, cap) of each token, without gradient: what the divergence of an off-policy token counts.

    Raises:
        SpecError: cap is not positive.
        DataError: an input is not finite.
    """
    if not cap > 0.0:
        raise SpecError(f"importance_weight: got cap {cap}, expected a positive number.")
    check_finite({"logp": logp, "old_logp": old_logp}, where="importance_weight")
    return log_ratio(logp.detach(), old_logp).exp().clamp(max=cap)


def log_ratio(logp: Float[Tensor, " token"], old_logp: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """log(p / p_old) of each token, held within 20; where it is held the gradient is 0."""
    return (logp - old_logp.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
