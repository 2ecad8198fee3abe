"""Frozen declarations of the algorithms: every setting of an arm. Torch-free.

What may be put together is decided here, when the spec is built: an estimator in the wrong construction
(docs/notation.md, "Constructions") trains something else than it says, or nothing, and no run would show it.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sdpo_core.base_specs import ModelName, Sha256
from sdpo_core.spec_base import Fraction, Spec, refuse

ContextPolicy = Literal["error", "drop", "poll"]
Reduction = Literal["token_mean", "sequence_mean", "sequence_mean_of_all"]
Scope = Literal["minibatch", "step"]
Support = Literal["student", "teacher", "union", "full"]
Truncation = Literal["tail", "renormalised", "bregman"]
Estimator = Literal["k1", "k2", "k3", "divergence"]
Placement = Literal["advantage", "loss"]

# What each estimator of the reverse KL trains when its gradient is taken in a place it does not belong to.
_WRONG_PLACES = {
    ("k1", "loss"): "the gradient of a log-ratio of sampled tokens is 0 in expectation",
    ("k2", "advantage"): "it is not the gradient of the reverse KL",
    ("k3", "advantage"): "it descends the reverse KL minus the forward KL",
    ("k3", "loss"): "it descends the forward KL",
    ("divergence", "advantage"): "an advantage that does not depend on the sampled token has gradient 0 in expectation",
}


class FolderWeights(Spec):
    """Weights of a Hugging Face folder that the user places in the store under `models/<name>`.

    `sha256`: digest of its tensors as `sdpo doctor --weights FOLDER` prints it, compared when the worker has them.
    """

    kind: Literal["folder"] = "folder"
    name: ModelName
    sha256: Sha256


class CheckpointWeights(Spec):
    """The student of a finished cell of the same store, at a step its checkpoints still hold."""

    kind: Literal["checkpoint"] = "checkpoint"
    cell: Annotated[str, Field(pattern=r"^[0-9a-f]{20}$")]
    step: PositiveInt | Literal["best", "last"]


# "base": the weights the student starts from. "profile": the teacher model of the profile.
TeacherWeights = Literal["base", "profile"] | Annotated[FolderWeights | CheckpointWeights, Field(discriminator="kind")]


class TeacherSpec(Spec):
    """The teacher's weights: which they are at the start, and what becomes of them.

    `rate`: share of the student's weights in one commit ("ema"), or of the student's logits ("trust_region").
    `max_failed_fraction`: rollouts of a step whose teacher scores may be missing; they leave numerator and
    denominator and are counted. More than that fails the cell.
    """

    schedule: Literal["static", "ema", "live", "trust_region"]
    rate: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    weights: TeacherWeights = "base"
    max_failed_fraction: Fraction = 0.0

    @model_validator(mode="after")
    def _rate_belongs_to_its_schedule(self) -> "TeacherSpec":
        refuse(
            ["rate belongs to the schedules 'ema' and 'trust_region' and to no other"]
            if (self.schedule in ("ema", "trust_region")) != (self.rate is not None)
            else []
        )
        return self


class DivergenceSpec(Spec):
    """A divergence of each token's distributions, and the cells it is taken over.

    `alpha`: 0 forward KL(teacher||student), 1 reverse KL(student||teacher), between: generalised JSD (OPSD's beta).
    `support`: whose `top_k` ids are the cells; "union" of both sides; "full": every id of the vocabulary.
    `truncation`: what is done with the rest: one "tail" cell, or nothing ("renormalised" over the support, "bregman":
    the support's Bregman terms alone). `entry_clip` bounds each cell before the sum, `token_clip` weighs a token down
    by limit / divergence.
    """

    alpha: Fraction = 0.5
    support: Support = "student"
    top_k: PositiveInt | None = 20
    truncation: Truncation = "tail"
    entry_clip: PositiveFloat | None = None
    token_clip: PositiveFloat | None = None

    @model_validator(mode="after")
    def _cells_fit_together(self) -> "DivergenceSpec":
        faults = []
        if (self.support == "full") != (self.top_k is None):
            faults.append("top_k belongs to every support but 'full'")
        if self.support == "full" and self.truncation != "tail":
            faults.append(f"truncation {self.truncation!r} with support 'full', which leaves nothing out")
        refuse(faults)
        return self


class SampledTermSpec(Spec):
    """A reverse KL to given weights, estimated on the sampled tokens, beside the task's advantage.

    `placement` "advantage" (k1, the log-ratio under the old weights, detached) or "loss" (k2, half its square, under
    the current ones). `discount`: share of the later tokens' terms that a token answers for; 0 is its own alone.
    """

    coefficient: PositiveFloat
    estimator: Estimator = "k1"
    placement: Placement = "advantage"
    discount: Fraction = 0.0

    def _faults(self) -> list[str]:
        faults = []
        why = _WRONG_PLACES.get((self.estimator, self.placement))
        if why is not None:
            faults.append(f"estimator {self.estimator!r} in the {self.placement}: {why}")
        if self.discount and self.placement == "loss":
            faults.append("discount belongs to placement 'advantage': in the loss each token stands for itself")
        return faults

    @model_validator(mode="after")
    def _terms_are_legal(self) -> "SampledTermSpec":
        refuse(self._faults())
        return self


class AnchorSpec(SampledTermSpec):
    """KL(student || base): what keeps a policy near the weights it started from."""

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if self.estimator == "divergence":
            faults.append("an anchor is estimated on sampled tokens: 'k1' or 'k2'")
        return faults


class OpdSpec(SampledTermSpec):
    """On-policy distillation: the student's own responses, scored by a teacher that sees the plain prompt.

    `only`: the task's advantage is left out. `divergence`: for estimator "divergence" and for no other.
    """

    coefficient: PositiveFloat = 1.0
    teacher: TeacherSpec
    only: bool = False
    divergence: DivergenceSpec | None = None

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if (self.estimator == "divergence") != (self.divergence is not None):
            faults.append("divergence belongs to the estimator 'divergence' and to no other")
        if self.teacher.schedule == "live" and self.teacher.weights == "base":
            faults.append("a live teacher with the student's prompt says what the student says")
        return faults


class OptimizationSpec(Spec):
    """How a step's rollouts become optimizer steps: what every algorithm has.

    `scope`: whether the denominators of `reduction` count a mini-batch or the whole step. `rollout_cap`: truncation of
    the weight that corrects for the engine's probabilities, None for no correction.
    """

    minibatches: PositiveInt = 1
    reduction: Reduction = "token_mean"
    scope: Scope = "minibatch"
    rollout_cap: PositiveFloat | None = None

    @property
    def min_rollouts(self) -> int:
        """Rollouts a problem below which the algorithm has nothing to compare."""
        return 1


class PolicySpec(OptimizationSpec):
    """What every policy-gradient algorithm has beside its advantage and its surrogate."""

    anchor: AnchorSpec | None = None
    opd: OpdSpec | None = None


class GrpoSpec(PolicySpec):
    """Group-relative policy optimisation: advantage = reward - group mean, token-level clipped surrogate."""

    name: Literal["grpo"] = "grpo"
    normalise_std: bool = False
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0

    @property
    def min_rollouts(self) -> int:
        return 2


class GspoSpec(PolicySpec):
    """Group sequence policy optimisation: GRPO's advantage, one ratio a sequence (its geometric mean)."""

    name: Literal["gspo"] = "gspo"
    normalise_std: bool = True
    clip_low: Fraction = 3e-4
    clip_high: PositiveFloat = 4e-4
    reduction: Reduction = "sequence_mean"

    @property
    def min_rollouts(self) -> int:
        return 2


class SapoSpec(PolicySpec):
    """Soft adaptive policy optimisation: GRPO's advantage, a sigmoid gate in the place of the clip."""

    name: Literal["sapo"] = "sapo"
    normalise_std: bool = True
    temperature_positive: PositiveFloat = 1.0
    temperature_negative: PositiveFloat = 1.05
    reduction: Reduction = "sequence_mean"

    @property
    def min_rollouts(self) -> int:
        return 2


class RlooSpec(PolicySpec):
    """REINFORCE with a leave-one-out baseline: advantage = reward - mean reward of the group's other rollouts."""

    name: Literal["rloo"] = "rloo"
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2

    @property
    def min_rollouts(self) -> int:
        return 2


class ReinforcePlusPlusSpec(PolicySpec):
    """REINFORCE++: the reward, discounted from the last token, whitened over the step; no group baseline."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    discount: Fraction = 1.0
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2


class ReinforcePlusPlusBaselineSpec(PolicySpec):
    """REINFORCE++ with a baseline: reward minus group mean, whitened over the step."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2

    @property
    def min_rollouts(self) -> int:
        return 2


class PpoSpec(PolicySpec):
    """PPO: generalised advantages of a value head on the policy's own states, whitened over the step."""

    name: Literal["ppo"] = "ppo"
    discount: Fraction = 1.0
    trace_decay: Fraction = 0.95
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    value_clip: PositiveFloat | None = 0.2
    value_coefficient: PositiveFloat = 0.5

    @model_validator(mode="after")
    def _values_are_of_the_task(self) -> "PpoSpec":
        is_alone = self.opd is not None and self.opd.only
        refuse(["opd alone with a value head, which learns from the rewards that are left out"] if is_alone else [])
        return self


class DemonstrationSpec(Spec):
    """Which successful sibling is shown, and what of its text.

    `single_answer`: only responses with exactly one answer block may demonstrate. `stop_at_answer`: the text ends
    with its first closing answer tag.
    """

    rule: Literal["random", "first", "shortest"] = "random"
    exclude_self: bool = True
    single_answer: bool = False
    strip_thinking: bool = False
    stop_at_answer: bool = False


class BlendSpec(Spec):
    """GRPO beside the divergence: loss = weight x policy loss + (1 - weight) x divergence."""

    weight: Annotated[float, Field(gt=0.0, lt=1.0)]
    policy: GrpoSpec = GrpoSpec()

    @model_validator(mode="after")
    def _policy_has_no_terms_of_its_own(self) -> "BlendSpec":
        fields = {
            name
            for name in ("anchor", "opd", *OptimizationSpec.model_fields)
            if getattr(self.policy, name) != GrpoSpec.model_fields[name].default
        }
        refuse([f"policy sets {', '.join(sorted(fields))}, which the blend takes from its algorithm"] if fields else [])
        return self


class SdpoSpec(OptimizationSpec):
    """Self-distillation from feedback: divergence to the context-conditioned teacher at the student's support."""

    name: Literal["sdpo"] = "sdpo"
    teacher: TeacherSpec
    divergence: DivergenceSpec = DivergenceSpec()
    success_threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    demonstration: DemonstrationSpec = DemonstrationSpec()
    include_feedback: bool = True
    feedback_only_without_demonstration: bool = True
    no_context: ContextPolicy = "drop"
    importance_clip: PositiveFloat = 2.0
    blend: BlendSpec | None = None

    @model_validator(mode="after")
    def _student_chooses_the_support(self) -> "SdpoSpec":
        faults = []
        if self.divergence.support in ("teacher", "union"):
            faults.append(
                f"support {self.divergence.support!r} for SDPO: the student is judged on the ids it would choose itself"
            )
        if self.blend is not None and self.no_context == "poll":
            faults.append("no_context 'poll' with a blend: the policy term also learns from groups without a success")
        refuse(faults)
        return self


class OpsdSpec(OptimizationSpec):
    """On-policy self-distillation: the teacher reads the problem's privileged text, a ground truth of the data.

    `prompt`: how the text is introduced; "reason_first" asks the teacher to follow it before it answers.
    """

    name: Literal["opsd"] = "opsd"
    teacher: TeacherSpec = TeacherSpec(schedule="static")
    divergence: DivergenceSpec = DivergenceSpec(support="full", top_k=None)
    prompt: Literal["plain", "reason_first"] = "plain"
    importance_clip: PositiveFloat = 2.0


AlgorithmSpec = Annotated[
    GrpoSpec
    | GspoSpec
    | SapoSpec
    | RlooSpec
    | ReinforcePlusPlusSpec
    | ReinforcePlusPlusBaselineSpec
    | PpoSpec
    | SdpoSpec
    | OpsdSpec,
    Field(discriminator="name"),
]
