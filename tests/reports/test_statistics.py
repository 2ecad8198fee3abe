"""Means and sample sds against hand-worked numbers, and holes that never print as 0."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.statistics import (
    Hole,
    difference,
    display_unit,
    format_number,
    format_spread,
    format_value,
    mean,
    sample_sd,
    spread,
)

HOLES: tuple[Hole, ...] = ("n/a", "missing", "failed", "running", "stale")


def test_sample_sd_hand_worked() -> None:
    # mean of 1, 2, 4 is 7/3; squares of -4/3, -1/3, 5/3 sum to 42/9; over n - 1 = 2: 7/3.
    assert mean([1.0, 2.0, 4.0]) == pytest.approx(7 / 3, abs=1e-15)
    assert sample_sd([1.0, 2.0, 4.0]) == pytest.approx(math.sqrt(7 / 3), abs=1e-15)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12))
def test_sample_sd_equals_the_pairwise_form(values: list[float]) -> None:
    """Oracle without a mean: the variance is the mean squared distance of all ordered pairs, halved."""
    n = len(values)
    pairs = math.fsum((a - b) ** 2 for a in values for b in values)
    # 1e-6 absolute: values of 1e6 square to 1e12, of which float64 keeps 4 decimals.
    assert sample_sd(values) == pytest.approx(math.sqrt(pairs / (2 * n * (n - 1))), rel=1e-9, abs=1e-6)


def test_sample_sd_needs_two_values() -> None:
    assert sample_sd([0.5]) is None
    assert sample_sd([]) is None
    assert mean([]) is None


def test_sample_sd_of_equal_values_is_exactly_zero() -> None:
    assert sample_sd([5.6, 5.6, 5.6]) == 0.0


def test_spread_leaves_holes_out_of_mean_sd_and_n() -> None:
    described = spread([0.5, "failed", 0.7, "missing"])
    assert described.n == 2
    assert described.mean == pytest.approx(0.6)
    assert described.holes == ("failed", "missing")
    assert format_spread(described, unit="fraction") == "0.600 \u00b1 0.141 (n=2 of 4)"


def test_format_spread_of_one_value_has_no_sd() -> None:
    assert format_spread(spread([0.5]), unit="fraction") == "0.500 \u00b1 n/a (n=1)"


def test_format_spread_of_holes_alone_names_each_once() -> None:
    assert format_spread(spread(["failed", "running", "failed"]), unit="s") == "failed, running"
    assert format_spread(spread([]), unit="s") == "n/a"


@pytest.mark.parametrize("hole", HOLES)
def test_format_value_of_a_hole_is_its_word(hole: Hole) -> None:
    assert format_value(hole, unit="bytes") == hole


@pytest.mark.parametrize(
    ("number", "unit", "text"),
    [
        (0.0, "fraction", "0.000"),
        (0.00004, "fraction", "4.0e-05"),
        (-0.00004, "fraction", "-4.0e-05"),
        (0.1234567, "nats", "0.1235"),
        (60.0, "count", "60"),
        (12.5, "count", "12.5"),
        (1841.3, "tokens/s", "1,841"),
        (412.0 * 2**20, "bytes", "412"),
        (0.5 * 2**20, "bytes", "0.500"),
    ],
)
def test_format_number_by_unit(number: float, unit: str, text: str) -> None:
    assert format_number(number, unit=unit) == text


@given(st.floats(-1e9, 1e9).filter(lambda number: number != 0), st.sampled_from(["fraction", "nats", "s", "count"]))
def test_format_number_never_shows_zero_for_what_is_not(number: float, unit: str) -> None:
    assert float(format_number(number, unit=unit).replace(",", "")) != 0


def test_format_spread_sd_has_the_decimals_of_its_mean() -> None:
    assert format_spread(spread([1830.0, 1850.0]), unit="tokens/s") == "1,840 \u00b1 14 (n=2)"
    assert format_spread(spread([0.9, 0.90001]), unit="fraction") == "0.900 \u00b1 <0.001 (n=2)"


def test_difference_keeps_holes_of_both_sides() -> None:
    assert difference([0.75, "running"], baseline=0.5) == (0.25, "running")
    assert difference([0.75, 0.5], baseline="missing") == ("missing", "missing")


def test_display_unit_of_bytes() -> None:
    assert display_unit("bytes") == "MiB"
    assert display_unit("nats") == "nats"
