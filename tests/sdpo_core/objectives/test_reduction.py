"""Token weights: exact oracle, worked batch, invariances, empty batches."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.algorithm_specs import Reduction
from sdpo_core.errors import DataError
from sdpo_core.objectives.reduction import token_weights
from tests.oracles import policy

Row = tuple[list[float], bool]

sequences = st.lists(
    st.tuples(st.lists(st.floats(-4, 4), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=6
)


def test_token_weights_of_a_hand_worked_batch() -> None:
    """Lengths 2, 5, 3, the second inactive: 1/5 a token, or 1/(2 x 2) and 1/(2 x 3)."""
    lengths, active = [2, 5, 3], [True, False, True]
    assert token_weights(lengths, active, reduction="token_mean") == [0.2, 0.0, 0.2]
    assert token_weights(lengths, active, reduction="sequence_mean") == [0.25, 0.0, 1 / 6]


@given(sequences, st.sampled_from(["token_mean", "sequence_mean"]))
@settings(max_examples=80, deadline=None)
def test_token_weights_give_the_oracles_mean(rows: list[Row], reduction: Reduction) -> None:
    losses, active = [row for row, _ in rows], [is_active for _, is_active in rows]
    weights = token_weights([len(row) for row in losses], active, reduction=reduction)
    if not any(active):
        assert weights == [0.0] * len(rows)
        return
    total = math.fsum(weight * loss for weight, row in zip(weights, losses, strict=True) for loss in row)
    expected = policy.mean_loss(losses, active, by_sequence=reduction == "sequence_mean")
    # 1e-14: thirty products of size 4, each rounded twice.
    assert total == pytest.approx(float(expected), abs=1e-14)
    mass = sum(Fraction(weight) * len(row) for weight, row in zip(weights, losses, strict=True))
    assert float(mass) == pytest.approx(1.0, abs=1e-15)


@given(sequences, st.sampled_from(["token_mean", "sequence_mean"]), st.integers(0, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_token_weights_are_unmoved_by_an_inactive_or_an_empty_sequence(
    rows: list[Row], reduction: Reduction, length: int, is_empty: bool
) -> None:
    lengths, active = [len(row) for row, _ in rows], [is_active for _, is_active in rows]
    weights = token_weights(lengths, active, reduction=reduction)
    added = token_weights([*lengths, 0 if is_empty else length], [*active, is_empty], reduction=reduction)
    assert added == [*weights, 0.0]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_token_weights_follow_the_order_of_the_sequences(reduction: Reduction) -> None:
    forward = token_weights([4, 1, 7], [True, True, False], reduction=reduction)
    assert token_weights([7, 1, 4], [False, True, True], reduction=reduction) == forward[::-1]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_token_weights_of_nothing_active_are_0(reduction: Reduction) -> None:
    assert token_weights([3, 2], [False, False], reduction=reduction) == [0.0, 0.0]
    assert token_weights([], [], reduction=reduction) == []
    assert token_weights([1], [True], reduction=reduction) == [1.0]


@pytest.mark.parametrize(("lengths", "active"), [([1, 2], [True]), ([1, -2], [True, True])])
def test_token_weights_refuse_lengths_that_do_not_fit(lengths: list[int], active: list[bool]) -> None:
    with pytest.raises(DataError, match="token_weights: got lengths"):
        token_weights(lengths, active, reduction="token_mean")
