"""What is said of a number over seeds, and how it is written: mean, sample sd, n, and never a 0 for a hole."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# n/a: the arm does not have it, or it is a mean over nothing. The others: the cell that would hold it is not done.
Hole = Literal["n/a", "missing", "failed", "running", "stale"]
Value = float | Hole

PLUS_MINUS = "\u00b1"
_MEBIBYTE = 2**20
_DECIMALS = {"fraction": 3, "probability": 3, "score": 3, "nats": 4, "loss": 4}


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of no values."""
    return statistics.fmean(values) if values else None


def sample_sd(values: Sequence[float]) -> float | None:
    """Sample standard deviation (divisor n - 1), exactly 0 of equal values; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and sample sd of the `n` numbers among some values; `holes` are the others, in order."""

    mean: float | None
    sd: float | None
    n: int
    holes: tuple[Hole, ...]


def spread(values: Sequence[Value]) -> Spread:
    """Describe values that may hold holes: a hole enters neither mean, sd nor n."""
    numbers = [value for value in values if isinstance(value, float)]
    holes = tuple(value for value in values if not isinstance(value, float))
    return Spread(mean=mean(numbers), sd=sample_sd(numbers), n=len(numbers), holes=holes)


def difference(values: Sequence[Value], *, baseline: Value) -> tuple[Value, ...]:
    """Each value minus one baseline; a hole on either side stays a hole."""
    if not isinstance(baseline, float):
        return (baseline,) * len(values)
    return tuple(value - baseline if isinstance(value, float) else value for value in values)


def display_unit(unit: str) -> str:
    """The unit a number of `unit` is printed in."""
    return "MiB" if unit == "bytes" else unit


def format_number(number: float, *, unit: str) -> str:
    """Write a number at the precision its unit and size deserve; what is not zero never prints as zero."""
    scaled = number / _MEBIBYTE if unit == "bytes" else number
    decimals = _decimals(scaled, unit=unit)
    return f"{scaled:.1e}" if _vanishes(scaled, decimals=decimals) else f"{scaled:,.{decimals}f}"


def _decimals(number: float, *, unit: str) -> int:
    if unit in _DECIMALS:
        return _DECIMALS[unit]
    if unit in ("count", "step") and number == round(number):
        return 0
    return 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 3


def _vanishes(number: float, *, decimals: int) -> bool:
    return 0 < abs(number) < 0.5 * 10.0**-decimals


def format_value(value: Value, *, unit: str) -> str:
    """A number in its unit's precision, or the hole's word."""
    return format_number(value, unit=unit) if isinstance(value, float) else value


def format_holes(holes: Sequence[Hole]) -> str:
    """The words of some holes, each once, in order; `n/a` for none."""
    return ", ".join(dict.fromkeys(holes)) or "n/a"


def format_spread(described: Spread, *, unit: str, with_n: bool = True) -> str:
    """`mean +- sd (n=3)`; the sd of one value is `n/a`; holes are counted (`n=2 of 3`) or, alone, named."""
    if described.mean is None:
        return format_holes(described.holes)
    text = f"{format_number(described.mean, unit=unit)} {PLUS_MINUS} {_format_sd(described, unit=unit)}"
    if not with_n:
        return text
    of_all = f" of {described.n + len(described.holes)}" if described.holes else ""
    return f"{text} (n={described.n}{of_all})"


def _format_sd(described: Spread, *, unit: str) -> str:
    """The sd with the decimals of its mean: `<0.001` when it is smaller than they can show."""
    if described.sd is None or described.mean is None:
        return "n/a"
    scale = _MEBIBYTE if unit == "bytes" else 1
    sd, decimals = described.sd / scale, _decimals(described.mean / scale, unit=unit)
    if _vanishes(sd, decimals=decimals):
        return f"<{10.0**-decimals:.{decimals}f}"
    return f"{sd:,.{decimals}f}"
