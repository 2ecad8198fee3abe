"""Clipped policy loss and importance weight: oracle, worked tokens, properties, extremes."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.policy_loss import clipped_policy_loss, importance_weight
from tests.oracles import distributions, policy
from tests.sdpo_core.objectives.tensors import depends, double, gradient

Token = tuple[float, float, float]


logps = st.floats(-30, 0)
advantages = st.floats(-3, 3)


def clipped(logp: Tensor, old_logp: Tensor, advantage: Tensor, *, dual_clip: float | None = 3.0) -> Tensor:
    return clipped_policy_loss(logp, old_logp, advantage, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)


def loss_and_slope(
    logp: Sequence[float], old_logp: Sequence[float], advantage: Sequence[float], *, dual_clip: float | None = 3.0
) -> tuple[list[float], list[float]]:
    student = double(logp, requires_grad=True)
    loss = clipped(student, double(old_logp), double(advantage), dual_clip=dual_clip)
    return loss.tolist(), gradient(loss, at=student).tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: -A, and its slope
        (1.0, -2.0, 2.0, 2.0),
        (1.25, 2.0, -2.5, -2.5),  # below 1.28: free
        (1.5, 2.0, -2.56, 0.0),  # max(-3, -2 x 1.28): held
        (0.5, 2.0, -1.0, -1.0),  # max(-1, -1.6): the pessimistic side is the free one
        (0.5, -2.0, 1.6, 0.0),  # max(1, 2 x 0.8): held
        (1.5, -2.0, 3.0, 3.0),  # max(3, 2.56): free, below the cap of 6
        (4.0, -2.0, 6.0, 0.0),  # min(8, 2 x 3): held by the dual clip
        (4.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_policy_loss_of_hand_worked_tokens(ratio: float, advantage: float, loss: float, slope: float) -> None:
    """Clips 0.8 to 1.28, dual clip 3."""
    (found,), (found_slope,) = loss_and_slope([math.log(ratio) - 1], [-1.0], [advantage])
    assert found == pytest.approx(loss, abs=1e-14)
    assert found_slope == pytest.approx(slope, abs=1e-14)


def test_clipped_policy_loss_without_dual_clip_is_unbounded() -> None:
    (loss,), (slope,) = loss_and_slope([math.log(4.0)], [0.0], [-2.0], dual_clip=None)
    assert loss == pytest.approx(8.0, abs=1e-14)
    assert slope == pytest.approx(8.0, abs=1e-14)


@given(st.lists(st.tuples(logps, logps, advantages), min_size=1, max_size=6), st.sampled_from([None, 1.5, 3.0]))
@settings(max_examples=100, deadline=None)
def test_clipped_policy_loss_is_the_oracles_in_value_and_gradient(tokens: list[Token], dual_clip: float | None) -> None:
    for logp, old_logp, _ in tokens:
        # Where a bound is met the slope is one-sided.
        edges = [math.log(edge) for edge in (0.8, 1.28, 1.5, 3.0)] + [20.0, -20.0]
        assume(all(abs(logp - old_logp - edge) > 1e-9 for edge in edges))
    loss, slope = loss_and_slope(*zip(*tokens, strict=True), dual_clip=dual_clip)
    values = [policy.surrogate(*token, low=0.2, high=0.28, dual_clip=dual_clip) for token in tokens]
    assert loss == pytest.approx(values, rel=1e-13)
    slopes = [policy.surrogate_slope(*token, low=0.2, high=0.28, dual_clip=dual_clip) for token in tokens]
    assert slope == pytest.approx(slopes, rel=1e-13)


@pytest.mark.parametrize("gap", [-1.0, -0.1, 0.1, 0.9, 2.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.7])
def test_clipped_policy_loss_gradient_is_the_slope_of_the_oracles_value(gap: float, advantage: float) -> None:
    def value(at: list[float]) -> float:
        return policy.surrogate(at[0], -2.0, advantage, low=0.2, high=0.28, dual_clip=3.0)

    _, slope = loss_and_slope([gap - 2.0], [-2.0], [advantage])
    # 1e-8: a step of 1e-5 errs by 1e-10 of values up to 4.
    assert slope == pytest.approx(distributions.finite_differences(value, [gap - 2.0], step=1e-5), abs=1e-8)


def test_clipped_policy_loss_spares_old_log_probabilities_and_advantages() -> None:
    old_logp, advantage = double([-1.0], requires_grad=True), double([1.0], requires_grad=True)
    loss = clipped(double([-1.1], requires_grad=True), old_logp, advantage)
    assert not depends(loss, on=old_logp)
    assert not depends(loss, on=advantage)


def test_clipped_policy_loss_on_policy_is_minus_the_advantage_with_the_policy_gradient() -> None:
    """`old_logp` is `logp` itself: the ratio is exactly 1, the slope -A."""
    logp = torch.tensor([-0.3, -7.0, -1e4], requires_grad=True)
    advantage = torch.tensor([0.5, -0.25, 1.0])
    loss = clipped(logp, logp, advantage)
    assert torch.equal(loss.detach(), -advantage)
    slope = gradient(loss, at=logp)
    assert torch.equal(slope, -advantage)


def test_clipped_policy_loss_of_log_ratios_of_1e4_is_finite() -> None:
    loss, slope = loss_and_slope([0.0, -1e4, 0.0, -1e4], [-1e4, 0.0, -1e4, 0.0], [1.0, 1.0, -1.0, -1.0])
    # u is e^20 or e^-20; e^-20 = 2.06e-9. A = 1: -1.28 and -2.06e-9; A = -1: the dual clip, and 0.8.
    assert loss == pytest.approx([-1.28, -math.exp(-20), 3.0, 0.8], rel=1e-12)
    assert slope == [0.0, 0.0, 0.0, 0.0]


def test_clipped_policy_loss_of_a_masked_token_leaves_no_trace() -> None:
    logp = double([-1.0, math.nan, -math.inf, -2.0], requires_grad=True)
    is_response = torch.tensor([True, False, False, True])
    old_logp, advantage = double([-1.1, math.nan, 0.0, -2.1])[is_response], double([1.0, math.nan, 1.0, -1.0])
    loss = clipped(logp[is_response], old_logp, advantage[is_response])
    slope = gradient(loss, at=logp)
    assert slope[1:3].tolist() == [0.0, 0.0]
    assert torch.isfinite(slope).all()


def test_clipped_policy_loss_of_no_token_is_empty() -> None:
    nothing = torch.zeros(0)
    assert clipped(nothing, nothing, nothing).shape == (0,)
    assert importance_weight(nothing, nothing, cap=2.0).shape == (0,)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_clipped_policy_loss_refuses_what_is_not_finite(place: int, value: float) -> None:
    logp, old_logp, advantage = (torch.tensor([-1.0, value if place == i else -1.0]) for i in range(3))
    name = ("logp", "old_logp", "advantage")[place]
    with pytest.raises(DataError, match=rf"got {name} .* at token 1"):
        clipped(logp, old_logp, advantage)


@pytest.mark.parametrize(
    ("clip_low", "clip_high", "dual_clip"), [(-0.1, 0.2, 3.0), (1.1, 0.2, 3.0), (0.2, -0.1, 3.0), (0.2, 0.2, 1.0)]
)
def test_clipped_policy_loss_refuses_clips_out_of_range(clip_low: float, clip_high: float, dual_clip: float) -> None:
    one = torch.zeros(1)
    with pytest.raises(SpecError, match="clipped_policy_loss: got"):
        clipped_policy_loss(one, one, one, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@given(st.lists(st.tuples(logps, logps), min_size=1, max_size=6), st.floats(0.5, 5))
@settings(max_examples=60, deadline=None)
def test_importance_weight_is_the_oracles_ratio_up_to_the_cap(tokens: list[tuple[float, float]], cap: float) -> None:
    logp, old_logp = (double(list(column)) for column in zip(*tokens, strict=True))
    weights = importance_weight(logp, old_logp, cap=cap)
    assert weights.tolist() == pytest.approx([min(policy.ratio(*token), cap) for token in tokens], rel=1e-13)
    # A ratio and its inverse are reciprocal while neither is capped.
    back = importance_weight(old_logp, logp, cap=math.inf)
    forth = importance_weight(logp, old_logp, cap=math.inf)
    assert (forth * back).tolist() == pytest.approx([1.0] * len(tokens), rel=1e-13)


def test_importance_weight_of_hand_worked_tokens_has_no_gradient() -> None:
    """Ratios 1, 3/2, 4 (capped at 2) and e^-1000, held at e^-20."""
    logp = double([0.0, math.log(1.5), math.log(4.0), -1000.0], requires_grad=True)
    weights = importance_weight(logp, torch.zeros(4, dtype=torch.float64), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 1.5, 2.0, math.exp(-20)], rel=1e-14)
    assert not weights.requires_grad


def test_importance_weight_refuses_a_cap_of_0_and_what_is_not_finite() -> None:
    with pytest.raises(SpecError, match="got cap 0"):
        importance_weight(torch.zeros(1), torch.zeros(1), cap=0.0)
    with pytest.raises(DataError, match="got logp nan at token 0"):
        importance_weight(torch.tensor([math.nan]), torch.zeros(1), cap=2.0)
