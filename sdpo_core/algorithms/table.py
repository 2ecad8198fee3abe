"""Algorithms by the name their spec carries."""

from collections.abc import Callable
from typing import Any

from sdpo_core.algorithms.base import Algorithm
from sdpo_core.algorithms.grpo import grpo
from sdpo_core.algorithms.gspo import gspo
from sdpo_core.algorithms.opsd import opsd
from sdpo_core.algorithms.ppo import ppo
from sdpo_core.algorithms.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from sdpo_core.algorithms.rloo import rloo
from sdpo_core.algorithms.sapo import sapo
from sdpo_core.algorithms.sdpo import sdpo
from sdpo_core.specs import CellSpec

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "grpo": grpo,
    "gspo": gspo,
    "sapo": sapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ppo": ppo,
    "sdpo": sdpo,
    "opsd": opsd,
}


def algorithm(spec: CellSpec) -> Algorithm:
    """The algorithm of a cell."""
    return ALGORITHMS[spec.algorithm.name](spec.algorithm)
