"""Advantages of groups and of sequences: oracle, worked cases, properties, extremes."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.advantages import (
    discounted_returns,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    whiten,
)
from tests.oracles import policy, returns
from tests.sdpo_core.objectives.tensors import relative_error

groups = st.integers(2, 8).flatmap(
    lambda size: st.lists(st.lists(st.floats(0, 1), min_size=size, max_size=size), min_size=1, max_size=4)
)

ragged = st.lists(st.lists(st.floats(-4, 4), max_size=9), min_size=1, max_size=5)
fractions = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


def joined(rows: Iterable[Sequence[float]]) -> list[float]:
    """The sequences one behind the other."""
    return list(chain.from_iterable(rows))


def flat(values: Sequence[float]) -> Tensor:
    """A float64 tensor, also of no numbers."""
    return torch.tensor(values, dtype=torch.float64)


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


def test_leave_one_out_advantages_of_a_hand_worked_group() -> None:
    """Scores 1, 0, 0, 1/2: the others' means are 1/6, 1/2, 1/2, 1/3."""
    found = leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.5]], dtype=torch.float64))
    assert found[0].tolist() == pytest.approx([5 / 6, -1 / 2, -1 / 2, 1 / 6], abs=1e-15)


@given(groups)
@settings(max_examples=60, deadline=None)
def test_leave_one_out_advantages_are_the_oracles_and_a_multiple_of_the_groups(rows: list[list[float]]) -> None:
    scores = torch.tensor(rows, dtype=torch.float64)
    found = leave_one_out_advantages(scores)
    for row, given_scores in zip(found.tolist(), rows, strict=True):
        assert row == pytest.approx(returns.leave_one_out(given_scores), abs=1e-15)
    size = scores.shape[1]
    expected = group_advantages(scores, normalise_std=False) * size / (size - 1)
    assert torch.allclose(found, expected, rtol=1e-15, atol=1e-16)


@given(groups)
@settings(max_examples=40, deadline=None)
def test_leave_one_out_baseline_of_a_rollout_ignores_its_own_score(rows: list[list[float]]) -> None:
    scores = torch.tensor(rows, dtype=torch.float64)
    moved = scores.clone()
    moved[:, 0] += 1.0
    baseline = scores - leave_one_out_advantages(scores)
    after = moved - leave_one_out_advantages(moved)
    assert torch.allclose(after[:, 0], baseline[:, 0], rtol=0, atol=1e-14)


def test_leave_one_out_advantages_of_equal_scores_are_exactly_0() -> None:
    """Also for 0.1, whose float32 mean over 3 or 7 is not 0.1."""
    for size in (2, 3, 7, 8):
        assert (leave_one_out_advantages(torch.full((2, size), 0.1)) == 0).all()


def test_leave_one_out_advantages_refuse_a_group_of_one_and_what_is_not_finite() -> None:
    with pytest.raises(DataError, match="got 1 rollout a group"):
        leave_one_out_advantages(torch.tensor([[1.0]]))
    with pytest.raises(DataError, match="leave_one_out_advantages: got a score that is not finite"):
        leave_one_out_advantages(torch.tensor([[1.0, math.nan]]))


def test_whiten_of_hand_worked_tokens() -> None:
    """1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14 over 3; root of 4.666667 = 2.160247; -2, -1, 0, 3 over it."""
    values = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    expected = [-0.925820, -0.462910, 0.0, 1.388730]
    assert whiten(values).tolist() == pytest.approx(expected, abs=1e-6)
    assert whiten(values, shift_mean=False).tolist() == pytest.approx([x + 3 for x in expected], abs=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.booleans())
@settings(max_examples=80, deadline=None)
def test_whiten_is_the_oracles(values: list[float], shift_mean: bool) -> None:
    found = whiten(torch.tensor(values, dtype=torch.float64), shift_mean=shift_mean)
    # 1e-10: the oracle's mean of equal values may be off by 1e-15, and is divided by 1e-4.
    assert found.tolist() == pytest.approx(returns.whitened(values, shift_mean=shift_mean), abs=1e-10)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=12, unique=True), st.randoms())
@settings(max_examples=60, deadline=None)
def test_whiten_ignores_order_shift_and_scale(values: list[float], order: random.Random) -> None:
    tokens = torch.tensor(values, dtype=torch.float64)
    places = order.sample(range(len(values)), len(values))
    assert torch.allclose(whiten(tokens)[places], whiten(tokens[places]), rtol=0, atol=1e-8)
    assert torch.allclose(whiten(tokens + 3), whiten(tokens), rtol=0, atol=1e-8)
    if tokens.std() > 0.1:
        # The floor of 1e-8 is at most 1e-6 of the variance.
        assert torch.allclose(whiten(tokens * 7), whiten(tokens), rtol=1e-6, atol=1e-9)
        assert whiten(tokens).std().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e4])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whiten_of_equal_values_is_exactly_0_or_their_mean(value: float, size: int, dtype: torch.dtype) -> None:
    """Also for 0.1, whose float64 mean over 3 is not 0.1."""
    values = torch.full((size,), value, dtype=dtype)
    assert (whiten(values) == 0).all()
    assert torch.equal(whiten(values, shift_mean=False), values)


def test_whiten_of_residues_stays_small() -> None:
    """Values that agree to float32's rounding: 6e-8 over a floor of 1e-4."""
    values = torch.tensor([0.1, 0.1, 0.10000001, 0.1])
    assert 0 < whiten(values).abs().max() < 1e-3


def test_whiten_of_no_token_is_empty_and_of_nan_an_error() -> None:
    assert whiten(torch.zeros(0)).shape == (0,)
    with pytest.raises(DataError, match="whiten: got values nan at token 1"):
        whiten(torch.tensor([1.0, math.nan]))


def test_discounted_returns_of_hand_worked_sequences() -> None:
    """Rewards 1, 2, 4 and 8, 16 at 1/2: 1 + 1 + 1, 2 + 2, 4; 8 + 8, 16. An empty sequence between them."""
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    assert discounted_returns(rewards, [3, 0, 2], discount=0.5).tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
    assert discounted_returns(rewards, [3, 0, 2], discount=0.0).tolist() == rewards.tolist()
    assert discounted_returns(rewards, [3, 0, 2], discount=1.0).tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]


@given(ragged, fractions)
@settings(max_examples=80, deadline=None)
def test_discounted_returns_are_the_oracles(rows: list[list[float]], discount: float) -> None:
    rewards = joined(rows)
    found = discounted_returns(flat(rewards), [len(row) for row in rows], discount=discount)
    expected = [value for row in rows for value in returns.returns(row, discount=discount)]
    # 1e-13: nine terms of size 4, added in another order.
    assert found.tolist() == pytest.approx(expected, abs=1e-13)


@given(ragged, fractions)
@settings(max_examples=40, deadline=None)
def test_discounted_returns_of_a_sequence_ignore_the_others(rows: list[list[float]], discount: float) -> None:
    lengths = [len(row) for row in rows]
    together = discounted_returns(flat(joined(rows)), lengths, discount=discount)
    apart = [discounted_returns(flat(row), [len(row)], discount=discount) for row in rows]
    assert torch.equal(together, torch.cat(apart))


def test_generalised_advantages_of_a_hand_worked_sequence() -> None:
    """Rewards 0, 0, 1, values 1/2, 1/4, 1/2, discount 1/2, trace decay 1/2.

    Surprises: 0 + 1/8 - 1/2 = -3/8; 0 + 1/4 - 1/4 = 0; 1 + 0 - 1/2 = 1/2.
    Advantages at 1/4: 1/2; 0 + 1/8; -3/8 + 1/32 = -11/32. Returns: + values.
    """
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.5])
    found = generalised_advantages(rewards, values, [3], discount=0.5, trace_decay=0.5)
    assert found.advantages.tolist() == [-11 / 32, 1 / 8, 1 / 2]
    assert found.returns.tolist() == [5 / 32, 3 / 8, 1.0]


@given(ragged, fractions, fractions, st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_generalised_advantages_are_the_oracles(
    rows: list[list[float]], discount: float, trace_decay: float, seed: int
) -> None:
    values = [[random.Random(seed + place).uniform(-2, 2) for place in range(len(row))] for row in rows]
    lengths = [len(row) for row in rows]
    found = generalised_advantages(
        flat(joined(rows)), flat(joined(values)), lengths, discount=discount, trace_decay=trace_decay
    )
    expected = [
        returns.generalised_advantages(row, value, discount=discount, trace_decay=trace_decay)
        for row, value in zip(rows, values, strict=True)
    ]
    assert found.advantages.tolist() == pytest.approx(joined(expected), abs=1e-13)
    assert torch.allclose(found.returns, found.advantages + flat(joined(values)), rtol=0, atol=1e-15)


@given(ragged, fractions)
@settings(max_examples=40, deadline=None)
def test_generalised_advantages_at_a_trace_decay_of_1_are_returns_minus_values(
    rows: list[list[float]], discount: float
) -> None:
    rewards, lengths = flat(joined(rows)), [len(row) for row in rows]
    values = rewards.flip(0)
    found = generalised_advantages(rewards, values, lengths, discount=discount, trace_decay=1.0)
    expected = discounted_returns(rewards, lengths, discount=discount)
    assert torch.allclose(found.returns, expected, rtol=0, atol=1e-13)


def test_returns_of_no_token_are_empty() -> None:
    nothing = torch.zeros(0)
    assert discounted_returns(nothing, [], discount=0.5).shape == (0,)
    assert discounted_returns(nothing, [0, 0], discount=0.5).shape == (0,)
    assert generalised_advantages(nothing, nothing, [0], discount=1.0, trace_decay=0.9).returns.shape == (0,)


@pytest.mark.parametrize("lengths", [[1], [1, 2], [3, -1], []])
def test_returns_refuse_lengths_that_do_not_fit(lengths: list[int]) -> None:
    two = torch.zeros(2)
    with pytest.raises(DataError, match="discounted_returns: got lengths"):
        discounted_returns(two, lengths, discount=1.0)
    with pytest.raises(DataError, match="generalised_advantages: got lengths"):
        generalised_advantages(two, two, lengths, discount=1.0, trace_decay=1.0)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_returns_refuse_a_discount_out_of_range(fraction: float) -> None:
    one = torch.zeros(1)
    with pytest.raises(SpecError, match="discounted_returns: got discount"):
        discounted_returns(one, [1], discount=fraction)
    with pytest.raises(SpecError, match="generalised_advantages: got trace_decay"):
        generalised_advantages(one, one, [1], discount=1.0, trace_decay=fraction)


def test_returns_refuse_what_is_not_finite() -> None:
    one, bad = torch.zeros(1), torch.tensor([math.inf])
    with pytest.raises(DataError, match="got rewards inf at token 0"):
        discounted_returns(bad, [1], discount=1.0)
    with pytest.raises(DataError, match="got values inf at token 0"):
        generalised_advantages(one, bad, [1], discount=1.0, trace_decay=1.0)


def test_advantages_of_sequences_carry_no_gradient() -> None:
    scores, tokens = torch.rand(2, 3, requires_grad=True), torch.rand(5, requires_grad=True)
    assert not leave_one_out_advantages(scores).requires_grad
    assert not whiten(tokens).requires_grad
    assert not discounted_returns(tokens, [2, 3], discount=0.5).requires_grad
    found = generalised_advantages(tokens, tokens, [2, 3], discount=0.5, trace_decay=0.5)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad


def test_group_baselines_are_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """1,000 random groups of 8; both precisions and the oracle start from the same float32 numbers."""
    low = torch.rand(1000, 8, generator=torch.Generator().manual_seed(0))
    rows = low.tolist()
    for scores, bound in ((low.double(), 1e-10), (low, 2e-5)):
        for normalise_std in (False, True):
            found = group_advantages(scores, normalise_std=normalise_std)
            expected = [policy.advantages(row, normalise_std=normalise_std) for row in rows]
            assert relative_error(found, torch.tensor(expected, dtype=torch.float64)) <= bound
        expected = [returns.leave_one_out(row) for row in rows]
        assert relative_error(leave_one_out_advantages(scores), torch.tensor(expected, dtype=torch.float64)) <= bound


def test_advantages_are_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """50 random steps of 40 sequences of up to 30 tokens; errors relative to the largest number of the step."""
    for seed in range(50):
        source = random.Random(seed)
        lengths = [source.randint(0, 30) for _ in range(40)]
        rewards, values = (torch.tensor([source.gauss(0, 1) for _ in range(sum(lengths))]) for _ in range(2))
        parts = [returns.split(column.tolist(), lengths) for column in (rewards, values)]
        expected = {
            "whitened": returns.whitened(rewards.tolist(), shift_mean=True),
            "returns": joined(returns.returns(row, discount=0.97) for row in parts[0]),
            "advantages": joined(
                returns.generalised_advantages(row, value, discount=0.97, trace_decay=0.9)
                for row, value in zip(*parts, strict=True)
            ),
        }
        for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            reward, value = rewards.to(dtype), values.to(dtype)
            found = {
                "whitened": whiten(reward),
                "returns": discounted_returns(reward, lengths, discount=0.97),
                "advantages": generalised_advantages(reward, value, lengths, discount=0.97, trace_decay=0.9).advantages,
            }
            for name, target in expected.items():
                assert relative_error(found[name][None], flat(target)[None]) <= bound, name
