"""GRPO: batches and gradients against a float64 formula, on-policy and over several optimizer steps."""

import pytest
import torch
from torch import Tensor

from sdpo_core.algorithms.base import Batch, deal
from sdpo_core.algorithms.grpo import Grpo
from sdpo_core.cell import Workers
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec, GrpoSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.groups import DenseModel, make_group, make_tools
from tests.sdpo_core.micro import Base, make_spec, plain_workers

WIDE = {"max_grad_norm": 1e9}  # so that the gradient left behind is the loss's own


def make_groups(base: Base) -> list[Group]:
    """A mixed group, one of equal scores, and one with a partial score."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 0, 0, 0), lengths=(2, 2, 4, 1)),
        make_group(base, position=2, scores=(0.5, 0, 1, 0), lengths=(1, 6, 2, 3)),
    ]


def build(
    cell_spec: CellSpec, base: Base, **algorithm: object
) -> tuple[CellSpec, Workers, Batch, dict[tuple[int, ...], float]]:
    """The batch, and the advantage of each response by the oracle."""
    spec = make_spec(cell_spec, arm="grpo", algorithm=algorithm, optimizer=WIDE, training={"temperature": 0.8})
    assert isinstance(spec.algorithm, GrpoSpec)
    workers = plain_workers(spec, folder=base.folder)
    groups = make_groups(base)
    batch = Grpo(spec.algorithm).build(groups, num_rejected=0, tools=make_tools(spec, base=base, workers=workers))
    advantages: dict[tuple[int, ...], float] = {}
    for group in groups:
        scores = [member.verdict.score for member in group.members]
        values = policy.advantages(scores, normalise_std=spec.algorithm.normalise_std)
        responses = [member.rollout.response_ids for member in group.members]
        advantages |= dict(zip(responses, values, strict=True))
    return spec, workers, batch, advantages


@pytest.mark.parametrize("normalise_std", [False, True])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_on_policy_gradient_is_the_policy_gradient(
    cell_spec: CellSpec, base: Base, normalise_std: bool, reduction: str
) -> None:
    """-mean of A log p, the group of equal scores in the denominator; the value is -mean A, since every ratio is 1."""
    _, workers, batch, advantages = build(cell_spec, base, normalise_std=normalise_std, reduction=reduction)
    (rows,) = batch.minibatches
    assert len(rows) == 12
    assert all(row.old_logps is None for row in rows)
    dense = DenseModel(base, workers.student.weights())
    stats = workers.student.update(rows, batch.objective, learning_rate=1e-3)
    tokens = sum(len(row.row.response_ids) for row in rows)
    surrogate, value = torch.zeros((), dtype=torch.float64), 0.0
    for row in rows:
        length = len(row.row.response_ids)
        share = 1 / tokens if reduction == "token_mean" else 1 / (12 * length)
        advantage = advantages[row.row.response_ids]
        surrogate = surrogate - share * advantage * dense.own_logps(row.row, temperature=0.8).sum()
        value -= share * advantage * length
    assert stats.loss == pytest.approx(value, abs=1e-6)
    dense.assert_gradient(surrogate, workers=workers)


def clipped(now: Tensor, *, before: Tensor, advantage: float, spec: GrpoSpec) -> tuple[Tensor, int]:
    """The clipped surrogate of a row, by cases, with the number of its tokens that a clip holds."""
    assert spec.dual_clip is not None
    ratio = (now - before.detach()).exp()
    if advantage >= 0:
        is_held = ratio > 1 + spec.clip_high
        bound = torch.full_like(now, -advantage * (1 + spec.clip_high))
    else:
        is_held = (ratio < 1 - spec.clip_low) | (ratio > spec.dual_clip)
        bound = -advantage * torch.where(ratio < 1, 1 - spec.clip_low, spec.dual_clip).detach()
    loss = torch.where(is_held, bound, -advantage * ratio)
    return loss.sum(), int(is_held.sum()) if advantage else 0


def test_later_minibatches_are_off_policy_and_clipped(cell_spec: CellSpec, base: Base) -> None:
    """Three optimizer steps at a rate that moves ratios past the clips; old log-probabilities are those before all."""
    spec, workers, batch, advantages = build(cell_spec, base, minibatches=3, clip_high=0.2)
    assert isinstance(spec.algorithm, GrpoSpec)
    assert [len(rows) for rows in batch.minibatches] == [4, 4, 4]
    start = DenseModel(base, workers.student.weights())
    held = free = 0
    for rows in batch.minibatches:
        dense = DenseModel(base, workers.student.weights())
        stats = workers.student.update(rows, batch.objective, learning_rate=4e-3)
        tokens = sum(len(row.row.response_ids) for row in rows)
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows:
            now, before = (model.own_logps(row.row, temperature=0.8) for model in (dense, start))
            assert row.old_logps is not None
            torch.testing.assert_close(torch.tensor(row.old_logps).double(), before, rtol=0, atol=1e-5)
            advantage = advantages[row.row.response_ids]
            part, count = clipped(now, before=before, advantage=advantage, spec=spec.algorithm)
            loss, held, free = loss + part / tokens, held + count, free + len(now) - count
        assert stats.loss == pytest.approx(float(loss.detach()), abs=2e-5)
        dense.assert_gradient(loss, workers=workers)
    assert held > 3
    assert free > 3


def test_batch_of_grpo_measures_nothing_of_its_own(cell_spec: CellSpec, base: Base) -> None:
    spec, workers, batch, _ = build(cell_spec, base)
    assert isinstance(spec.algorithm, GrpoSpec)
    arm = Grpo(spec.algorithm)
    assert (batch.metrics, dict(batch.notes), arm.traits) == ({}, {}, frozenset())
    tools = make_tools(spec, base=base, workers=workers)
    assert arm.after_update([], tools=tools) == {}
    assert arm.accepts(make_groups(base)[1], tools=tools) is True


def test_deal_spreads_neighbours_over_the_hands() -> None:
    assert deal(7, 3) == ((0, 3, 6), (1, 4), (2, 5))
    assert deal(2, 3) == ((0,), (1,), ())
