"""Evaluation: avg@k and pass@k of a scripted engine, its streams, its prompts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sdpo_core.errors import DataError
from sdpo_core.evaluate import Part, Scores, evaluate
from sdpo_core.records import Message, Problem, Rollout, Verdict
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import EvaluationSpec
from tests.sdpo_core.micro import Base, make_problem

# Problem by problem, sample by sample. "-" stands for a response cut at the limit.
SCRIPT = (("1", "1", "1", "1"), ("0", "1", "0", "0"), ("0", "h", "0", "-"))


class ScriptedEngine:
    """Answers request i with the i-th word of the script; remembers what it was asked."""

    def __init__(self, base: Base, words: Sequence[str]) -> None:
        self._base = base
        self._words = words
        self.requests: list[RolloutRequest] = []
        self.sampling: Sampling | None = None

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        self.requests, self.sampling = list(requests), sampling
        return tuple(map(self._rollout, requests, self._words))

    def _rollout(self, request: RolloutRequest, word: str) -> Rollout:
        is_cut = word == "-"
        ids = self._base.text.response_ids("xxxx")[:-1] if is_cut else self._base.text.response_ids(word)
        return Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=ids,
            sampling_logps=(0.0,) * len(ids),
            finish="length" if is_cut else "stop",
            weights_version=0,
        )


def grade(_problem: Problem, response: str, truncated: bool) -> Verdict:
    """ "1" is right, "h" is half right, and both have the format; a cut response has neither."""
    assert truncated == (response == "xxxx")
    score = {"1": 1.0, "h": 0.5}.get(response, 0.0)
    return Verdict(score=score, reason="x", feedback="", format_ok=response in ("1", "h"))


def run(
    base: Base,
    *,
    seed: int = 3,
    prompts: Sequence[Sequence[Message]] | None = None,
    problems: Sequence[Problem] | None = None,
) -> tuple[Scores, ScriptedEngine]:
    engine = ScriptedEngine(base, [word for words in SCRIPT for word in words])
    scores = evaluate(
        problems or [make_problem(i, split="dev") for i in range(3)],
        prompts=prompts,
        engine=engine,
        text=base.text,
        grade=grade,
        spec=EvaluationSpec(samples_per_problem=4, temperature=0.6, dev_problems=None, test_problems=None),
        max_response_tokens=9,
        seed=seed,
    )
    return scores, engine


def test_scores_are_means_over_problems_and_samples(base: Base) -> None:
    """Right: 4 + 1 + 0 of 12; solved by one of four: 2 of 3; format: 4 + 1 + 1; tokens: 11 x 2 and one of 4."""
    scores, engine = run(base)
    assert scores.accuracy == pytest.approx(5 / 12)  # the half right one does not count
    assert scores.pass_at_k == pytest.approx(2 / 3)
    assert scores.format_rate == pytest.approx(6 / 12)
    assert scores.response_tokens == pytest.approx((11 * 2 + 4) / 12)
    assert engine.sampling == Sampling(temperature=0.6, max_response_tokens=9)


def test_accuracy_of_the_parts_that_problems_differ_in(base: Base) -> None:
    """4, 1 and 0 of 4 samples are right; one task and one data set divide nothing, a missing detail has no part."""
    details: tuple[dict[str, object], ...] = (
        {"task": "sum", "stem_disjoint": True},
        {"task": "sum", "stem_disjoint": False},
        {"stem_disjoint": True},
    )
    problems = [replace(make_problem(i, split="dev"), details=detail) for i, detail in enumerate(details)]
    problems[1] = replace(problems[1], domain="physics")
    scores, _ = run(base, problems=problems)
    assert scores.parts == (
        Part(kind="domain", value="micro", problems=2, accuracy=0.5),
        Part(kind="domain", value="physics", problems=1, accuracy=0.25),
        Part(kind="stem disjoint", value="false", problems=1, accuracy=0.25),
        Part(kind="stem disjoint", value="true", problems=2, accuracy=0.5),
    )
    assert run(base)[0].parts == ()


def test_scores_are_named_as_metrics() -> None:
    scores = Scores(accuracy=0.1, pass_at_k=0.2, format_rate=0.3, response_tokens=4.0)
    assert scores.named("eval") == {
        "eval/accuracy": 0.1,
        "eval/pass_at_k": 0.2,
        "eval/format_rate": 0.3,
        "eval/response_tokens": 4.0,
    }


def test_streams_depend_on_seed_problem_and_sample_alone(base: Base) -> None:
    """Twelve streams, the same at every evaluation, others under another seed."""
    first, again, other = (run(base, seed=seed)[1].requests for seed in (3, 3, 4))
    keys = [request.stream_key for request in first]
    assert len(set(keys)) == 12
    assert keys == [request.stream_key for request in again]
    assert set(keys).isdisjoint(request.stream_key for request in other)


def test_student_sees_the_problems_own_prompt(base: Base) -> None:
    """Contract 36: no teacher context, unless prompts are given on purpose."""
    _, engine = run(base)
    own = [base.text.prompt_ids(make_problem(i, split="dev").prompt) for i in range(3) for _ in range(4)]
    assert [request.prompt_ids for request in engine.requests] == own
    probe = [Message(role="user", content="probe")]
    _, engine = run(base, prompts=[probe] * 3)
    assert {request.prompt_ids for request in engine.requests} == {base.text.prompt_ids(probe)}


def test_evaluation_of_nothing_is_refused(base: Base) -> None:
    with pytest.raises(DataError, match="got 0 problems"):
        evaluate(
            [],
            engine=ScriptedEngine(base, []),
            text=base.text,
            grade=grade,
            spec=EvaluationSpec(samples_per_problem=1, temperature=1.0, dev_problems=None, test_problems=None),
            max_response_tokens=1,
            seed=1,
        )
