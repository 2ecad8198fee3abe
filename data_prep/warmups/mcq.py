"""Warm-up for multiple choice: teaches the answer format and how to use teacher context, never a gold label.

Every letter is drawn without a look at the gold, so that the warmed-up model answers at chance level.
"""

from collections.abc import Iterator, Sequence

from numpy.random import Generator

from data_prep.feedback import Finding, feedback_text
from sdpo_core.records import Problem, WarmupExample

# Shares of examples by teacher context; the rest has feedback.
PLAIN_SHARE = 0.50
DEMONSTRATION_SHARE = 0.25

RESPONSE = "<answer>\n{label}\n</answer>"


def mcq_examples(problems: Sequence[Problem], *, rng: Generator) -> Iterator[WarmupExample]:
    """Endless examples: plain, with a demonstration to copy, with feedback that excludes a letter."""
    while True:
        yield _example(problems[int(rng.integers(len(problems)))], rng=rng)


def _example(problem: Problem, *, rng: Generator) -> WarmupExample:
    labels = [choice["label"] for choice in problem.reference["choices"]]
    label = labels[int(rng.integers(len(labels)))]
    kind = rng.random()
    response = RESPONSE.format(label=label)
    if kind < PLAIN_SHARE:
        return WarmupExample(problem=problem, response=response)
    if kind < PLAIN_SHARE + DEMONSTRATION_SHARE:
        return WarmupExample(problem=problem, response=response, demonstration=response)
    others = [other for other in labels if other != label]
    other = others[int(rng.integers(len(others)))]
    return WarmupExample(problem=problem, response=RESPONSE.format(label=other), feedback=wrong_label_feedback(label))


def wrong_label_feedback(label: str) -> str:
    """What grading says of a wrong label, also where the label happens to be the gold one."""
    finding = Finding(reason="wrong_label", gold="", format_ok=True, facts={"label": label})
    return feedback_text("mcq", finding=finding, level="diagnostic")
