"""Amounts of tokens, micro-batches and processes: sums, and the largest of those named so."""

import math

import pytest

from sdpo_core.backends.amounts import put_together


def test_sums_add_up_and_the_largest_stays() -> None:
    total: dict[str, float] = {}
    for gap, tokens in ((0.5, 2.0), (2.0, 3.0), (1.0, 4.0)):
        put_together(total, {"largest_gap": gap, "tokens": tokens})
    put_together(total, {"clipped": 1.0})
    assert total == {"largest_gap": 2.0, "tokens": 9.0, "clipped": 1.0}


def test_largest_may_be_below_zero() -> None:
    total: dict[str, float] = {}
    put_together(total, {"largest_x": -3.0})
    put_together(total, {"largest_x": -4.0})
    assert total == {"largest_x": -3.0}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_no_number_is_not_lost_among_numbers(values: tuple[float, float]) -> None:
    total: dict[str, float] = {}
    for value in values:
        put_together(total, {"largest_x": value, "x": value})
    assert math.isnan(total["largest_x"])
    assert math.isnan(total["x"])
