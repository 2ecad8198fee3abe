"""Clipped policy loss of a token, and the importance weight of a token whose weights have moved on."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.errors import DataError, SpecError

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
    _check_finite({"logp": logp, "old_logp": old_logp, "advantage": advantage}, where="clipped_policy_loss")
    gain = advantage.detach()
    ratio = _log_ratio(logp, old_logp).exp()
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is None:
        return loss
    return torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)


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
    _check_finite({"logp": logp, "old_logp": old_logp}, where="importance_weight")
    return _log_ratio(logp.detach(), old_logp).exp().clamp(max=cap)


def _log_ratio(logp: Float[Tensor, " token"], old_logp: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    return (logp - old_logp.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _check_finite(values: Mapping[str, Float[Tensor, " token"]], *, where: str) -> None:
    for name, value in values.items():
        is_finite = torch.isfinite(value.detach())
        if not is_finite.all():
            row = int((~is_finite).nonzero()[0])
            raise DataError(
                f"{where}: got {name} {float(value.detach()[row])} at token {row}, expected a finite number. "
                "Pass response tokens only; if this is one, look for the step where the weights diverged."
            )
