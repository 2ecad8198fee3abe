"""Every objective at every layout: the loss, sums and gradients of one process in float64, and its scores."""

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.algorithm_specs import DivergenceSpec, Support
from sdpo_core.algorithms.objective import (
    ClippedSurrogate,
    DivergenceTerm,
    PolicyTerm,
    SampledKlTerm,
    SequenceSurrogate,
    SoftGate,
    TermSum,
    ValueTerm,
)
from sdpo_core.backends.base import Projection, TeacherQuestion, TokenRow, TrainRow, UpdateStats
from sdpo_core.backends.hf import HfOptimizer, hf_policy
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.backends.megatron.names import to_hf
from sdpo_core.backends.megatron.optimizer import MegatronOptimizer
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.backends.row_model import RowModel
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import OptimizerSpec
from tests.sdpo_core.micro import Base, load_model
from tests.sdpo_core.objectives.processes import run_processes

pytestmark = pytest.mark.megatron

TEMPERATURE, TOP_K, VALID, HIDDEN = 0.9, 4, 259, 32
# Share of the largest entry of each gradient, and of each value: float32 against float64.
GRADIENT, VALUE = 1e-5, 1e-5
LAYOUTS = {
    "tp1": LayoutSpec(),
    "tp1-packed": LayoutSpec(packed=True),
    "tp2": LayoutSpec(tensor=2),
    "tp2-sp": LayoutSpec(tensor=2, sequence=True),
    "tp2-sp-packed-recompute": LayoutSpec(tensor=2, sequence=True, packed=True, recompute=True),
    "cp2": LayoutSpec(context=2),
    "cp2-packed": LayoutSpec(context=2, packed=True),
    "dp2": LayoutSpec(data=2),
    "tp2cp2": LayoutSpec(tensor=2, context=2),
    "tp2cp2-sp": LayoutSpec(tensor=2, context=2, sequence=True),
    "tp2cp2-sp-packed": LayoutSpec(tensor=2, context=2, sequence=True, packed=True),
    "cp2dp2": LayoutSpec(context=2, data=2),
}
CLIPS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
POLICY = PolicyTerm(surrogate=ClippedSurrogate(**CLIPS, dual_clip=3.0), rollout_cap=2.0)
GATE = SoftGate(temperature_positive=1.0, temperature_negative=1.1)


def divergence(**changes: Any) -> DivergenceTerm:
    spec = DivergenceSpec.model_validate({"top_k": TOP_K, **changes})
    return DivergenceTerm(spec=spec, importance_clip=2.0, rollout_cap=2.0)


WHOLE = divergence(support="full", top_k=None, alpha=0.25, token_clip=0.5)
OBJECTIVES = {
    "grpo": TermSum(terms=(POLICY,)),
    "grpo, anchor": TermSum(terms=(POLICY, SampledKlTerm(coefficient=0.1, is_anchor=True))),
    "gspo": TermSum(terms=(PolicyTerm(surrogate=SequenceSurrogate(**CLIPS), rollout_cap=2.0),)),
    "sapo": TermSum(terms=(PolicyTerm(surrogate=GATE, rollout_cap=None),)),
    "ppo": TermSum(terms=(POLICY, ValueTerm(coefficient=0.5, clip=0.2))),
    "sdpo, jsd": TermSum(terms=(divergence(alpha=0.5),)),
    "sdpo, reverse": TermSum(terms=(divergence(alpha=1.0, token_clip=0.3),)),
    "sdpo, forward": TermSum(terms=(divergence(alpha=0.0),)),
    "sdpo, blend": TermSum(terms=(POLICY, divergence(alpha=0.5))),
    "gspo + sdpo": TermSum(terms=(PolicyTerm(surrogate=SequenceSurrogate(**CLIPS), rollout_cap=2.0), divergence())),
    "opsd": TermSum(terms=(WHOLE,)),
    "gspo + opsd": TermSum(terms=(PolicyTerm(surrogate=SequenceSurrogate(**CLIPS), rollout_cap=2.0), WHOLE)),
    "opd, sampled": TermSum(terms=(POLICY, SampledKlTerm(coefficient=0.1, is_anchor=False))),
}
# Prompt and response: of one token, longer than half of the padded row, and as long as makes a process without a token.
LENGTHS = ((4, 30), (21, 1), (3, 17), (40, 2), (11, 9), (2, 1), (6, 8))


def token_rows(*, context: int = 0) -> list[TokenRow]:
    """The responses, under prompts that are `context` tokens longer and less each time."""
    rng = np.random.default_rng(3)
    rows = []
    for index, (prompt, response) in enumerate(LENGTHS):
        ids = rng.integers(0, VALID, prompt + response).tolist()
        before = rng.integers(0, VALID, context + index).tolist() if context else []
        rows.append(TokenRow(prompt_ids=(*before, *ids[:prompt]), response_ids=tuple(ids[prompt:])))
    return rows


def train_rows(*, states: bool) -> list[TrainRow]:
    """Rows with every field that an objective may read; a third has no teacher."""
    rng = np.random.default_rng(7)
    rows = []
    for index, row in enumerate(token_rows()):
        size = len(row.response_ids)
        columns: dict[str, Any] = {
            name: rng.normal(-4, 0.4, size).astype(np.float32)
            for name in ("old_logps", "sampling_logps", "anchor_logps", "old_values", "returns")
        }
        columns["advantages"] = rng.normal(0, 1, size).astype(np.float32)
        if index % 3:
            columns["teacher_own_logps"] = rng.normal(-4, 0.4, size).astype(np.float32)
            ids = np.stack([rng.choice(VALID, TOP_K, replace=False) for _ in range(size)])
            masses = rng.dirichlet(np.ones(TOP_K + 1), size)
            columns |= (
                {"teacher_states": rng.normal(0, 1, (size, HIDDEN)).astype(np.float32)}
                if states
                else {"support_ids": ids, "teacher_logps": np.log(masses).astype(np.float32)}
            )
        columns |= {"weight": 0.01 * (index + 1), "distill_weight": 0.02 * (index % 3)}
        rows.append(TrainRow(row=row, task_advantage=float(index - 3), **columns))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What an update says, and the gradient it leaves by Hugging Face name."""

    stats: UpdateStats
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One process in float64: its updates, its scores, and a teacher's."""

    updates: Mapping[str, Found]
    scores: tuple[Any, ...]
    answers: Mapping[str, tuple[Any, ...]]
    projection: Projection
    weights: Mapping[str, Tensor]


def updates(
    make: Callable[[bool], ModelPolicy], projection: Projection, *, max_tokens: int, names: Iterable[str] = OBJECTIVES
) -> dict[str, Found]:
    """Each objective's update; the learning rate is 0, so that all start from the same weights."""
    found = {}
    policies = {has_value_head: make(has_value_head) for has_value_head in (False, True)}
    for policy in policies.values():
        policy._max_tokens = max_tokens
        policy.hold_projection(projection)
    value_head = policies[True].model.value_head
    assert value_head is not None
    with torch.no_grad():
        value_head.weight.copy_(torch.linspace(-1, 1, HIDDEN)[None])
    for name in names:
        policy, objective = policies[name == "ppo"], OBJECTIVES[name]
        rows = train_rows(states="opsd" in name)
        if not any(isinstance(term, PolicyTerm) for term in objective.terms):
            # A row that no term is about never reaches an update.
            rows = [row for row in rows if row.distill_weight]
        stats = policy.update(rows, objective, learning_rate=0.0)
        found[name] = Found(stats=stats, gradients=gradients_of(policy))
    return found


def gradients_of(policy: ModelPolicy) -> dict[str, Tensor]:
    if isinstance(policy.optimizer, HfOptimizer):
        return {name: p.grad.clone() for name, p in policy.optimizer.parameters.items() if p.grad is not None}
    model = policy.model
    assert isinstance(model, MegatronModel)
    named = {name: model._over_tensor(value.main_grad) for name, value in model.module.shard_parameters().items()}  # type: ignore[attr-defined]
    shares = [{name: parts[rank] for name, parts in named.items()} for rank in range(model.layout.tensor)]
    gradients = to_hf(shares, model.shape)
    if model.value_head is not None:
        gradients |= {f"value_head.{name}": p.main_grad for name, p in model.value_head.named_parameters()}  # type: ignore[attr-defined]
    return gradients


def score_all(scorer: ModelScorer, ids: list[np.ndarray]) -> dict[str, tuple[Any, ...]]:
    """A teacher's answers for every support, under longer prompts than the student's."""
    rows = token_rows(context=19)
    questions = [TeacherQuestion(row=row, student_ids=own) for row, own in zip(rows, ids, strict=True)]
    supports: tuple[Support | None, ...] = ("student", "teacher", "union", "full", None)
    return {str(support): scorer.score(questions, support=support, top_k=TOP_K) for support in supports}


@pytest.fixture(scope="module")
def expected(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder's model as one process in float64 finds it."""
    optimizer = OptimizerSpec(learning_rate=1e-3, max_grad_norm=1e9)

    def make(has_value_head: bool) -> ModelPolicy:
        model = load_model(base.folder, dtype=torch.float64)
        if has_value_head:
            model.add_value_head()
        return hf_policy(model, optimizer, temperature=TEMPERATURE, max_tokens=9999)

    policy = make(False)
    scorer = ModelScorer([Part(model=policy.model, share=1.0)], temperature=TEMPERATURE, max_tokens=9999)
    rng = np.random.default_rng(11)
    weight = torch.from_numpy(rng.normal(0, 0.3, (262, HIDDEN)).astype(np.float32))
    projection = Projection(weight=weight, bias=None, logit_scale=1.0, soft_cap=None, vocab=VALID, version=1)
    scores = policy.score(token_rows(), top_k=TOP_K)
    answers = score_all(scorer, [score.support_ids for score in scores if score.support_ids is not None])
    path = tmp_path_factory.mktemp("expected") / "numbers"
    numbers = Expected(
        updates=updates(make, projection, max_tokens=9999),
        scores=scores,
        answers=answers,
        projection=projection,
        weights=load_model(base.folder).weights(),
    )
    path.write_bytes(pickle.dumps(numbers))
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_objective_finds_the_numbers_of_one_process(
    name: str, base: Base, expected: Path, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    work = partial(compare, expected, base.folder, layout)
    run_processes(work, size=layout.size, folder=tmp_path)


def compare(path: Path, folder: Path, layout: LayoutSpec, group: ProcessGroup) -> None:
    """All checks of one process: a start costs more than they do."""
    expected: Expected = pickle.loads(path.read_bytes())  # noqa: S301 (the parent's own file)

    def make(has_value_head: bool) -> ModelPolicy:
        model = MegatronModel(
            folder,
            layout=layout,
            dtype=torch.float32,
            device=torch.device("cpu"),
            valid_vocab=VALID,
            has_value_head=has_value_head,
        )
        optimizer = MegatronOptimizer(model, OptimizerSpec(learning_rate=1e-3, max_grad_norm=1e9))
        return ModelPolicy(model, optimizer, temperature=TEMPERATURE, max_tokens=9999)

    policy = make(False)
    same_weights(policy.weights(), expected.weights)
    worst = {"score": same_rows(policy.score(token_rows(), top_k=TOP_K), expected.scores)}
    scorer = ModelScorer([Part(model=policy.model, share=1.0)], temperature=TEMPERATURE, max_tokens=150)
    ids = [score.support_ids for score in expected.scores]
    for support, answers in score_all(scorer, ids).items():
        worst[support] = same_rows(answers, expected.answers[support])
    whole = scorer.projection()
    assert torch.equal(whole.weight, expected.weights["model.embed_tokens.weight"])
    worst["mixture"] = same_mixture(policy.model, expected)
    for max_tokens, names in ((9999, tuple(OBJECTIVES)), (100, ("grpo", "gspo", "ppo", "sdpo, jsd", "opsd"))):
        for name, found in updates(make, expected.projection, max_tokens=max_tokens, names=names).items():
            worst[f"{name}, {max_tokens}"] = same_update(found, expected.updates[name], where=name)
    if group.rank() == 0:
        print("\n", layout.size, {name: f"{error:.1e}" for name, error in worst.items()})  # noqa: T201


def same_mixture(model: RowModel, expected: Expected) -> float:
    """A model mixed with itself is that model."""
    parts = [Part(model=model, share=share) for share in (0.7, 0.3)]
    questions = [TeacherQuestion(row=row) for row in token_rows(context=19)]
    answers = ModelScorer(parts, temperature=TEMPERATURE, max_tokens=150).score(
        questions, support="teacher", top_k=TOP_K
    )
    return same_rows(answers, expected.answers["teacher"])


def same_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def same_rows(found: tuple[Any, ...], expected: tuple[Any, ...]) -> float:
    worst = 0.0
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in other.__slots__:
            left, right = getattr(one, name), getattr(other, name)
            assert (left is None) == (right is None), name
            if right is None:
                continue
            if right.dtype.kind == "i":
                np.testing.assert_array_equal(left, right)
                continue
            np.testing.assert_array_equal(np.isinf(left), np.isinf(right))
            finite = np.isfinite(right)
            error = float(np.abs(left[finite] - right[finite]).max(initial=0.0) / max(1.0, np.abs(right[finite]).max()))
            assert error <= VALUE, (name, error)
            worst = max(worst, error)
    return worst


def same_update(found: Found, expected: Found, *, where: str) -> float:
    """The worst error of a gradient, as a share of the largest entry of all."""
    assert found.stats.loss == pytest.approx(expected.stats.loss, rel=VALUE, abs=1e-6), where
    assert found.stats.sums.keys() == expected.stats.sums.keys()
    for name, amount in expected.stats.sums.items():
        assert found.stats.sums[name] == pytest.approx(amount, rel=VALUE, abs=1e-5), (where, name)
    assert found.stats.grad_norm == pytest.approx(expected.stats.grad_norm, rel=GRADIENT), where
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(value.abs().max()) for value in expected.gradients.values())
    errors = {
        name: float((found.gradients[name].double() - value).abs().max()) / largest
        for name, value in expected.gradients.items()
    }
    name, error = max(errors.items(), key=lambda item: item[1])
    assert error <= GRADIENT, (where, name, error)
    return error
