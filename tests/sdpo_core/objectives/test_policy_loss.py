"""Clipped and soft-gated policy loss, importance weight: oracle, worked tokens, properties, extremes."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.policy_loss import clipped_policy_loss, importance_weight, soft_gate_policy_loss
from tests.oracles import distributions, policy
from tests.sdpo_core.objectives.tensors import depends, double, gradient, relative_error

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


def gated(logp: Tensor, old_logp: Tensor, advantage: Tensor, *, sign_of: Tensor | None = None) -> Tensor:
    return soft_gate_policy_loss(
        logp,
        old_logp,
        advantage,
        sign_of=advantage if sign_of is None else sign_of,
        temperature_positive=1.0,
        temperature_negative=1.05,
    )


def test_soft_gate_policy_loss_of_hand_worked_tokens() -> None:
    """u = 1: sigmoid(0) = 1/2, so f = 2 / tau and slope 1 whatever tau is.

    u = 2, tau 1: f = 4 / (1 + 1/e) = 2.924234; f' = 4 x 0.731059 x 0.268941 = 0.786448, times u: 1.572896.
    u = 2, tau 1.05: f = 3.809524 x 0.740775 = 2.821999; f' = 4 x 0.740775 x 0.259225 = 0.768110, times u: 1.536220.
    """
    logp = double([-1.0, -1.0, math.log(2) - 1, math.log(2) - 1], requires_grad=True)
    advantage = double([3.0, -3.0, 1.0, -1.0])
    loss = gated(logp, double([-1.0] * 4), advantage)
    assert loss.tolist() == pytest.approx([-6.0, 6 / 1.05, -2.924234, 2.821999], abs=1e-5)
    assert gradient(loss, at=logp).tolist() == pytest.approx([-3.0, 3.0, -1.572896, 1.536220], abs=1e-5)


@given(st.lists(st.tuples(logps, logps, advantages), min_size=1, max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_soft_gate_policy_loss_is_the_oracles_in_value_and_gradient(tokens: list[Token], data: st.DataObject) -> None:
    assume(all(abs(abs(new - old) - 20) > 1e-9 for new, old, _ in tokens))
    tasks = data.draw(st.lists(advantages, min_size=len(tokens), max_size=len(tokens)))
    logp, old_logp, advantage = (double(column) for column in zip(*tokens, strict=True))
    logp.requires_grad_()
    loss = gated(logp, old_logp, advantage, sign_of=double(tasks))
    taus = [1.0 if task > 0 else 1.05 for task in tasks]
    values = [policy.soft_gate(*token, temperature=tau) for token, tau in zip(tokens, taus, strict=True)]
    slopes = [policy.soft_gate_slope(*token, temperature=tau) for token, tau in zip(tokens, taus, strict=True)]
    assert loss.tolist() == pytest.approx(values, rel=1e-13)
    # The slope falls like e^-u: a rounding of u of 1e-16 is one of u times that in the slope, held at u = 700.
    assert gradient(loss, at=logp).tolist() == pytest.approx(slopes, rel=1e-11, abs=1e-100)


def test_soft_gate_policy_loss_takes_its_temperature_from_the_task() -> None:
    """A term that turns the advantage's sign leaves the temperature of the response: value 2 / tau at u = 1."""
    logp = double([-1.0, -1.0])
    loss = gated(logp, logp, double([1.0, -1.0]), sign_of=double([0.5, 0.5]))
    assert loss.tolist() == [-2.0, 2.0]
    assert gated(logp, logp, double([1.0, -1.0]), sign_of=double([-0.5, 0.0])).tolist() == [-2 / 1.05, 2 / 1.05]


def test_soft_gate_policy_loss_on_policy_has_the_plain_policy_gradient() -> None:
    logp = torch.tensor([-0.3, -7.0, -1e4], requires_grad=True)
    advantage = torch.tensor([0.5, -0.25, 1.0])
    # 4 / 1.05 x 1/4 x 1.05 is 1 within float32's rounding.
    assert torch.allclose(gradient(gated(logp, logp, advantage), at=logp), -advantage, rtol=2e-7, atol=0)


@given(advantages, st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_soft_gate_policy_loss_weighs_no_token_more_than_its_ratio(advantage: float, gap: float) -> None:
    logp = double([gap - 5], requires_grad=True)
    slope = gradient(gated(logp, double([-5.0]), double([advantage])), at=logp).item()
    assert abs(slope) <= abs(advantage) * math.exp(gap) * (1 + 1e-14)
    assert slope * advantage <= 0


def test_soft_gate_policy_loss_of_log_ratios_of_1e4_is_finite() -> None:
    """u = e^20: sigmoid 1, f = 4 / tau; u = e^-20: f = 4 / tau sigmoid(-tau)."""
    logp = double([0.0, -1e4], requires_grad=True)
    loss = gated(logp, double([-1e4, 0.0]), double([1.0, 1.0]))
    assert loss.tolist() == pytest.approx([-4.0, -4 / (1 + math.e)], rel=1e-8)
    assert gradient(loss, at=logp).tolist() == [0.0, 0.0]


def test_soft_gate_policy_loss_spares_all_but_logp_and_takes_no_token() -> None:
    others = [double([value], requires_grad=True) for value in (-1.0, 1.0, 1.0)]
    loss = gated(double([-1.1], requires_grad=True), *others[:2], sign_of=others[2])
    assert not any(depends(loss, on=other) for other in others)
    nothing = torch.zeros(0)
    assert gated(nothing, nothing, nothing).shape == (0,)


@pytest.mark.parametrize("name", ["logp", "old_logp", "advantage", "sign_of"])
def test_soft_gate_policy_loss_refuses_what_is_not_finite(name: str) -> None:
    values = {
        part: torch.tensor([math.nan if part == name else -1.0])
        for part in ("logp", "old_logp", "advantage", "sign_of")
    }
    with pytest.raises(DataError, match=f"soft_gate_policy_loss: got {name} nan at token 0"):
        gated(values["logp"], values["old_logp"], values["advantage"], sign_of=values["sign_of"])


@pytest.mark.parametrize(("positive", "negative"), [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_soft_gate_policy_loss_refuses_temperatures_that_are_not_positive(positive: float, negative: float) -> None:
    one = torch.zeros(1)
    with pytest.raises(SpecError, match="got temperatures"):
        soft_gate_policy_loss(one, one, one, sign_of=one, temperature_positive=positive, temperature_negative=negative)


def test_policy_losses_are_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """10,000 random tokens; both precisions and the oracle start from the same float32 numbers."""
    source = random.Random(0)
    low = torch.tensor([[source.uniform(-4, 0), source.uniform(-4, 0), source.gauss(0, 1)] for _ in range(10_000)])
    tokens = low.tolist()
    taus = [1.0 if token[2] > 0 else 1.05 for token in tokens]
    pairs = list(zip(tokens, taus, strict=True))
    clips = {"low": 0.2, "high": 0.28, "dual_clip": 3.0}
    expected: dict[Callable[..., Tensor], list[list[float]]] = {
        clipped: [
            [function(*token, **clips) for token in tokens] for function in (policy.surrogate, policy.surrogate_slope)
        ],
        gated: [
            [function(*token, temperature=tau) for token, tau in pairs]
            for function in (policy.soft_gate, policy.soft_gate_slope)
        ],
    }
    weights = double([min(policy.ratio(*token[:2]), 2.0) for token in tokens])
    for numbers, bound in ((low.double(), 1e-10), (low, 2e-5)):
        logp, old_logp, advantage = numbers[:, 0].clone().requires_grad_(), numbers[:, 1], numbers[:, 2]
        for function, (losses, slopes) in expected.items():
            loss = function(logp, old_logp, advantage)
            assert relative_error(loss, double(losses)) <= bound
            assert relative_error(gradient(loss, at=logp), double(slopes)) <= bound
        assert relative_error(importance_weight(logp, old_logp, cap=2.0), weights) <= bound
