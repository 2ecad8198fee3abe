"""PPO: generalised advantages and the value loss against float64 formulas, gradients of policy and value head."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpo_core.errors import DataError
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from tests.oracles import policy, returns
from tests.sdpo_core.algorithms.dense import assert_gradients, clipped, weighed
from tests.sdpo_core.algorithms.groups import Setting, by_response, make_setting, responses, scores_of, three_groups
from tests.sdpo_core.micro import Base

SETTINGS: dict[str, Any] = {"discount": 0.9, "trace_decay": 0.8, "value_coefficient": 0.7}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueHead:
    """The value head in float64."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, setting: Setting) -> "ValueHead":
        head = setting.policy.model.value_head
        assert head is not None
        return cls(
            weight=head.weight.detach().double().requires_grad_(), bias=head.bias.detach().double().requires_grad_()
        )

    def values(self, states: Tensor) -> Tensor:
        return (states @ self.weight.T + self.bias)[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the oracle says of one response before the step."""

    logps: list[float]
    values: list[float]
    advantages: list[float]
    returns: list[float]


def fill_value_head(setting: Setting) -> None:
    """Values that differ by token."""
    head = setting.policy.model.value_head
    assert head is not None
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        head.weight.copy_(0.2 * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.1)


def targets(setting: Setting, groups: Sequence[Group]) -> dict[tuple[int, ...], Target]:
    """By response; whitened over the tokens of the whole step."""
    dense, head = setting.dense(), ValueHead.of(setting)
    rows = [row.row for part in setting.build(groups).minibatches for row in part]
    rows.sort(key=lambda row: responses(groups).index(row.response_ids))
    with torch.no_grad():
        values: list[list[float]] = [head.values(dense.states(row)).tolist() for row in rows]
    scores = [score for group in scores_of(groups) for score in group]
    estimates = [
        returns.generalised_advantages([0.0] * (len(own) - 1) + [score], own, discount=0.9, trace_decay=0.8)
        for own, score in zip(values, scores, strict=True)
    ]
    flat = [value for estimate in estimates for value in estimate]
    white = returns.split(returns.whitened(flat, shift_mean=True), [len(own) for own in values])
    found = [
        Target(
            logps=dense.own(row),
            values=own,
            advantages=gains,
            returns=[a + v for a, v in zip(estimate, own, strict=True)],
        )
        for row, own, gains, estimate in zip(rows, values, white, estimates, strict=True)
    ]
    return by_response(groups, found)


def token_losses(
    target: Target, now: Sequence[float], values: Sequence[float], *, value_clip: float | None
) -> tuple[list[float], list[float], list[float]]:
    """Of each token: the loss, and its slopes in log-probability and value."""
    losses, slopes = clipped(now, target.logps, target.advantages)
    triples = zip(values, target.values, target.returns, strict=True)
    pairs = [policy.value_loss(*triple, clip=value_clip) for triple in triples]
    total = [loss + 0.7 * squared for loss, (squared, _) in zip(losses, pairs, strict=True)]
    return total, slopes, [0.7 * pull for _, pull in pairs]


@pytest.mark.parametrize("value_clip", [0.05, None])
def test_gradient_is_that_of_surrogate_and_value_loss(
    cell_spec: CellSpec, base: Base, value_clip: float | None
) -> None:
    """Two mini-batches with values that differ by token: gradients of the body, of the head's weight and its bias."""
    setting = make_setting(cell_spec, base, arm="ppo", minibatches=2, value_clip=value_clip, **SETTINGS)
    fill_value_head(setting)
    groups = three_groups(base)
    known, batch = targets(setting, groups), setting.build(groups)
    held = 0
    for minibatch, rows in enumerate(batch.minibatches):
        dense, head = setting.dense(), ValueHead.of(setting)
        tokens = sum(len(row.row.response_ids) for row in rows)
        loss, total = torch.zeros((), dtype=torch.float64), 0.0
        for row in rows:
            now, value = dense.own_logps(row.row), head.values(dense.states(row.row))
            target = known[row.row.response_ids]
            parts, slopes, pulls = token_losses(target, now.tolist(), value.tolist(), value_clip=value_clip)
            loss = loss + (weighed(slopes, now) + weighed(pulls, value)) / tokens
            total += sum(parts) / tokens
            held += pulls.count(0.0)
        stats = setting.update(batch, minibatch=minibatch, learning_rate=6e-3)
        assert stats.loss == pytest.approx(total, rel=1e-4)
        expected = dense.gradients(loss, also={"value_head.weight": head.weight, "value_head.bias": head.bias})
        assert_gradients(setting.gradient(), expected)
    assert (held > 0) == (value_clip is not None)


def test_value_head_starts_at_zero_and_learns(cell_spec: CellSpec, base: Base) -> None:
    """A new critic says 0 of everything, so its first loss is the mean of half the squared returns."""
    setting = make_setting(cell_spec, base, arm="ppo", **SETTINGS)
    groups = three_groups(base)
    known, batch = targets(setting, groups), setting.build(groups)
    (rows,) = batch.minibatches
    assert all(row.old_values is not None and not row.old_values.any() for row in rows)
    expected = [value**2 / 2 for target in known.values() for value in target.returns]
    stats = setting.update(batch)
    metrics = setting.arm.after_update([stats], tools=setting.tools())
    assert metrics["train/value_loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert ValueHead.of(setting).weight.abs().max() > 0
    assert ValueHead.of(setting).bias.abs() > 0


def test_policy_without_a_value_head_is_refused(cell_spec: CellSpec, base: Base) -> None:
    """Contract 33: values that nobody computed are not zeros."""
    setting = make_setting(cell_spec, base, arm="ppo")
    headless = make_setting(cell_spec, base, arm="grpo").workers
    with pytest.raises(DataError, match="got no values"):
        replace(setting, workers=headless).build(three_groups(base))
