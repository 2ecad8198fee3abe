"""The warm-ups by task, and `warmup_examples`: the one way to them."""

from collections.abc import Iterator, Sequence

from numpy.random import Generator

from data_prep.warmups.base import Shares, Warmup
from data_prep.warmups.mcq import MCQ
from data_prep.warmups.spell_backward import SPELL_BACKWARD
from data_prep.warmups.tool_call import TOOL_CALL
from sdpo_core.errors import SpecError
from sdpo_core.records import Problem, WarmupExample

WARMUPS: dict[str, Warmup] = {
    "mcq": MCQ,
    "spell_backward": SPELL_BACKWARD,
    "tool_call": TOOL_CALL,
}


def warmup(task: str) -> Warmup:
    """What a task offers for warm-up and probes; SpecError when it offers nothing."""
    if task not in WARMUPS:
        raise SpecError(
            f"warmup: got task {task!r}, expected one of {', '.join(WARMUPS)}. Add what its probes show to "
            "data_prep/warmups."
        )
    return WARMUPS[task]


def warmup_examples(
    task: str, problems: Sequence[Problem], *, shares: Shares, rng: Generator
) -> Iterator[WarmupExample]:
    """An endless stream of warm-up examples; the same generator state gives the same stream.

    Raises:
        SpecError: the task has no warm-up, or there are no problems to make examples from.
    """
    maker = warmup(task).example
    if maker is None:
        raise SpecError(
            f"warmup: got task {task!r}, expected one with a warm-up. Start this task from a pretrained model."
        )
    if not problems:
        raise SpecError(f"warmup: got 0 problems of task {task!r}, expected at least 1. Prepare a data set with rows.")

    def examples() -> Iterator[WarmupExample]:
        while True:
            first, second = (problems[int(rng.integers(len(problems)))] for _ in range(2))
            yield maker(first, second, shares=shares, rng=rng)

    return examples()
