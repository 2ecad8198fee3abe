"""Group advantages: oracle, worked groups, properties, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.errors import DataError
from sdpo_core.objectives.advantages import group_advantages
from tests.oracles import policy

groups = st.integers(2, 8).flatmap(
    lambda size: st.lists(st.lists(st.floats(0, 1), min_size=size, max_size=size), min_size=1, max_size=4)
)


def test_group_advantages_of_a_hand_worked_group() -> None:
    """Scores 1, 0, 0, 1/2: mean 3/8, so 5/8, -3/8, -3/8, 1/8.

    Squares 25 + 9 + 9 + 1 = 44 over 64; sample variance 44/64/3 = 0.22916667, deviation 0.47871355, with the floor
    0.47871455; 0.625, -0.375 and 0.125 over it: 1.3055797, -0.7833478, 0.2611159.
    """
    scores = torch.tensor([[1.0, 0.0, 0.0, 0.5]], dtype=torch.float64)
    assert group_advantages(scores, normalise_std=False).tolist() == [[0.625, -0.375, -0.375, 0.125]]
    expected = [1.3055797, -0.7833478, -0.7833478, 0.2611159]
    assert group_advantages(scores, normalise_std=True)[0].tolist() == pytest.approx(expected, abs=1e-7)


@given(groups, st.booleans())
@settings(max_examples=60, deadline=None)
def test_group_advantages_are_the_oracles_and_sum_to_0(rows: list[list[float]], normalise_std: bool) -> None:
    advantages = group_advantages(torch.tensor(rows, dtype=torch.float64), normalise_std=normalise_std)
    for found, scores in zip(advantages.tolist(), rows, strict=True):
        # 1e-9: a deviation of 0 that the oracle rounds to 1e-17 is divided by 1e-6.
        assert found == pytest.approx(policy.advantages(scores, normalise_std=normalise_std), abs=1e-9)
        assert abs(math.fsum(found)) <= 1e-9


@pytest.mark.parametrize("normalise_std", [False, True])
@pytest.mark.parametrize("score", [0.0, 0.1, 1.0, 1e4])
def test_group_advantages_of_equal_scores_are_exactly_0(score: float, normalise_std: bool) -> None:
    """Also for 0.1, whose float32 mean over 3 or 7 is not 0.1."""
    for size in (2, 3, 7, 8):
        scores = torch.full((2, size), score)
        assert (group_advantages(scores, normalise_std=normalise_std) == 0).all()


def test_group_advantages_of_one_group_ignore_the_others() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.25, 0.5]])
    together = group_advantages(scores, normalise_std=True)
    assert torch.equal(together[1:], group_advantages(scores[1:], normalise_std=True))


def test_group_advantages_of_one_rollout_are_0_and_have_no_deviation() -> None:
    assert group_advantages(torch.tensor([[1.0]]), normalise_std=False).tolist() == [[0.0]]
    with pytest.raises(DataError, match="got 1 rollout a group"):
        group_advantages(torch.tensor([[1.0]]), normalise_std=True)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_group_advantages_refuse_a_score_that_is_not_finite(score: float) -> None:
    with pytest.raises(DataError, match="not finite"):
        group_advantages(torch.tensor([[1.0, score]]), normalise_std=False)


def test_group_advantages_carry_no_gradient() -> None:
    assert not group_advantages(torch.rand(2, 3, requires_grad=True), normalise_std=True).requires_grad
