"""Algorithms by the name their spec carries."""

from collections.abc import Callable
from typing import Any

from sdpo_core.algorithms.base import Algorithm
from sdpo_core.algorithms.grpo import Grpo
from sdpo_core.algorithms.sdpo import Sdpo
from sdpo_core.specs import CellSpec

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "grpo": Grpo,
    "sdpo": Sdpo,
}


def algorithm(spec: CellSpec) -> Algorithm:
    """The algorithm of a cell."""
    return ALGORITHMS[spec.algorithm.name](spec.algorithm)
