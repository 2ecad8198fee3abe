"""Probing base weights: how good the model is plain, with a right demonstration, and with feedback on a wrong answer.

SDPO can only teach what the context adds, so a demonstration-conditioned model that is no better than the plain one
means that nothing can be learned from it, and says so before a cell is trained.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdpo_core import random_streams
from sdpo_core.evaluate import evaluate
from sdpo_core.records import Grade, Message, Problem
from sdpo_core.rollout.base import RolloutEngine
from sdpo_core.specs import ProbeSpec
from sdpo_core.teacher.context import TeacherContext, teacher_messages
from sdpo_core.text import ChatTokenizer

_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOutcome:
    """Accuracies are avg@k; `feedback_accuracy` is None where grading gives no feedback on the wrong answers."""

    dataset: str
    dev_problems: int
    dev_accuracy: float
    demonstration_accuracy: float
    feedback_accuracy: float | None
    test_problems: int
    test_accuracy: float
    test_format_rate: float


def probe(
    spec: ProbeSpec,
    *,
    dev: Sequence[Problem],
    test: Sequence[Problem],
    engine: RolloutEngine,
    text: ChatTokenizer,
    grade: Grade,
    right: Callable[[Problem], str],
    wrong: Callable[[Problem, int], str],
) -> ProbeOutcome:
    """Probe the weights `engine` samples with.

    `right(problem)` is a correct response as a sibling would give it, `wrong(problem, key)` a wrong one drawn from the
    stream at `key`; feedback is the grader's own.
    """
    dev, test = dev[: spec.evaluation.dev_problems], test[: spec.evaluation.test_problems]

    def scores(problems: Sequence[Problem], prompts: Sequence[Sequence[Message]] | None = None) -> tuple[float, float]:
        outcome = evaluate(
            problems,
            prompts=prompts,
            engine=engine,
            text=text,
            grade=grade,
            spec=spec.evaluation,
            max_response_tokens=spec.max_response_tokens,
            seed=_SEED,
        )
        return outcome.accuracy, outcome.format_rate

    shown = [teacher_messages(p, TeacherContext(demonstration=right(p))) for p in dev]
    feedback = [
        grade(p, wrong(p, random_streams.stream_key(_SEED, random_streams.EVALUATION, p.id)), False).feedback
        for p in dev
    ]
    told = [teacher_messages(p, TeacherContext(feedback=words)) for p, words in zip(dev, feedback, strict=True)]
    test_accuracy, test_format_rate = scores(test)
    return ProbeOutcome(
        dataset=spec.dataset,
        dev_problems=len(dev),
        dev_accuracy=scores(dev)[0],
        demonstration_accuracy=scores(dev, shown)[0],
        feedback_accuracy=scores(dev, told)[0] if all(feedback) else None,
        test_problems=len(test),
        test_accuracy=test_accuracy,
        test_format_rate=test_format_rate,
    )
