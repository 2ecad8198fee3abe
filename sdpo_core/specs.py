"""Frozen declarations: what a cell is. Torch-free, serialisable, every fault reported at once.

Only what determines a result stands here. Paths, hosts and devices come in elsewhere.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
ContextPolicy = Literal["error", "drop", "poll"]
Reduction = Literal["token_mean", "sequence_mean"]
FeedbackLevel = Literal["none", "diagnostic", "reveal"]


class Spec(BaseModel):
    """Base of all declarations: immutable, no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenizerSpec(Spec):
    """Vocabulary of a model the project makes itself: bytes, or a BPE learned from the warm-up prompts.

    `phrases`: texts that are one token each. The sentences that frame every prompt carry no information between
    prompts; as single tokens they leave a small model's few positions to what differs.
    """

    kind: Literal["byte", "bpe"]
    vocab_size: PositiveInt | None = None
    phrases: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _bpe_has_a_size(self) -> "TokenizerSpec":
        if (self.kind == "bpe") != (self.vocab_size is not None):
            raise ValueError("vocab_size belongs to kind 'bpe' and to no other")
        return self


class ShapeSpec(Spec):
    """Size of a Qwen3-shaped model."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_positions: PositiveInt


class WarmupSpec(Spec):
    """Supervised warm-up that makes a base model.

    The two shares are of examples with the plain prompt and with a demonstration; the rest shows feedback.
    """

    steps: PositiveInt
    examples_per_step: PositiveInt
    learning_rate: PositiveFloat
    lr_warmup_steps: int = Field(ge=0)
    plain_share: Fraction
    demonstration_share: Fraction
    seed: int

    @model_validator(mode="after")
    def _shares_fit(self) -> "WarmupSpec":
        if self.plain_share + self.demonstration_share > 1 + 1e-9:
            raise ValueError("plain_share and demonstration_share add up to more than 1")
        return self


class BaseSpec(Spec):
    """How the base weights come to be. `datasets`: whose prompts the tokenizer and the warm-up see."""

    name: str
    datasets: tuple[str, ...]
    tokenizer: TokenizerSpec
    shape: ShapeSpec
    warmup: WarmupSpec


class OptimizerSpec(Spec):
    """AdamW with linear warm-up to a constant rate. `lr_warmup_steps` = w: step s (from 1) runs at min(1, s/(w+1))."""

    learning_rate: PositiveFloat
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    weight_decay: float = Field(default=0.01, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    lr_warmup_steps: int = Field(default=0, ge=0)


class TrainingSpec(Spec):
    """Budget and rollout shape of a cell."""

    steps: PositiveInt
    problems_per_step: PositiveInt
    rollouts_per_problem: PositiveInt
    temperature: PositiveFloat
    max_prompt_tokens: PositiveInt
    max_response_tokens: PositiveInt
    max_teacher_prompt_tokens: PositiveInt
    evaluate_every: PositiveInt
    checkpoint_every: PositiveInt
    microbatch_tokens: PositiveInt
    feedback_level: FeedbackLevel = "diagnostic"

    @model_validator(mode="after")
    def _evaluations_are_checkpointed(self) -> "TrainingSpec":
        if self.evaluate_every % self.checkpoint_every:
            raise ValueError("evaluate_every must be a multiple of checkpoint_every: the best step on dev is kept")
        return self


class EvaluationSpec(Spec):
    """avg@k and pass@k: k samples a problem at `temperature`; at most `*_problems` problems, the first of the split."""

    samples_per_problem: PositiveInt
    temperature: PositiveFloat
    dev_problems: PositiveInt | None
    test_problems: PositiveInt | None


class GrpoSpec(Spec):
    """Group-relative policy optimisation: advantage = reward - group mean, token-level clipped surrogate."""

    name: Literal["grpo"] = "grpo"
    normalise_std: bool = False
    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    minibatches: PositiveInt = 1
    reduction: Reduction = "token_mean"


class TeacherSpec(Spec):
    """The life of the teacher's weights. `rate` is the share of the new (student) weights in one EMA commit."""

    schedule: Literal["static", "ema", "live"]
    rate: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    @model_validator(mode="after")
    def _rate_belongs_to_ema(self) -> "TeacherSpec":
        if (self.schedule == "ema") != (self.rate is not None):
            raise ValueError("rate belongs to schedule 'ema' and to no other")
        return self


class SdpoSpec(Spec):
    """Self-distillation from feedback: divergence to the context-conditioned teacher at the student's support.

    `alpha`: 0 forward KL(teacher||student), 1 reverse KL(student||teacher), between: generalised JSD.
    """

    name: Literal["sdpo"] = "sdpo"
    teacher: TeacherSpec
    alpha: Fraction = 0.5
    top_k: PositiveInt = 20
    success_threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    include_feedback: bool = True
    feedback_only_without_demonstration: bool = True
    no_context: ContextPolicy = "drop"
    importance_clip: PositiveFloat = 2.0
    minibatches: PositiveInt = 1
    reduction: Reduction = "token_mean"


AlgorithmSpec = Annotated[GrpoSpec | SdpoSpec, Field(discriminator="name")]


class CellSpec(Spec):
    """One cell: data set x arm x seed under one profile, with every number resolved."""

    dataset: str
    task: str
    arm: str
    profile: str
    seed: int
    algorithm: AlgorithmSpec
    base: BaseSpec
    optimizer: OptimizerSpec
    training: TrainingSpec
    evaluation: EvaluationSpec
    backend: str = "hf"
    engine: str = "local"
    dtype: Literal["float32"] = "float32"
    threads_per_worker: PositiveInt = 1

    @property
    def teacher(self) -> TeacherSpec | None:
        """The life of the teacher's weights; None for an arm without a teacher."""
        teacher: TeacherSpec | None = getattr(self.algorithm, "teacher", None)
        return teacher

    @property
    def label(self) -> str:
        """`<data set>/<arm>/<seed>`: how messages name a cell."""
        return f"{self.dataset}/{self.arm}/{self.seed}"

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> "CellSpec":
        training, positions = self.training, self.base.shape.max_positions
        faults = []
        rollouts = training.problems_per_step * training.rollouts_per_problem
        if self.algorithm.minibatches > rollouts:
            faults.append(f"{self.algorithm.minibatches} mini-batches for {rollouts} rollouts a step")
        longest = max(training.max_prompt_tokens, training.max_teacher_prompt_tokens) + training.max_response_tokens
        if longest > positions:
            faults.append(f"prompts and responses of up to {longest} tokens for {positions} positions of the base")
        if faults:
            raise ValueError("; ".join(faults))
        return self


class ArmSpec(Spec):
    """An algorithm with settings, under a name of its own; `meaning` is one line for reports."""

    name: str
    meaning: str
    algorithm: AlgorithmSpec


class ProbeSpec(Spec):
    """What to probe base weights on, and how."""

    dataset: str
    evaluation: EvaluationSpec
    max_response_tokens: int
    feedback_level: FeedbackLevel


class TaskProfile(Spec):
    """What a profile fixes for one kind of task."""

    base: BaseSpec
    optimizer: OptimizerSpec
    training: TrainingSpec
    evaluation: EvaluationSpec


class ProfileSpec(Spec):
    """Model, backend, scale and hardware. `tasks` maps a kind of task to its numbers."""

    name: str
    meaning: str
    tasks: dict[str, TaskProfile]
    backend: str = "hf"
    engine: str = "local"
    dtype: Literal["float32"] = "float32"
    threads_per_worker: PositiveInt = 1
    cpus_per_cell: PositiveInt = 1
    gpus_per_cell: int = Field(default=0, ge=0, le=2)


class ExperimentSpec(Spec):
    """A declared set of cells with a question, and a prediction written before it ran."""

    name: str
    question: str
    prediction: str
    datasets: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    profile: str
