"""RLOO: advantage = score minus the mean score of the group's other rollouts."""

from sdpo_core.algorithm_specs import RlooSpec
from sdpo_core.algorithms.grpo import spread
from sdpo_core.algorithms.objective import ClippedSurrogate
from sdpo_core.algorithms.policy_gradient import Credited, PolicyGradient, Rewards
from sdpo_core.objectives.advantages import leave_one_out_advantages


def rloo(spec: RlooSpec) -> PolicyGradient:
    """RLOO as declared."""
    return PolicyGradient(
        spec, credit=_credit, surrogate=ClippedSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high)
    )


def _credit(rewards: Rewards) -> Credited:
    return spread(leave_one_out_advantages(rewards.scores).flatten(), rewards.lengths)
