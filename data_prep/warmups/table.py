"""The warm-ups by task, and `warmup_examples`: the one way to them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from numpy.random import Generator

from data_prep.warmups.mcq import mcq_examples
from data_prep.warmups.spell_backward import spell_backward_examples
from sdpo_core.errors import SpecError
from sdpo_core.records import Problem, WarmupExample


class Warmup(Protocol):
    """An endless stream of examples from the problems of one task."""

    def __call__(self, problems: Sequence[Problem], *, rng: Generator) -> Iterator[WarmupExample]: ...


WARMUPS: dict[str, Warmup] = {
    "mcq": mcq_examples,
    "spell_backward": spell_backward_examples,
}


def warmup_examples(task: str, problems: Sequence[Problem], *, rng: Generator) -> Iterator[WarmupExample]:
    """An endless stream of warm-up examples; the same generator state gives the same stream.

    Raises:
        SpecError: the task has no warm-up, or there are no problems to make examples from.
    """
    if task not in WARMUPS:
        raise SpecError(
            f"warmup: got task {task!r}, expected one of {', '.join(WARMUPS)}. Start this task from a pretrained model."
        )
    if not problems:
        raise SpecError(f"warmup: got 0 problems of task {task!r}, expected at least 1. Prepare a data set with rows.")
    return WARMUPS[task](problems, rng=rng)
