"""Token weights: exact oracle, worked batch, invariances of a whole loss, empty batches."""

import math
import random
from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.algorithm_specs import Reduction
from sdpo_core.errors import DataError
from sdpo_core.objectives.divergence import bucket_divergence
from sdpo_core.objectives.reduction import token_weights
from tests.oracles import policy
from tests.sdpo_core.objectives.tensors import gradient

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

Row = tuple[list[float], bool]

sequences = st.lists(
    st.tuples(st.lists(st.floats(-4, 4), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6
)


def test_token_weights_of_a_hand_worked_batch() -> None:
    """Lengths 2, 5, 3, the second inactive: 1/5 a token, 1/(2 x 2) and 1/(2 x 3), or 1/(3 x 2) and 1/(3 x 3)."""
    lengths, active = [2, 5, 3], [True, False, True]
    assert token_weights(lengths, active, reduction="token_mean") == [0.2, 0.0, 0.2]
    assert token_weights(lengths, active, reduction="sequence_mean") == [0.25, 0.0, 1 / 6]
    assert token_weights(lengths, active, reduction="sequence_mean_of_all") == [1 / 6, 0.0, 1 / 9]


@given(sequences, st.sampled_from(REDUCTIONS))
@settings(max_examples=80, deadline=None)
def test_token_weights_give_the_oracles_mean(rows: list[Row], reduction: Reduction) -> None:
    losses, active = [row for row, _ in rows], [is_active for _, is_active in rows]
    weights = token_weights([len(row) for row in losses], active, reduction=reduction)
    if not any(active):
        assert weights == [0.0] * len(rows)
        return
    total = math.fsum(weight * loss for weight, row in zip(weights, losses, strict=True) for loss in row)
    expected = policy.mean_loss(losses, active, reduction=reduction)
    # 1e-14: thirty products of size 4, each rounded twice.
    assert total == pytest.approx(float(expected), abs=1e-14)
    mass = sum(Fraction(weight) * len(row) for weight, row in zip(weights, losses, strict=True))
    share = sum(active) / len(active) if reduction == "sequence_mean_of_all" else 1.0
    assert float(mass) == pytest.approx(share, abs=1e-15)


@given(sequences, st.sampled_from(["token_mean", "sequence_mean"]), st.integers(0, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_token_weights_are_unmoved_by_an_inactive_or_an_empty_sequence(
    rows: list[Row], reduction: Reduction, length: int, is_empty: bool
) -> None:
    lengths, active = [len(row) for row, _ in rows], [is_active for _, is_active in rows]
    weights = token_weights(lengths, active, reduction=reduction)
    added = token_weights([*lengths, 0 if is_empty else length], [*active, is_empty], reduction=reduction)
    assert added == [*weights, 0.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_weights_follow_the_order_of_the_sequences(reduction: Reduction) -> None:
    forward = token_weights([4, 1, 7], [True, True, False], reduction=reduction)
    assert token_weights([7, 1, 4], [False, True, True], reduction=reduction) == forward[::-1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_token_weights_of_nothing_active_are_0(reduction: Reduction) -> None:
    assert token_weights([3, 2], [False, False], reduction=reduction) == [0.0, 0.0]
    assert token_weights([], [], reduction=reduction) == []
    assert token_weights([1], [True], reduction=reduction) == [1.0]


@given(sequences)
@settings(max_examples=40, deadline=None)
def test_token_weights_of_all_sequences_shrink_with_an_inactive_or_an_empty_one(rows: list[Row]) -> None:
    """The reference's dilution: n active of N sequences have n / N of the weight they would have alone."""
    lengths, active = [len(row) for row, _ in rows], [is_active for _, is_active in rows]
    diluted = token_weights([*lengths, 3, 0], [*active, False, True], reduction="sequence_mean_of_all")
    alone = token_weights(lengths, active, reduction="sequence_mean")
    share = sum(active) / (len(rows) + 2)
    assert diluted == pytest.approx([*(weight * share for weight in alone), 0.0, 0.0], rel=1e-15)


@given(sequences, st.sampled_from(REDUCTIONS))
@settings(max_examples=60, deadline=None)
def test_token_weights_of_a_step_dealt_to_mini_batches_add_up_to_its_mean(
    rows: list[Row], reduction: Reduction
) -> None:
    """Odd and even sequences as two mini-batches, with the denominators of both together."""
    losses, active = [row for row, _ in rows], [is_active for _, is_active in rows]
    weights = token_weights([len(row) for row in losses], active, reduction=reduction)
    parts = [
        math.fsum(weight * loss for weight, row in zip(weights[k::2], losses[k::2], strict=True) for loss in row)
        for k in (0, 1)
    ]
    expected = policy.mean_loss(losses, active, reduction=reduction) if any(active) else 0
    assert sum(parts) == pytest.approx(float(expected), abs=1e-14)


def batch_loss(
    student: list[Tensor], teacher: list[Tensor], weights: list[float], *, places: list[int], alpha: float
) -> Tensor:
    """A loss as an algorithm composes it, over the sequences at `places`: no row without weight is selected."""
    places = [place for place in places if weights[place]]
    rows, targets = (torch.cat([side[place] for place in places]) for side in (student, teacher))
    omega = torch.cat([torch.full((len(student[place]),), weights[place]).double() for place in places])
    tables = [torch.cat([z[:, :2], z[:, 2:].logsumexp(1, keepdim=True)], dim=1).log_softmax(1) for z in (rows, targets)]
    return (omega * bucket_divergence(*tables, alpha=alpha)).sum()


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(REDUCTIONS),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_a_loss_is_unmoved_by_masked_sequences_by_order_and_by_splitting(
    shape: list[tuple[int, bool]], reduction: Reduction, alpha: float, seed: int
) -> None:
    """Sequences that carry no loss hold NaN and infinities; theirs is the gradient 0, whatever they hold."""
    shape = [*shape, (2, True)]
    generator, source = torch.Generator().manual_seed(seed), random.Random(seed)
    lengths, active = [length for length, _ in shape], [is_active for _, is_active in shape]
    weights = token_weights(lengths, active, reduction=reduction)
    student, teacher = (
        [
            torch.randn(length, 5, generator=generator, dtype=torch.float64)
            if is_active
            else torch.full((length, 5), source.choice([math.nan, math.inf, -math.inf]), dtype=torch.float64)
            for length, is_active in shape
        ]
        for _ in range(2)
    )
    for rows in student:
        rows.requires_grad_()
    places = list(range(len(shape)))

    def loss_and_slopes(parts: list[list[int]]) -> tuple[float, list[Tensor]]:
        losses, slopes = [], [torch.zeros_like(rows) for rows in student]
        for part in parts:
            if any(weights[place] for place in part):
                loss = batch_loss(student, teacher, weights, places=part, alpha=alpha)
                losses.append(loss.item())
                for place in part:
                    if weights[place]:
                        slopes[place] += gradient(loss, at=student[place])
        return math.fsum(losses), slopes

    loss, slopes = loss_and_slopes([places])
    kept = [place for place in places if active[place]]
    order = source.sample(places, len(places))
    cut = source.randint(0, len(places))
    for parts in ([kept], [order], [places[:cut], places[cut:]], [[place] for place in places]):
        other, others = loss_and_slopes(parts)
        # Sums of at most thirty terms of size 1, in another order.
        assert other == pytest.approx(loss, abs=1e-14)
        for found, expected, is_active in zip(others, slopes, active, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-15)
            assert is_active or (found == 0).all()


@pytest.mark.parametrize(("lengths", "active"), [([1, 2], [True]), ([1, -2], [True, True])])
def test_token_weights_refuse_lengths_that_do_not_fit(lengths: list[int], active: list[bool]) -> None:
    with pytest.raises(DataError, match="token_weights: got lengths"):
        token_weights(lengths, active, reduction="token_mean")
