"""Terms beside the task's advantage: anchors, on-policy distillation, corrections, against float64 formulas."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.backends.base import TrainRow
from sdpo_core.errors import DataError
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.oracles import policy, returns
from tests.sdpo_core.algorithms.dense import DenseModel, clipped, divergence_terms, weighed
from tests.sdpo_core.algorithms.groups import (
    assert_policy_step,
    assert_step,
    by_response,
    make_setting,
    responses,
    scores_of,
    three_groups,
    token_mean,
    with_sampling,
)
from tests.sdpo_core.micro import Base

GRPO_CLIPS: dict[str, Any] = {"low": 0.2, "high": 0.28, "dual_clip": 3.0}
STATIC = {"schedule": "static"}


def task_advantages(groups: Sequence[Group]) -> dict[tuple[int, ...], float]:
    """GRPO's, by the oracle."""
    return by_response(
        groups, [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=False)]
    )


def products(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a * b for a, b in zip(first, second, strict=True)]


def opd(**settings: object) -> dict[str, Any]:
    return {"opd": {"teacher": STATIC, "coefficient": 0.6, **settings}}


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("term", ["anchor", "opd", "opd alone"])
def test_k1_is_taken_off_the_advantage(cell_spec: CellSpec, base: Base, term: str, discount: float) -> None:
    """A - c (own log-ratio and the discounted later ones), under the old weights in both mini-batches."""
    sampled = {"coefficient": 0.6, "discount": discount}
    settings: dict[str, Any] = {"anchor": sampled} if term == "anchor" else opd(**sampled, only=term == "opd alone")
    setting = make_setting(cell_spec, base, arm="grpo", minibatches=2, is_moved=True, **settings)
    groups, start, other = three_groups(base), setting.dense(), setting.start()
    task, batch = task_advantages(groups), setting.build(groups)

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        task_part = 0.0 if term == "opd alone" else task[row.row.response_ids]
        gaps = [old - there for old, there in zip(start.own(row.row), other.own(row.row), strict=True)]
        own = [task_part - 0.6 * value for value in returns.returns(gaps, discount=discount)]
        return clipped(now, start.own(row.row), own, **GRPO_CLIPS)

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=token_mean(rows), minibatch=minibatch, learning_rate=2e-3)


@pytest.mark.parametrize("term", ["anchor", "opd", "opd alone"])
def test_k2_is_half_the_square_in_the_loss(cell_spec: CellSpec, base: Base, term: str) -> None:
    """Of the current log-ratio, times min(p / p_old, 2), beside the surrogate; its slope is the log-ratio itself."""
    sampled = {"coefficient": 0.6, "estimator": "k2", "placement": "loss"}
    settings: dict[str, Any] = {"anchor": sampled} if term == "anchor" else opd(**sampled, only=term == "opd alone")
    setting = make_setting(cell_spec, base, arm="grpo", minibatches=2, is_moved=True, **settings)
    groups, start, other = three_groups(base), setting.dense(), setting.start()
    task, batch = task_advantages(groups), setting.build(groups)

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        gain, before = 0.0 if term == "opd alone" else task[row.row.response_ids], start.own(row.row)
        losses, slopes = clipped(now, before, [gain] * len(now), **GRPO_CLIPS)
        for token, (new, old, there) in enumerate(zip(now, before, other.own(row.row), strict=True)):
            weight = 0.6 * min(policy.ratio(new, old), 2.0)
            losses[token] += weight * policy.kl_estimates(new, there)[1]
            slopes[token] += weight * (new - there)
        return losses, slopes

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=token_mean(rows), minibatch=minibatch, learning_rate=2e-3)


@pytest.mark.parametrize(
    ("arm", "settings"),
    [
        ("grpo", {"normalise_std": True}),
        ("gspo", {}),
        ("sapo", {}),
        ("reinforce-pp", {}),
        ("reinforce-pp-baseline", {}),
        ("ppo", {}),
    ],
)
def test_twice_the_coefficient_is_twice_the_gradient(
    cell_spec: CellSpec, base: Base, arm: str, settings: Mapping[str, Any]
) -> None:
    """Contract 16: with equal rewards the whitened task is silent, and distillation keeps its coefficient's size."""
    found = []
    for coefficient in (0.5, 1.0):
        setting = make_setting(cell_spec, base, arm=arm, is_moved=True, **settings, **opd(coefficient=coefficient))
        groups = [
            replace(
                group,
                members=tuple(replace(member, verdict=replace(member.verdict, score=0.0)) for member in group.members),
            )
            for group in three_groups(base)
        ]
        setting.update(setting.build(groups))
        found.append(setting.gradient())
    for name, value in found[0].items():
        assert name.startswith("value_head") or value.abs().max() > 1e-4
        torch.testing.assert_close(found[1][name], 2 * value, rtol=0, atol=2e-6 * float(value.abs().max()), msg=name)


CORRECTED: Mapping[str, Mapping[str, Any]] = {
    "surrogate": {"arm": "rloo"},
    "divergence": {
        "arm": "grpo",
        **opd(estimator="divergence", placement="loss", only=True, divergence={"support": "full", "top_k": None}),
    },
    "sampled": {"arm": "grpo", **opd(estimator="k2", placement="loss", only=True)},
}


@pytest.mark.parametrize("cap", [0.9, 2.0])
@pytest.mark.parametrize("term", CORRECTED)
def test_rollout_correction_weighs_by_the_engines_probabilities(
    cell_spec: CellSpec, base: Base, cap: float, term: str
) -> None:
    """min(p_old / p_engine, cap) of each token, a constant, for each term whose samples are the engine's."""
    setting = make_setting(cell_spec, base, is_moved=True, minibatches=2, rollout_cap=cap, **CORRECTED[term])
    groups, start, teacher = three_groups(base), setting.dense(), setting.start()
    plain = {row.row.response_ids: start.own(row.row) for part in setting.build(groups).minibatches for row in part}
    generator = np.random.default_rng(3)
    engine = {ids: [logp + float(generator.normal(0, 0.3)) for logp in logps] for ids, logps in plain.items()}
    batch = setting.build(with_sampling(groups, engine))
    advantages = by_response(groups, [value for row in scores_of(groups) for value in returns.leave_one_out(row)])
    seen: list[float] = []

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        ids, now = row.row.response_ids, dense.own_logps(row.row)
        weights = [min(policy.ratio(a, b), cap) / tokens for a, b in zip(plain[ids], engine[ids], strict=True)]
        seen.extend(weight * tokens for weight in weights)
        if term == "surrogate":
            losses, slopes = clipped(now.tolist(), plain[ids], [advantages[ids]] * len(plain[ids]))
            return weighed(products(weights, slopes), now), sum(products(weights, losses))
        pairs = zip(now.tolist(), plain[ids], strict=True)
        shares = products(weights, [0.6 * min(policy.ratio(*pair), 2.0) for pair in pairs])
        if term == "sampled":
            gaps = [new - there for new, there in zip(now.tolist(), teacher.own(row.row), strict=True)]
            halves = [gap**2 / 2 for gap in gaps]
            return weighed(products(shares, gaps), now), sum(products(shares, halves))
        terms, values = divergence_terms(dense.logps(row.row), teacher.masses(row.row), None, alpha=0.5)
        return weighed(shares, terms), sum(products(shares, values))

    for minibatch, rows in enumerate(batch.minibatches):
        tokens = sum(len(row.row.response_ids) for row in rows)
        assert_step(setting, batch, row_loss, minibatch=minibatch)
    assert min(seen) < 0.8
    assert (seen.count(cap) > 3) == (cap == 0.9)


def test_engine_probabilities_count_only_where_declared(cell_spec: CellSpec, base: Base) -> None:
    """Without a cap the batch's update does not depend on them."""
    stats = []
    for offset in (0.0, -0.7):
        setting = make_setting(cell_spec, base, arm="rloo")
        groups = three_groups(base)
        batch = setting.build(with_sampling(groups, {ids: [offset] * len(ids) for ids in responses(groups)}))
        found = setting.update(batch)
        stats.append((found.loss, found.grad_norm, found.sums["entropy"]))
        # Its gap is measured all the same.
        assert found.sums["sampled_tokens"] == sum(map(len, responses(groups)))
    assert stats[0] == stats[1]


def test_drift_and_sampled_kl_are_means_over_tokens(cell_spec: CellSpec, base: Base) -> None:
    """Contract 20: k3 to the base and k1 to the teacher, over all tokens, not over rollouts."""
    setting = make_setting(cell_spec, base, arm="grpo", is_moved=True, anchor={"coefficient": 0.1}, **opd())
    groups, start, other = three_groups(base), setting.dense(), setting.start()
    batch = setting.build(groups)
    triples = [
        policy.kl_estimates(new, there)
        for row in batch.minibatches[0]
        for new, there in zip(start.own(row.row), other.own(row.row), strict=True)
    ]
    assert len(triples) == 32
    assert batch.metrics["distill/tokens"] == 32
    assert batch.metrics["distill/sampled_kl"] == pytest.approx(sum(k1 for k1, _, _ in triples) / 32, abs=1e-5)
    assert batch.metrics["drift/kl_to_base"] == pytest.approx(sum(k3 for _, _, k3 in triples) / 32, rel=1e-4)
    entropies = [
        -sum(mass * np.log(mass) for mass in masses) for row in batch.minibatches[0] for masses in other.masses(row.row)
    ]
    assert batch.metrics["distill/teacher_entropy"] == pytest.approx(sum(entropies) / 32, rel=1e-5)
    assert batch.metrics["cost/teacher_forwards"] == 12
    assert batch.metrics["teacher/failed_fraction"] == 0


def test_too_long_prompt_is_refused(cell_spec: CellSpec, base: Base) -> None:
    setting = make_setting(cell_spec, base, arm="opd", training={"max_prompt_tokens": 20})
    with pytest.raises(DataError, match="train-0: got a prompt of more than 20 tokens"):
        setting.build(three_groups(base))


def test_missing_anchor_is_refused(cell_spec: CellSpec, base: Base) -> None:
    """Contract 33: a term that was asked for and cannot be computed is an error."""
    setting = make_setting(cell_spec, base, arm="grpo-k1")
    with pytest.raises(DataError, match="got none, expected one"):
        replace(setting, workers=replace(setting.workers, anchor=None)).build(three_groups(base))
