"""Clipped value loss: oracle, worked tokens, extremes."""

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.value_loss import value_loss
from tests.oracles import distributions, policy
from tests.sdpo_core.objectives.tensors import depends, double, gradient, relative_error

numbers = st.floats(-3, 3)
Token = tuple[float, float, float]


def is_at_an_edge(token: Token, *, clip: float) -> bool:
    """Whether the clip is just met, or both errors are equal: there the slope is one-sided."""
    value, old_value, target = token
    held = old_value + math.copysign(clip, value - old_value)
    return abs(abs(value - old_value) - clip) < 1e-6 or abs(abs(value - target) - abs(held - target)) < 1e-6


@pytest.mark.parametrize(
    ("value", "old_value", "target", "loss", "slope"),
    [
        (1.0, 0.9, 0.0, 0.5, 1.0),  # within the clip: (1 - 0)^2 / 2
        (1.0, 0.0, 2.0, 1.62, 0.0),  # moved towards the target by 1, held at 0.2: (0.2 - 2)^2 / 2
        (1.0, 0.0, -1.0, 2.0, 2.0),  # moved away: 2^2 / 2 is the larger
        (2.0, 0.0, 0.5, 1.125, 1.5),  # moved past the target: 1.5^2 / 2 against (0.2 - 0.5)^2 / 2
    ],
)
def test_value_loss_of_hand_worked_tokens(
    value: float, old_value: float, target: float, loss: float, slope: float
) -> None:
    """Clip 0.2."""
    at = double([value], requires_grad=True)
    found = value_loss(at, double([old_value]), double([target]), clip=0.2)
    assert found.item() == pytest.approx(loss, abs=1e-14)
    assert gradient(found, at=at).item() == pytest.approx(slope, abs=1e-14)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.one_of(st.none(), st.floats(0.1, 2)))
@settings(max_examples=100, deadline=None)
def test_value_loss_is_the_oracles_in_value_and_gradient(tokens: list[Token], clip: float | None) -> None:
    assume(clip is None or not any(is_at_an_edge(token, clip=clip) for token in tokens))
    value, old_value, target = (double(column) for column in zip(*tokens, strict=True))
    value.requires_grad_()
    loss = value_loss(value, old_value, target, clip=clip)
    losses, slopes = zip(*(policy.value_loss(*token, clip=clip) for token in tokens), strict=True)
    assert loss.tolist() == pytest.approx(losses, abs=1e-14)
    assert gradient(loss, at=value).tolist() == pytest.approx(slopes, abs=1e-14)


@pytest.mark.parametrize("value", [-1.0, 0.1, 0.7, 2.5])
def test_value_loss_gradient_is_the_slope_of_the_oracles_value(value: float) -> None:
    at = double([value], requires_grad=True)
    slope = gradient(value_loss(at, double([0.0]), double([1.0]), clip=0.2), at=at)
    slopes = distributions.finite_differences(
        lambda point: policy.value_loss(point[0], 0.0, 1.0, clip=0.2)[0], [value], step=1e-5
    )
    assert slope.tolist() == pytest.approx(slopes, abs=1e-9)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6), st.floats(0.1, 2))
@settings(max_examples=40, deadline=None)
def test_value_loss_with_a_clip_is_at_least_the_plain_one(tokens: list[Token], clip: float) -> None:
    value, old_value, target = (double(column) for column in zip(*tokens, strict=True))
    assert (value_loss(value, old_value, target, clip=clip) >= value_loss(value, old_value, target, clip=None)).all()


def test_value_loss_spares_the_old_value_and_the_target_and_takes_no_token() -> None:
    old_value, target = double([0.5], requires_grad=True), double([2.0], requires_grad=True)
    loss = value_loss(double([1.0], requires_grad=True), old_value, target, clip=0.2)
    assert not depends(loss, on=old_value)
    assert not depends(loss, on=target)
    nothing = torch.zeros(0)
    assert value_loss(nothing, nothing, nothing, clip=0.2).shape == (0,)


@pytest.mark.parametrize("clip", [0.0, -0.2, math.nan])
def test_value_loss_refuses_a_clip_that_is_not_positive(clip: float) -> None:
    one = torch.zeros(1)
    with pytest.raises(SpecError, match="got clip"):
        value_loss(one, one, one, clip=clip)


@pytest.mark.parametrize("name", ["value", "old_value", "returns"])
def test_value_loss_refuses_what_is_not_finite(name: str) -> None:
    values = {part: torch.tensor([math.nan if part == name else 0.0]) for part in ("value", "old_value", "returns")}
    with pytest.raises(DataError, match=f"got {name} nan at token 0"):
        value_loss(*values.values(), clip=0.2)


def test_value_loss_is_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """10,000 random tokens; both precisions and the oracle start from the same float32 numbers."""
    source = random.Random(0)
    low = torch.tensor([[source.gauss(0, 1) for _ in range(3)] for _ in range(10_000)])
    # Where value and target agree to rounding, so does nothing else.
    low = low[(low[:, 0] - low[:, 2]).abs() > 1e-2]
    kept = [row for row in low.tolist() if not is_at_an_edge(tuple(row), clip=0.2)]
    losses, slopes = (double(part) for part in zip(*(policy.value_loss(*row, clip=0.2) for row in kept), strict=True))
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        value, old_value, target = torch.tensor(kept, dtype=dtype).T.unbind()
        value.requires_grad_()
        loss = value_loss(value, old_value, target, clip=0.2)
        assert relative_error(loss, losses) <= bound
        assert relative_error(gradient(loss, at=value), slopes) <= bound
