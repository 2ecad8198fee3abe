"""Right and wrong tool calls for probing. There is no warm-up: the prompts outgrow what a small model can learn."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.random import Generator

from data_prep.warmups.base import Warmup
from sdpo_core.records import Problem

_FOREIGN = "something else"


def _right(problem: Problem) -> str:
    return _written(problem.reference["calls"])


def _wrong(problem: Problem, rng: Generator) -> str:
    """One argument of one call has another value; a call without arguments gets one."""
    calls = [dict(call) for call in problem.reference["calls"]]
    call = calls[int(rng.integers(len(calls)))]
    names = sorted(call["arguments"]) or ["value"]
    call["arguments"] = {**call["arguments"], names[int(rng.integers(len(names)))]: _FOREIGN}
    return _written(calls)


def _written(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"Action: {call['name']}\nAction Input: {json.dumps(call['arguments'], ensure_ascii=False)}" for call in calls
    )


TOOL_CALL = Warmup(example=None, right=_right, wrong=_wrong)
