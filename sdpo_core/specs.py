"""Frozen declarations: what a cell is. Torch-free, serialisable, every fault reported at once.

Only what determines a result stands here. Paths, hosts and devices come in elsewhere.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from sdpo_core.algorithm_specs import (
    AlgorithmSpec,
    AnchorSpec,
    DivergenceSpec,
    OpdSpec,
    OpsdSpec,
    PpoSpec,
    SdpoSpec,
    TeacherSpec,
)
from sdpo_core.base_specs import AnyBaseSpec
from sdpo_core.layout import LayoutSpec
from sdpo_core.metrics import Trait
from sdpo_core.spec_base import Fraction, Spec, refuse
from sdpo_core.teacher.table import TeacherPlacement, placement_faults

FeedbackLevel = Literal["none", "diagnostic", "reveal"]
WeightsBy = Literal["folder", "gloo", "nccl"]
Dtype = Literal["float32", "bfloat16"]


class OptimizerSpec(Spec):
    """AdamW with linear warm-up to a constant rate. `lr_warmup_steps` = w: step s (from 1) runs at min(1, s/(w+1))."""

    learning_rate: PositiveFloat
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    weight_decay: float = Field(default=0.01, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    lr_warmup_steps: int = Field(default=0, ge=0)


class TrainingSpec(Spec):
    """Budget and rollout shape of a cell. `thinking`: the chat template's switch, the same for student and teacher."""

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
    thinking: bool = False

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


class SglangSpec(Spec):
    """Servers of engine 'sglang', each with a copy of the student's weights.

    `deterministic`: a rollout depends on its seed, and on its neighbours by rounding at most. `max_total_tokens`: room
    for prompts and responses in one server's memory. `weights_by`: how new weights get to them, by a file in a folder
    or by a process group (nccl: to servers on another GPU that somebody else has started). `concurrency`: requests
    under way at a server.

    `sleep`: the servers give the memory of weights and prompts back while nothing is sampled, and get both anew.
    `memory_fraction`: share of a GPU's memory for them, None for the server's own choice.
    """

    replicas: PositiveInt = 1
    deterministic: bool = True
    weights_by: WeightsBy = "folder"
    max_total_tokens: PositiveInt = 65536
    concurrency: PositiveInt = 32
    sleep: bool = False
    memory_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)


class CellSpec(Spec):
    """One cell: data set x arm x seed under one profile, with every number resolved.

    `layout` is the student's, `scorer_layout` that of its anchor and of a teacher that is placed in the trainer.
    """

    dataset: str
    task: str
    arm: str
    profile: str
    seed: int
    algorithm: AlgorithmSpec
    base: AnyBaseSpec
    teacher_base: AnyBaseSpec | None = None
    optimizer: OptimizerSpec
    training: TrainingSpec
    evaluation: EvaluationSpec
    backend: str = "hf"
    engine: str = "local"
    dtype: Dtype = "float32"
    threads_per_worker: PositiveInt = 1
    layout: LayoutSpec = LayoutSpec()
    scorer_layout: LayoutSpec = LayoutSpec()
    sglang: SglangSpec = SglangSpec()
    teacher_placement: TeacherPlacement = "trainer"

    @property
    def opd(self) -> OpdSpec | None:
        """The on-policy distillation term; None for an arm without one."""
        opd: OpdSpec | None = getattr(self.algorithm, "opd", None)
        return opd

    @property
    def anchor(self) -> AnchorSpec | None:
        """The anchor at the base weights; None for an arm without one."""
        anchor: AnchorSpec | None = getattr(self.algorithm, "anchor", None)
        return anchor

    @property
    def teacher(self) -> TeacherSpec | None:
        """The teacher's weights and their life; None for an arm without a teacher."""
        teacher: TeacherSpec | None = getattr(self.algorithm, "teacher", None)
        return self.opd.teacher if teacher is None and self.opd is not None else teacher

    @property
    def divergence(self) -> DivergenceSpec | None:
        """The divergence that is trained; None for an arm without one."""
        divergence: DivergenceSpec | None = getattr(self.algorithm, "divergence", None)
        return self.opd.divergence if divergence is None and self.opd is not None else divergence

    @property
    def traits(self) -> frozenset[Trait]:
        """What the arm has, and so which metrics it promises."""
        return frozenset({"any", *self._traits()})

    def _traits(self) -> Iterator[Trait]:
        teacher, divergence = self.teacher, self.divergence
        if teacher is not None:
            yield "teacher"
            if teacher.schedule != "static":
                yield "follows"
        if divergence is not None:
            yield "divergence"
            if divergence.support != "full":
                yield "support"
        elif teacher is not None:
            yield "sampled"
        if isinstance(self.algorithm, SdpoSpec | OpsdSpec):
            yield "context"
        if self.anchor is not None:
            yield "anchor"
        if isinstance(self.algorithm, PpoSpec):
            yield "value"

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
        if training.rollouts_per_problem < self.algorithm.min_rollouts:
            faults.append(
                f"{training.rollouts_per_problem} rollout a problem for {self.algorithm.name}, which compares at least "
                f"{self.algorithm.min_rollouts}"
            )
        if self.divergence is not None and (self.divergence.top_k or 0) > self.base.largest_vocab:
            faults.append(f"top_k {self.divergence.top_k} for a vocabulary of {self.base.largest_vocab} ids")
        if (self.teacher is not None and self.teacher.weights == "profile") != (self.teacher_base is not None):
            faults.append("teacher_base belongs to teacher weights 'profile': the profile names a teacher model")
        longest = max(training.max_prompt_tokens, training.max_teacher_prompt_tokens) + training.max_response_tokens
        if longest > positions:
            faults.append(f"prompts and responses of up to {longest} tokens for {positions} positions of the base")
        for cut in {self.layout.tensor, self.scorer_layout.tensor}:
            if self.base.shape.intermediate_size % cut:
                faults.append(f"intermediate_size {self.base.shape.intermediate_size} for tensor {cut}")
        faults += placement_faults(
            self.teacher_placement,
            life=self.teacher,
            support=self.divergence.support if self.divergence is not None else None,
            temperature=training.temperature,
        )
        refuse([*faults, *self._teacher_faults(longest)])
        return self

    def _teacher_faults(self, longest: int) -> Iterator[str]:
        """What a teacher of another model cannot do."""
        if self.teacher is None or self.teacher_base is None:
            return
        shape = self.teacher_base.shape
        if longest > shape.max_positions:
            yield f"prompts and responses of up to {longest} tokens for {shape.max_positions} positions of the teacher"
        if self.teacher.schedule != "static" and shape != self.base.shape:
            yield f"schedule {self.teacher.schedule!r} for a teacher of another shape, which cannot take weights in"


class ArmSpec(Spec):
    """An algorithm with settings, under a name of its own.

    `meaning` is one line for reports; `source` the paper or code the settings are taken from, and where they differ.
    """

    name: str
    meaning: str
    source: str
    algorithm: AlgorithmSpec


class ProbeSpec(Spec):
    """What to probe base weights on, and how."""

    dataset: str
    evaluation: EvaluationSpec
    max_response_tokens: int
    feedback_level: FeedbackLevel


class TaskProfile(Spec):
    """What a profile fixes for one kind of task. `teacher_base`: the model of arms whose teacher is another one."""

    base: AnyBaseSpec
    teacher_base: AnyBaseSpec | None = None
    optimizer: OptimizerSpec
    training: TrainingSpec
    evaluation: EvaluationSpec


class ProfileSpec(Spec):
    """Model, backend, scale and hardware. `tasks` maps a kind of task to its numbers.

    `scorer_layout`: of teachers and anchors; None: as the student's. `teacher_placement`: where teachers score.
    """

    name: str
    meaning: str
    tasks: dict[str, TaskProfile]
    backend: str = "hf"
    engine: str = "local"
    dtype: Dtype = "float32"
    threads_per_worker: PositiveInt = 1
    layout: LayoutSpec = LayoutSpec()
    scorer_layout: LayoutSpec | None = None
    sglang: SglangSpec = SglangSpec()
    teacher_placement: TeacherPlacement = "trainer"
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
