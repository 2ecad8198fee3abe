"""Warm-ups: what they teach, and what they must not."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from data_prep.graders.table import grade
from data_prep.warmups.base import Shares
from data_prep.warmups.table import warmup, warmup_examples
from sdpo_core.errors import SpecError
from tests.data_prep.problems import mcq, spell, tool_call

MIX = Shares(plain=0.5, demonstration=0.3)


def _examples(task, problems, count, seed=0):
    return list(islice(warmup_examples(task, problems, shares=MIX, rng=np.random.default_rng(seed)), count))


def _kind(example):
    return "demonstration" if example.demonstration else "feedback" if example.feedback else "plain"


def test_mcq_warmup_teaches_the_format_and_no_gold():
    examples = _examples("mcq", [mcq("B")], 4000)
    assert all(example.response in [f"<answer>\n{label}\n</answer>" for label in "ABCD"] for example in examples)
    # 4,000 draws: the share of the gold is 0.25 with a standard deviation of 0.007, under each kind of context.
    for kind in ("plain", "demonstration", "feedback"):
        own = [example for example in examples if _kind(example) == kind]
        right = sum(grade(example.problem, example.response, False, level="none").is_correct for example in own)
        assert right / len(own) == pytest.approx(0.25, abs=0.06)


def test_mcq_warmup_mixes_contexts_as_declared():
    kinds = Counter(map(_kind, _examples("mcq", [mcq("B")], 4000)))
    shares = {kind: count / 4000 for kind, count in kinds.items()}
    assert shares == pytest.approx({"plain": 0.5, "demonstration": 0.3, "feedback": 0.2}, abs=0.04)


def test_mcq_warmup_context_decides_the_response():
    for example in _examples("mcq", [mcq("B"), mcq("A", {"A": "x", "B": "y"})], 400):
        if example.demonstration:
            assert example.response == example.demonstration
        if example.feedback:
            excluded = example.feedback.split()[1]
            assert example.feedback == f"Option {excluded} is not right."
            assert f"\n{excluded}\n" not in example.response


def test_spell_backward_warmup_is_right_or_copies():
    problems = [spell("planet"), spell("sun"), spell("aab")]
    examples = _examples("spell_backward", problems, 2000)
    foreign = [example for example in examples if example.response != example.problem.label]
    assert all(example.demonstration == example.response for example in foreign)
    # Half of the 600 demonstrations are of a problem drawn among three.
    assert len(foreign) == pytest.approx(200, abs=45)
    shares = {kind: count / 2000 for kind, count in Counter(map(_kind, examples)).items()}
    assert shares == pytest.approx({"plain": 0.5, "demonstration": 0.3, "feedback": 0.2}, abs=0.05)
    assert all(example.demonstration == example.response for example in examples if example.demonstration)
    # Every attempt was really wrong: the grader had something to say of it.
    assert {example.feedback[:3] for example in examples if example.feedback} > {"Got", "5 o"}


def test_warmup_repeats_with_its_seed():
    problems = [spell("planet"), spell("sun")]
    assert _examples("spell_backward", problems, 50, seed=3) == _examples("spell_backward", problems, 50, seed=3)
    assert _examples("spell_backward", problems, 50, seed=3) != _examples("spell_backward", problems, 50, seed=4)


def test_warmup_refuses_a_task_without_one():
    with pytest.raises(SpecError, match="pretrained"):
        warmup_examples("tool_call", [tool_call(("f", {}))], shares=MIX, rng=np.random.default_rng(0))
    with pytest.raises(SpecError, match="got task 'exact', expected one of mcq, spell_backward, tool_call"):
        warmup_examples("exact", [spell()], shares=MIX, rng=np.random.default_rng(0))
    with pytest.raises(SpecError, match="0 problems"):
        warmup_examples("mcq", [], shares=MIX, rng=np.random.default_rng(0))


def test_warmup_right_and_wrong_responses_are_what_they_say():
    rng = np.random.default_rng(0)
    calls = tool_call(("find", {"name": "Ada", "page": 2}), ("list", {}))
    for problem in (mcq("B"), spell("planet"), spell("aab"), calls, tool_call(("list", {}))):
        task = warmup(problem.task)
        assert grade(problem, task.right(problem), False, level="none").is_correct
        wrong = [task.wrong(problem, rng) for _ in range(100)]
        assert not any(grade(problem, response, False, level="none").is_correct for response in wrong)


def test_tool_calls_of_every_shipped_row_can_be_shown_right_and_wrong(prepared):
    rng = np.random.default_rng(0)
    task = warmup("tool_call")
    rows = [row for rows in prepared["toolalpaca-real"].problems.values() for row in rows]
    assert len(rows) > 100
    for row in rows:
        assert grade(row, task.right(row), False, level="none").is_correct, row.id
        assert not grade(row, task.wrong(row, rng), False, level="none").is_correct, row.id
