"""GSPO: GRPO's advantage with one ratio a sequence; each token keeps its own advantage under it."""

from sdpo_core.algorithm_specs import GspoSpec
from sdpo_core.algorithms.grpo import group_credit
from sdpo_core.algorithms.objective import SequenceSurrogate
from sdpo_core.algorithms.policy_gradient import PolicyGradient


def gspo(spec: GspoSpec) -> PolicyGradient:
    """GSPO as declared."""
    surrogate = SequenceSurrogate(clip_low=spec.clip_low, clip_high=spec.clip_high)
    return PolicyGradient(spec, credit=group_credit(normalise_std=spec.normalise_std), surrogate=surrogate)
