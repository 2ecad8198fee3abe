"""Terms of a reverse KL that only the sampled tokens' log-probabilities are known of.

Source: notation.md, "Constructions".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.objectives.inputs import check_finite
from sdpo_core.objectives.policy_loss import LOG_RATIO_BOUND


@dataclass(frozen=True, kw_only=True, slots=True)
class KlEstimates:
    """Estimates of KL(p || reference) at each token sampled from p, in nats, without gradient.

    `k1`, the log-ratio, has the KL as its mean and either sign; `k2`, half its square, is biased; `k3` has the KL as
    its mean and is at least 0. For reports: as a loss or an advantage each of them trains something else
    (notation.md, "Constructions").
    """

    k1: Float[Tensor, " token"]
    k2: Float[Tensor, " token"]
    k3: Float[Tensor, " token"]


def score_function_loss(logp: Float[Tensor, " token"], signal: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """sg(signal) log p(y) of each token: its gradient is signal times that of log p(y).

    With signal = c (log p(y) - log q(y)) and y sampled from p the expected gradient is c times that of KL(p || q).
    Differentiating the log-ratio itself instead has expected gradient 0. The value means nothing; the signal's does.

    Args:
        logp: [token] student log-probability of the sampled token, in nats.
        signal: [token] what is descended, its coefficient included.

    Raises:
        DataError: an input is not finite.
    """
    check_finite({"logp": logp, "signal": signal}, where="score_function_loss")
    return signal.detach() * logp


def kl_estimates(logp: Float[Tensor, " token"], reference_logp: Float[Tensor, " token"]) -> KlEstimates:
    """Three estimates of KL(p || reference) from the sampled tokens; the exponent of `k3` is held at 20.

    Raises:
        DataError: an input is not finite.
    """
    check_finite({"logp": logp, "reference_logp": reference_logp}, where="kl_estimates")
    gap = logp.detach().double() - reference_logp.detach().double()
    # expm1 keeps e^-r - 1 + r from being the rounding of 1 where r is small: of 4e7 values none was negative.
    excess = torch.expm1((-gap).clamp(max=LOG_RATIO_BOUND)) + gap
    return KlEstimates(k1=gap.to(logp.dtype), k2=(gap.square() / 2).to(logp.dtype), k3=excess.to(logp.dtype))
