"""Profiles: model, backend, scale and hardware, with the numbers of each kind of task."""

from experiments.qwen3 import QWEN3_4B_2GPU
from sdpo_core.base_specs import BaseSpec, ShapeSpec, TokenizerSpec, WarmupSpec
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import EvaluationSpec, OptimizerSpec, ProfileSpec, TaskProfile, TrainingSpec

# About a million parameters: learns to spell short words backward in minutes on one core, and no physics.
_TINY_SHAPE = ShapeSpec(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    max_positions=2048,
)

# The sentences around every word; as bytes they would be four fifths of all tokens.
_SPELL_PHRASES = (
    "user\n",
    "assistant\n",
    "Spell this word backward (example: sun -> nus): ",
    "\n\nA correct solution:\n\n",
    "\n\nFeedback on an earlier attempt that failed:\n\n",
    "\n\nNow solve the original problem correctly.",
    " letters are in the right place; wrong: ",
)

_SPELL_BASE = BaseSpec(
    name="tiny-spell",
    datasets=("spell_backward",),
    tokenizer=TokenizerSpec(kind="byte", phrases=_SPELL_PHRASES),
    shape=_TINY_SHAPE,
    warmup=WarmupSpec(
        steps=270,
        examples_per_step=48,
        learning_rate=2e-3,
        lr_warmup_steps=50,
        plain_share=0.04,
        demonstration_share=0.65,
        seed=7,
    ),
)

# Longer, and mostly on plain prompts: 0.96 on dev where the student's base has 0.57 (300 steps: 0.91).
_SPELL_TEACHER_BASE = _SPELL_BASE.model_copy(
    update={
        "name": "tiny-spell-teacher",
        "warmup": _SPELL_BASE.warmup.model_copy(update={"steps": 400, "plain_share": 0.6, "demonstration_share": 0.2}),
    }
)

_TINY_SPELL = TaskProfile(
    base=_SPELL_BASE,
    teacher_base=_SPELL_TEACHER_BASE,
    optimizer=OptimizerSpec(learning_rate=1e-4, lr_warmup_steps=2),
    training=TrainingSpec(
        steps=120,
        problems_per_step=8,
        rollouts_per_problem=8,
        temperature=1.0,
        max_prompt_tokens=64,
        max_response_tokens=12,
        max_teacher_prompt_tokens=256,
        evaluate_every=20,
        checkpoint_every=20,
        microbatch_tokens=16384,
    ),
    evaluation=EvaluationSpec(samples_per_problem=2, temperature=1.0, dev_problems=None, test_problems=None),
)

_MCQ_BASE = BaseSpec(
    name="tiny-mcq",
    datasets=("sciknoweval-biology", "sciknoweval-chemistry", "sciknoweval-materials", "sciknoweval-physics"),
    tokenizer=TokenizerSpec(kind="bpe", vocab_size=2048),
    shape=_TINY_SHAPE,
    warmup=WarmupSpec(
        steps=150,
        examples_per_step=8,
        learning_rate=2e-3,
        lr_warmup_steps=20,
        plain_share=0.5,
        demonstration_share=0.25,
        seed=7,
    ),
)

_TINY_MCQ = TaskProfile(
    base=_MCQ_BASE,
    optimizer=OptimizerSpec(learning_rate=1e-4, lr_warmup_steps=2),
    training=TrainingSpec(
        steps=20,
        problems_per_step=4,
        rollouts_per_problem=4,
        temperature=1.0,
        max_prompt_tokens=1024,
        max_response_tokens=16,
        max_teacher_prompt_tokens=1536,
        evaluate_every=10,
        checkpoint_every=10,
        microbatch_tokens=16384,
    ),
    evaluation=EvaluationSpec(samples_per_problem=2, temperature=1.0, dev_problems=None, test_problems=None),
)


def _smoke_base(base: BaseSpec, *, steps: int) -> BaseSpec:
    return base.model_copy(
        update={
            "name": base.name.replace("tiny", "smoke"),
            "warmup": base.warmup.model_copy(update={"steps": steps, "examples_per_step": 8}),
        }
    )


def _smoke(task: TaskProfile, *, base: BaseSpec, teacher_base: BaseSpec | None = None) -> TaskProfile:
    """`task` with a budget of seconds: every part runs, nothing is learned."""
    return task.model_copy(
        update={
            "base": _smoke_base(base, steps=12),
            "teacher_base": None if teacher_base is None else _smoke_base(teacher_base, steps=24),
            "training": task.training.model_copy(
                update={
                    "steps": 4,
                    "problems_per_step": 2,
                    "rollouts_per_problem": 4,
                    "evaluate_every": 2,
                    "checkpoint_every": 1,
                }
            ),
            "evaluation": task.evaluation.model_copy(update={"dev_problems": 8, "test_problems": 8}),
        }
    )


_TINY = ProfileSpec(
    name="tiny",
    meaning="Qwen3-shaped model of about a million parameters, one CPU core a cell",
    tasks={"spell_backward": _TINY_SPELL, "mcq": _TINY_MCQ},
)
_SMOKE = ProfileSpec(
    name="smoke",
    meaning="the tiny models for four steps: shows that the whole pipeline runs, and nothing else",
    tasks={
        "spell_backward": _smoke(_TINY_SPELL, base=_SPELL_BASE, teacher_base=_SPELL_TEACHER_BASE),
        "mcq": _smoke(_TINY_MCQ, base=_MCQ_BASE),
    },
)


def _on_megatron(
    profile: ProfileSpec, name: str, *, layout: LayoutSpec, scorer_layout: LayoutSpec | None = None, gpus: int = 0
) -> ProfileSpec:
    """`profile` with the same bases and numbers, its models cut over several processes."""
    where = f"{gpus} GPUs a cell; never run yet (docs/unverified.md)" if gpus else "two CPU cores a cell"
    return profile.model_copy(
        update={
            "name": name,
            "meaning": f"as {profile.name}, on Megatron-core: {layout.size} processes a model, {where}",
            "backend": "megatron",
            "engine": "replica",
            "layout": layout,
            "scorer_layout": scorer_layout,
            "cpus_per_cell": 2,
            "gpus_per_cell": gpus,
        }
    )


def _on_sglang(profile: ProfileSpec, name: str) -> ProfileSpec:
    """`profile` with the same bases and numbers, its rollouts sampled by a server of the student's weights."""
    return profile.model_copy(
        update={
            "name": name,
            "meaning": f"as {profile.name}, rollouts by an SGLang server, two CPU cores a cell",
            "engine": "sglang",
            # Student and server take turns; the second core pays for the server's memory (2 GiB) and its own processes.
            "cpus_per_cell": 2,
        }
    )


def _with_served_teacher(profile: ProfileSpec, name: str) -> ProfileSpec:
    """`profile` with the same bases and numbers, its teachers scored for by a server of their own."""
    return profile.model_copy(
        update={
            "name": name,
            "meaning": f"as {profile.name}, the teacher's scores by an SGLang server, two CPU cores a cell",
            "teacher_placement": "sglang",
            # As for rollouts: the workers take turns.
            "cpus_per_cell": 2,
        }
    )


PROFILES: dict[str, ProfileSpec] = {
    profile.name: profile
    for profile in (
        _TINY,
        _SMOKE,
        _on_megatron(_TINY, "tiny-megatron-tp2", layout=LayoutSpec(tensor=2)),
        _on_megatron(_TINY, "tiny-megatron-cp2", layout=LayoutSpec(context=2)),
        _on_megatron(
            _TINY,
            "tiny-megatron-tp2cp2",
            layout=LayoutSpec(tensor=2, context=2, sequence=True, distributed_optimizer=True),
            scorer_layout=LayoutSpec(tensor=2),
        ),
        _on_megatron(_SMOKE, "smoke-megatron", layout=LayoutSpec(tensor=2)),
        _on_sglang(_TINY, "tiny-sglang"),
        _on_sglang(_SMOKE, "smoke-sglang"),
        _with_served_teacher(_TINY, "tiny-sglang-teacher"),
        _with_served_teacher(_SMOKE, "smoke-sglang-teacher"),
        # As Qwen3-4B below, but for float32, in which the kernels of packed rows do not exist.
        _on_megatron(
            _SMOKE,
            "smoke-megatron-2gpu",
            layout=QWEN3_4B_2GPU.layout.model_copy(update={"packed": False}),
            scorer_layout=LayoutSpec(tensor=2, sequence=True, kernels="transformer_engine"),
            gpus=2,
        ),
        QWEN3_4B_2GPU,
    )
}
