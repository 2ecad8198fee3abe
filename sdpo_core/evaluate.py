"""Evaluation by the task's own score: avg@k and pass@k; the teacher and its context play no part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdpo_core import random_streams
from sdpo_core.errors import DataError
from sdpo_core.records import Grade, Message, Problem
from sdpo_core.rollout.base import RolloutEngine, RolloutRequest, Sampling
from sdpo_core.specs import EvaluationSpec
from sdpo_core.text import ChatTokenizer

_NAMES = ("accuracy", "pass_at_k", "format_rate", "response_tokens")

# What problems are told apart by: a name, and the value of a problem (None: it has none).
_KINDS: dict[str, Callable[[Problem], object]] = {
    "data set": lambda problem: problem.dataset,
    "domain": lambda problem: problem.domain,
    "task": lambda problem: problem.details.get("task"),
    "stem disjoint": lambda problem: problem.details.get("stem_disjoint"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The accuracy on some of the problems."""

    kind: str
    value: str
    problems: int
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Means over problems of means over samples; `parts`: the accuracy again for each kind that divides them."""

    accuracy: float
    pass_at_k: float
    format_rate: float
    response_tokens: float
    parts: tuple[Part, ...] = ()

    def named(self, prefix: str) -> dict[str, float]:
        """As metrics `<prefix>/<name>`."""
        return {f"{prefix}/{name}": getattr(self, name) for name in _NAMES}


def evaluate(
    problems: Sequence[Problem],
    *,
    prompts: Sequence[Sequence[Message]] | None = None,
    engine: RolloutEngine,
    text: ChatTokenizer,
    grade: Grade,
    spec: EvaluationSpec,
    max_response_tokens: int,
    seed: int,
) -> Scores:
    """Score the weights `engine` samples with; the draws depend on the seed, the problem and the sample alone.

    `prompts` replaces the problems' own prompts (to probe the model with teacher context).
    """
    if not problems:
        raise DataError("evaluate: got 0 problems, expected at least 1. Prepare the data set again.")
    shown = [problem.prompt for problem in problems] if prompts is None else prompts
    requests = [
        RolloutRequest(
            prompt_ids=text.prompt_ids(messages),
            stream_key=random_streams.stream_key(seed, random_streams.EVALUATION, problem.id, sample),
        )
        for problem, messages in zip(problems, shown, strict=True)
        for sample in range(spec.samples_per_problem)
    ]
    sampling = Sampling(temperature=spec.temperature, max_response_tokens=max_response_tokens)
    rollouts = engine.generate(requests, sampling=sampling)
    owners = [problem for problem in problems for _ in range(spec.samples_per_problem)]
    verdicts = [
        grade(problem, text.decode(rollout.response_ids), rollout.finish == "length")
        for problem, rollout in zip(owners, rollouts, strict=True)
    ]
    right = [verdict.is_correct for verdict in verdicts]
    k = spec.samples_per_problem
    solved = [any(right[start : start + k]) for start in range(0, len(right), k)]
    return Scores(
        accuracy=sum(right) / len(right),
        pass_at_k=sum(solved) / len(solved),
        format_rate=sum(verdict.format_ok for verdict in verdicts) / len(verdicts),
        response_tokens=sum(len(rollout.response_ids) for rollout in rollouts) / len(rollouts),
        parts=_parts(problems, shares=[sum(right[start : start + k]) / k for start in range(0, len(right), k)]),
    )


def _parts(problems: Sequence[Problem], *, shares: Sequence[float]) -> tuple[Part, ...]:
    """The accuracy by every kind that at least two groups of problems differ in; `shares`: right answers of each."""
    parts = []
    for kind, value_of in _KINDS.items():
        groups: dict[str, list[float]] = {}
        for problem, share in zip(problems, shares, strict=True):
            value = value_of(problem)
            if value is not None:
                groups.setdefault(str(value).lower() if isinstance(value, bool) else str(value), []).append(share)
        if len(groups) > 1:
            parts += [
                Part(kind=kind, value=value, problems=len(group), accuracy=sum(group) / len(group))
                for value, group in sorted(groups.items())
            ]
    return tuple(parts)
