"""REINFORCE++: the score as a reward of the last token, discounted back, whitened over the step's tokens.

With a baseline: the score minus its group's mean, whitened alike.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.algorithm_specs import ReinforcePlusPlusBaselineSpec, ReinforcePlusPlusSpec
from sdpo_core.algorithms.grpo import spread
from sdpo_core.algorithms.objective import ClippedSurrogate
from sdpo_core.algorithms.policy_gradient import Credited, PolicyGradient, Rewards
from sdpo_core.objectives.advantages import discounted_returns, group_advantages, whiten


def reinforce_pp(spec: ReinforcePlusPlusSpec) -> PolicyGradient:
    """REINFORCE++ as declared."""

    def credit(rewards: Rewards) -> Credited:
        returns = discounted_returns(last_token_rewards(rewards), rewards.lengths, discount=spec.discount)
        advantages = whiten(returns)
        return Credited(advantages=advantages, task_advantages=_first_of_each(advantages, rewards.lengths))

    return PolicyGradient(
        spec, credit=credit, surrogate=ClippedSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high)
    )


def reinforce_pp_baseline(spec: ReinforcePlusPlusBaselineSpec) -> PolicyGradient:
    """REINFORCE++ with a group baseline, as declared."""
    return PolicyGradient(
        spec, credit=_baseline_credit, surrogate=ClippedSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high)
    )


def last_token_rewards(rewards: Rewards) -> Float[Tensor, " token"]:
    """Each rollout's score at its last token, 0 at the others."""
    spread_out = torch.zeros(sum(rewards.lengths), dtype=rewards.scores.dtype)
    spread_out[torch.tensor(list(rewards.lengths)).cumsum(dim=0) - 1] = rewards.scores.flatten()
    return spread_out


def _baseline_credit(rewards: Rewards) -> Credited:
    advantages = whiten(
        spread(group_advantages(rewards.scores, normalise_std=False).flatten(), rewards.lengths).advantages
    )
    return Credited(advantages=advantages, task_advantages=_first_of_each(advantages, rewards.lengths))


def _first_of_each(advantages: Float[Tensor, " token"], lengths: Sequence[int]) -> Float[Tensor, " rollout"]:
    """The advantage of each rollout's first token."""
    sizes = torch.tensor(list(lengths))
    return advantages[sizes.cumsum(dim=0) - sizes]
