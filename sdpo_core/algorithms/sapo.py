"""SAPO: GRPO's advantage with a sigmoid gate in the place of the clip."""

from sdpo_core.algorithm_specs import SapoSpec
from sdpo_core.algorithms.grpo import group_credit
from sdpo_core.algorithms.objective import SoftGate
from sdpo_core.algorithms.policy_gradient import PolicyGradient


def sapo(spec: SapoSpec) -> PolicyGradient:
    """SAPO as declared."""
    surrogate = SoftGate(temperature_positive=spec.temperature_positive, temperature_negative=spec.temperature_negative)
    return PolicyGradient(spec, credit=group_credit(normalise_std=spec.normalise_std), surrogate=surrogate)
