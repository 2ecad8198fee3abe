"""A micro cell: a random Qwen3 of 2 layers x 32, problems of one line, and a grader that half of all responses pass."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core.algorithm_specs import TeacherSpec
from sdpo_core.backends.base import TokenRow, WeightsAt
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.cell import Cell, CellData, Workers
from sdpo_core.journal import Journal
from sdpo_core.metrics import Trait
from sdpo_core.records import Grade, GradedRollout, Message, Problem, Rollout, Split, Verdict
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer, build_tokenizer
from sdpo_core.workers import ANCHOR, StudentWorker, TeacherWorker

MAX_POSITIONS = 256

_STATIC = {"schedule": "static"}
_OPD = {"teacher": _STATIC, "coefficient": 0.5}
ARMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo"},
    "sdpo-static": {"name": "sdpo", "teacher": _STATIC, "divergence": {"top_k": 5}},
    "sdpo-ema": {"name": "sdpo", "teacher": {"schedule": "ema", "rate": 0.25}, "divergence": {"top_k": 5}},
    "sdpo-live": {"name": "sdpo", "teacher": {"schedule": "live"}},
    "sdpo-trust-region": {"name": "sdpo", "teacher": {"schedule": "trust_region", "rate": 0.25}},
    "sdpo-full": {"name": "sdpo", "teacher": _STATIC, "divergence": {"support": "full", "top_k": None}},
    "blend": {"name": "sdpo", "teacher": _STATIC, "blend": {"weight": 0.5}},
    "opsd": {"name": "opsd"},
    "gspo": {"name": "gspo"},
    "sapo": {"name": "sapo"},
    "rloo": {"name": "rloo"},
    "reinforce-pp": {"name": "reinforce_pp"},
    "reinforce-pp-baseline": {"name": "reinforce_pp_baseline"},
    "ppo": {"name": "ppo"},
    "grpo-k1": {"name": "grpo", "anchor": {"coefficient": 0.1, "estimator": "k1", "discount": 1.0}},
    "grpo-k2": {"name": "grpo", "anchor": {"coefficient": 0.1, "estimator": "k2", "placement": "loss"}},
    "opd": {"name": "grpo", "opd": {**_OPD, "only": True}},
    "opd-k2": {"name": "grpo", "opd": {**_OPD, "estimator": "k2", "placement": "loss"}},
    **{
        f"opd-{support}": {
            "name": "grpo",
            "opd": {
                **_OPD,
                "estimator": "divergence",
                "placement": "loss",
                "divergence": {"support": support, "top_k": None if support == "full" else 4},
            },
        }
        for support in ("student", "teacher", "union", "full")
    },
}

# What each arm has beside "any", by hand.
TRAITS: Mapping[str, frozenset[Trait]] = {
    **dict.fromkeys(("grpo", "gspo", "sapo", "rloo", "reinforce-pp", "reinforce-pp-baseline"), frozenset()),
    "sdpo-static": frozenset({"teacher", "divergence", "support", "context"}),
    **dict.fromkeys(
        ("sdpo-ema", "sdpo-live", "sdpo-trust-region"),
        frozenset({"teacher", "follows", "divergence", "support", "context"}),
    ),
    "sdpo-full": frozenset({"teacher", "divergence", "context"}),
    "blend": frozenset({"teacher", "divergence", "support", "context"}),
    "opsd": frozenset({"teacher", "divergence", "context"}),
    "ppo": frozenset({"value"}),
    "grpo-k1": frozenset({"anchor"}),
    "grpo-k2": frozenset({"anchor"}),
    "opd": frozenset({"teacher", "sampled"}),
    "opd-k2": frozenset({"teacher", "sampled"}),
    **dict.fromkeys(("opd-student", "opd-teacher", "opd-union"), frozenset({"teacher", "divergence", "support"})),
    "opd-full": frozenset({"teacher", "divergence"}),
}


def make_base(folder: Path) -> ChatTokenizer:
    """Write the base: weights wide enough that the context shows in the logits, three rows of padded vocabulary."""
    text = build_tokenizer(TokenizerSpec(kind="byte"), texts=())
    text.save(folder)
    config = Qwen3Config(
        vocab_size=text.vocab_size + 3,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=text.end_id,
        pad_token_id=text.pad_id,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return text


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> HfModel:
    vocab = ChatTokenizer.load(folder).vocab_size
    return HfModel(folder, dtype=dtype, device=torch.device("cpu"), valid_vocab=vocab)


def make_spec(
    spec: CellSpec,
    *,
    arm: str = "sdpo-ema",
    algorithm: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> CellSpec:
    """`spec` at the size of the micro model, with an arm of `ARMS` and single numbers replaced."""
    value = spec.model_dump(mode="json")
    value["arm"] = arm
    value["algorithm"] = {**ARMS[arm], **(algorithm or {})}
    value["base"]["shape"] |= {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    value["base"]["shape"]["max_positions"] = MAX_POSITIONS
    value["optimizer"] |= {"learning_rate": 1e-2, **(optimizer or {})}
    value["training"] |= {
        "steps": 4,
        "problems_per_step": 2,
        "rollouts_per_problem": 3,
        "max_prompt_tokens": 80,
        "max_teacher_prompt_tokens": 240,
        "max_response_tokens": 5,
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "microbatch_tokens": 600,
        **(training or {}),
    }
    value["evaluation"] |= {"samples_per_problem": 2, **(evaluation or {})}
    return CellSpec.model_validate(value)


def make_problem(index: int, *, split: Split = "train", prompt: tuple[Message, ...] | None = None) -> Problem:
    return Problem(
        id=f"{split}-{index}",
        prompt=prompt or (Message(role="user", content=f"Say {'abcdefghij'[index % 10] * (1 + index % 4)}"),),
        label="a",
        dataset="spell_backward",
        task="spell_backward",
        domain="micro",
        split=split,
        group_key=str(index),
        reference={},
        source={},
        details={},
        privileged="a" * (1 + index % 3),
    )


def make_data(*, train: int = 5) -> CellData:
    return CellData(
        train=[make_problem(index) for index in range(train)],
        dev=[make_problem(index, split="dev") for index in range(3)],
        test=[make_problem(index, split="test") for index in range(3)],
    )


def grade_first_letter(_problem: Problem, response: str, _truncated: bool) -> Verdict:
    """Right when the code of the first character is even: about half of all random responses."""
    is_right = bool(response) and ord(response[0]) % 2 == 0
    return Verdict(
        score=float(is_right),
        reason="correct" if is_right else "wrong",
        feedback="" if is_right else "Start with an even letter.",
        format_ok=True,
    )


def make_member(
    response: tuple[int, ...],
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    score: float = 0.0,
    feedback: str = "",
    text: str = "",
) -> GradedRollout:
    rollout = Rollout(
        prompt_ids=prompt,
        response_ids=response,
        sampling_logps=(0.0,) * len(response),
        finish="length",
        weights_version=0,
    )
    verdict = Verdict(score=score, reason="x", feedback=feedback, format_ok=True)
    return GradedRollout(rollout=rollout, text=text, verdict=verdict)


def plain_workers(spec: CellSpec, *, folder: Path) -> Workers:
    """The workers as plain objects in this process."""

    def worker(life: TeacherSpec | None) -> TeacherWorker | None:
        return None if life is None else TeacherWorker(spec, life=life, at=WeightsAt(folder=folder), device="cpu")

    return Workers(
        student=StudentWorker(spec, folder=folder, device="cpu"),
        teacher=worker(spec.teacher),
        anchor=worker(None if spec.anchor is None else ANCHOR),
    )


def make_cell(
    spec: CellSpec,
    *,
    journal: Journal,
    workers: Workers,
    text: ChatTokenizer,
    grade: Grade = grade_first_letter,
    data: CellData | None = None,
) -> Cell:
    ticks = itertools.count(1.0)
    clock: Callable[[], float] = lambda: next(ticks)  # noqa: E731
    return Cell(
        spec,
        fingerprint="f" * 20,
        journal=journal,
        data=data or make_data(),
        workers=workers,
        text=text,
        grade=grade,
        clock=clock,
        wall_time=clock,
        environment={"threads": 1},
    )


def ragged_rows() -> list[TokenRow]:
    """Prompts of four lengths, one of them twice and apart, responses of 1 to 6 tokens."""
    letters = itertools.cycle(range(3, 250, 7))

    def take(count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(letters, count))

    shared = take(9)
    pairs: Iterator[tuple[tuple[int, ...], int]] = iter(
        [(shared, 3), (take(2), 1), (take(14), 6), (shared, 1), (take(5), 4), (shared, 5), (take(9), 2)]
    )
    return [TokenRow(prompt_ids=prompt, response_ids=take(count)) for prompt, count in pairs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The micro base: its folder and its tokenizer."""

    folder: Path
    text: ChatTokenizer
