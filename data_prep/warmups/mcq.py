"""Warm-up for multiple choice: teaches the answer format and how to use teacher context, never a gold label.

Every letter is drawn without a look at the gold, so that the warmed-up model answers at chance level.
"""

from numpy.random import Generator

from data_prep.feedback import Finding, feedback_text
from data_prep.warmups.base import Shares, Warmup
from sdpo_core.records import Problem, WarmupExample

RESPONSE = "<answer>\n{label}\n</answer>"


def _example(problem: Problem, other: Problem, *, shares: Shares, rng: Generator) -> WarmupExample:  # noqa: ARG001
    """Plain, with a demonstration to copy, or with feedback that excludes a letter."""
    label = _draw(_labels(problem), rng=rng)
    kind = rng.random()
    response = RESPONSE.format(label=label)
    if kind < shares.plain:
        return WarmupExample(problem=problem, response=response)
    if kind < shares.plain + shares.demonstration:
        return WarmupExample(problem=problem, response=response, demonstration=response)
    allowed = _draw([one for one in _labels(problem) if one != label], rng=rng)
    return WarmupExample(problem=problem, response=RESPONSE.format(label=allowed), feedback=wrong_label_feedback(label))


def _right(problem: Problem) -> str:
    return RESPONSE.format(label=problem.label)


def _wrong(problem: Problem, rng: Generator) -> str:
    return RESPONSE.format(label=_draw([one for one in _labels(problem) if one != problem.label], rng=rng))


def _labels(problem: Problem) -> list[str]:
    return [choice["label"] for choice in problem.reference["choices"]]


def _draw(labels: list[str], *, rng: Generator) -> str:
    return labels[int(rng.integers(len(labels)))]


def wrong_label_feedback(label: str) -> str:
    """What grading says of a wrong label, also where the label happens to be the gold one."""
    finding = Finding(reason="wrong_label", gold="", format_ok=True, facts={"label": label})
    return feedback_text("mcq", finding=finding, level="diagnostic")


MCQ = Warmup(example=_example, right=_right, wrong=_wrong)
