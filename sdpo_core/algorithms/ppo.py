"""PPO: generalised advantages of a value head on the policy's own states, whitened over the step's tokens."""

import torch

from sdpo_core.algorithm_specs import PpoSpec
from sdpo_core.algorithms.objective import ClippedSurrogate, ValueTerm
from sdpo_core.algorithms.policy_gradient import Credited, PolicyGradient, Rewards
from sdpo_core.algorithms.reinforce_pp import last_token_rewards
from sdpo_core.errors import DataError
from sdpo_core.objectives.advantages import generalised_advantages, whiten


def ppo(spec: PpoSpec) -> PolicyGradient:
    """PPO as declared."""

    def credit(rewards: Rewards) -> Credited:
        if rewards.values is None:
            raise DataError("ppo: got no values, expected one a token. The policy needs a value head.")
        estimate = generalised_advantages(
            last_token_rewards(rewards),
            rewards.values,
            rewards.lengths,
            discount=spec.discount,
            trace_decay=spec.trace_decay,
        )
        advantages = whiten(estimate.advantages)
        sizes = torch.tensor(list(rewards.lengths))
        return Credited(
            advantages=advantages,
            task_advantages=advantages[sizes.cumsum(dim=0) - sizes],
            returns=estimate.returns,
        )

    return PolicyGradient(
        spec,
        credit=credit,
        surrogate=ClippedSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high),
        terms=(ValueTerm(coefficient=spec.value_coefficient, clip=spec.value_clip),),
    )
