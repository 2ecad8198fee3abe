"""What a task offers for the warm-up of a base model and for probing it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from numpy.random import Generator

from sdpo_core.records import Problem, WarmupExample


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of examples with the plain prompt and with a demonstration; the rest shows feedback."""

    plain: float
    demonstration: float


class ExampleMaker(Protocol):
    """Makes one example from a problem; `other` is a second problem, for content that is foreign to the first."""

    def __call__(self, problem: Problem, other: Problem, *, shares: Shares, rng: Generator) -> WarmupExample: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Warmup:
    """`right`: a response that is right, as a demonstration would show it. `wrong`: a plausible one that is not.

    `example`: None for a task that only pretrained models are probed on.
    """

    example: ExampleMaker | None
    right: Callable[[Problem], str]
    wrong: Callable[[Problem, Generator], str]
