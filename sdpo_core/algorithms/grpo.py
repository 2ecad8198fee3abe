"""GRPO: advantage = score minus the group's mean, the same for every token of a response, clipped surrogate."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.algorithm_specs import GrpoSpec
from sdpo_core.algorithms.objective import ClippedSurrogate
from sdpo_core.algorithms.policy_gradient import Credit, Credited, PolicyGradient, Rewards
from sdpo_core.objectives.advantages import group_advantages


def grpo(spec: GrpoSpec) -> PolicyGradient:
    """GRPO as declared."""
    return PolicyGradient(spec, credit=group_credit(normalise_std=spec.normalise_std), surrogate=clipped(spec))


def clipped(spec: GrpoSpec) -> ClippedSurrogate:
    """The surrogate of `spec`."""
    return ClippedSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip)


def group_credit(*, normalise_std: bool) -> Credit:
    """Each token has its rollout's advantage in the group."""

    def credit(rewards: Rewards) -> Credited:
        return spread(group_advantages(rewards.scores, normalise_std=normalise_std).flatten(), rewards.lengths)

    return credit


def spread(advantages: Float[Tensor, " rollout"], lengths: Sequence[int]) -> Credited:
    """One advantage a rollout, for each of its tokens."""
    return Credited(advantages=advantages.repeat_interleave(torch.tensor(list(lengths))), task_advantages=advantages)
