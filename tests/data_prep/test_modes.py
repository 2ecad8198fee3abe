"""Grade modes beside each other, exact answers, graders of the user's own, and responses from a file."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.grade_file import grade_file, summary
from data_prep.graders.table import grade, is_task, score
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Problem
from tests.data_prep.problems import make_problem, mcq, tool_call
from tests.data_prep.test_graders import CASES, _case_problem


def call(name: str, arguments: str) -> str:
    return f"Thought: so.\nAction: {name}\nAction Input: {arguments}\n"


def test_reference_disagrees_with_the_agreed_verdict_on_some_cases() -> None:
    """The 14 cases that its scorers can read (they have none for yes and no): it is wrong on 9 of them."""
    differing = []
    for case in CASES:
        found = score(_case_problem(case), case["response"], False, mode="compat-lasgroup")
        if case["task"] == "sciknoweval_tf":
            assert found is None
        elif found != float(case["expected_correct"]):
            differing.append(case["id"])
    assert len(differing) == 9, differing


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<reasoning>so</reasoning>\n<answer>\nB\n</answer>", 1.0),
        ("<answer>A</answer><answer>B</answer>", 1.0),
        ("<answer>B", 1.0),
        ("B", 1.0),
        ("<answer>B</answer> and more", 1.0),
        ("b", 0.0),
        ("<answer>B: zinc</answer>", 0.0),
        ("<answer>(B)</answer>", 0.0),
        ("the answer is B", 0.0),
    ],
)
def test_compat_mcq_has_the_published_truth_table(response: str, expected: float) -> None:
    assert score(mcq(), response, False, mode="compat-lasgroup") == expected


COPY = ("copy", {"from": "a", "count": 1})
PASTE = ("paste", {"to": "b"})


@pytest.mark.parametrize(
    ("response", "compat", "standard"),
    [
        (call("paste", '{"to": "b"}') + call("copy", '{"from": "a", "count": 1}'), 1.0, 1.0),
        (call("copy", '{"to": "b"}') + call("paste", '{"from": "a", "count": 1}'), 1.0, 0.0),
        (call("copy", '{"from": "a", "count": "1"}') + call("paste", '{"to": "b"}'), 0.0, 0.0),
        (call("copy", '{"from": "a", "count": 1.0}') + call("paste", '{"to": "b"}'), 1.0, 1.0),
        (call("copy", '{"from": "a", "count": true}') + call("paste", '{"to": "b"}'), 1.0, 0.0),
        (call("copy", "{from: a}") + call("paste", '{"to": "b"}'), 0.0, 0.0),
        (call("copy", '{"from": "a", "count": 1}') + call("paste", '{"to": "b"}') + "No Action: needed", 0.0, 1.0),
    ],
    ids=["any order", "arguments swapped", "text for number", "1.0 for 1", "true for 1", "broken", "prose"],
)
def test_compat_tool_calls_have_the_published_truth_table(response: str, compat: float, standard: float) -> None:
    problem = tool_call(COPY, PASTE)
    assert score(problem, response, False, mode="compat-lasgroup") == compat
    assert score(problem, response, False, mode="standard") == standard


def test_compat_never_scores_a_nested_argument_and_pays_for_broken_empty_ones() -> None:
    nested = tool_call(("copy", {"what": {"name": "a"}}))
    assert score(nested, call("copy", '{"what": {"name": "a"}}'), False, mode="compat-lasgroup") == 0.0
    assert score(nested, call("copy", '{"what": {"name": "a"}}'), False, mode="standard") == 1.0
    empty = tool_call(("copy", {}))
    assert score(empty, call("copy", "{broken}"), False, mode="compat-lasgroup") == 1.0
    assert score(empty, call("copy", "{broken}"), False, mode="standard") == 0.0


@pytest.mark.parametrize(
    ("gold", "given", "standard", "strict"),
    [
        ({"a": 1, "b": ""}, '{"a": 1}', 1.0, 0.0),
        ({"a": 1, "b": ""}, '{"a": 1, "b": ""}', 1.0, 1.0),
        ({"a": 1}, '{"a": 1, "b": null}', 1.0, 0.0),
        ({"a": 1}, '{"a": 1}', 1.0, 1.0),
    ],
)
def test_strict_mode_compares_blank_arguments(
    gold: Mapping[str, Any], given: str, standard: float, strict: float
) -> None:
    problem = tool_call(("copy", gold))
    scores = {mode: score(problem, call("copy", given), False, mode=mode) for mode in ("standard", "strict")}
    assert scores == {"standard": standard, "strict": strict}


def exact(answer: str = "4 km") -> Problem:
    return make_problem(task="exact", label=answer, reference={"answer": answer})


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("<answer>4  km </answer>", "correct"),
        ("so \\boxed{4 km}", "correct"),
        (" 4 km\n", "correct"),
        ("<think>5 km</think>4 km", "correct"),
        ("<answer>4 Km</answer>", "wrong_answer"),
        ("it is 4 km", "wrong_answer"),
        ("<answer> </answer>", "no_answer"),
        ("", "no_answer"),
        ("<think>4 km", "open_reasoning"),
    ],
)
def test_exact_answers_are_equal_or_not(response: str, reason: str) -> None:
    verdict = grade(exact(), response, False, level="diagnostic")
    assert (verdict.reason, verdict.score) == (reason, float(reason == "correct"))
    assert "4 km" not in verdict.feedback or "4 km" in response


def test_exact_answer_that_was_cut_needs_a_closed_block() -> None:
    assert grade(exact(), "4 km", True, level="none").reason == "truncated"
    assert grade(exact(), "<answer>4 km</answer> and", True, level="none").reason == "correct"


@pytest.mark.parametrize("answer", [None, 3, " "])
def test_exact_refuses_a_broken_reference(answer: object) -> None:
    with pytest.raises(DataError, match="expected a text"):
        grade(make_problem(task="exact", label="x", reference={"answer": answer}), "x", False, level="none")


GRADER = """
def half(reference, response):
    return (0.5, "Say <answer>" + reference["word"] + "</answer> " + "x" * 900)

def right(reference, response):
    return 1.0

def wild(reference, response):
    return 2

NUMBER = 3
"""


@pytest.fixture
def own_grader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_grader_of_a_test.py").write_text(GRADER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "call:own_grader_of_a_test"


def called(task: str) -> Problem:
    return replace(exact(), task=task, reference={"word": "go"})


def test_called_grader_gives_score_and_bounded_feedback(own_grader: str) -> None:
    assert is_task(f"{own_grader}:half")
    verdict = grade(called(f"{own_grader}:half"), "go", False, level="diagnostic")
    assert (verdict.score, verdict.reason, verdict.format_ok) == (0.5, "wrong", True)
    assert verdict.feedback.startswith("Say go x")
    assert len(verdict.feedback) <= 400
    assert grade(called(f"{own_grader}:half"), "go", False, level="none").feedback == ""
    assert grade(called(f"{own_grader}:right"), "go", False, level="diagnostic").is_correct
    assert score(called(f"{own_grader}:half"), "go", False, mode="strict") == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":wild", "expected a score from 0 to 1"),
        (":NUMBER", "got a int, expected a function"),
        (":absent", "expected call:<module>:<function>"),
        ("_missing:half", "Put its folder on PYTHONPATH"),
        ("", "expected call:<module>:<function>"),
    ],
)
def test_called_grader_that_is_none_is_refused(own_grader: str, name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        grade(called(f"{own_grader}{name}"), "go", False, level="none")


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_responses_of_a_file_are_graded_in_every_mode(tmp_path: Path) -> None:
    problem = replace(mcq(), id="quiz/own/1", dataset="quiz")
    write_rows(tmp_path / "data/quiz/test.jsonl", [problem.to_json()])
    responses = [
        {"id": problem.id, "response": "<answer>(B)</answer>"},
        {"id": problem.id, "response": "B", "truncated": True},
    ]
    graded = list(grade_file(write_rows(tmp_path / "responses.jsonl", responses), data=tmp_path / "data"))
    assert [item.scores for item in graded] == [
        {"standard": 1.0, "strict": 1.0, "compat-lasgroup": 0.0},
        {"standard": 0.0, "strict": 0.0, "compat-lasgroup": 1.0},
    ]
    assert summary(graded) == [("quiz", "2", "0.500", "0.500", "0.500", "correct 1, truncated 1")]
    assert graded[1].to_json()["reason"] == "truncated"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "responses.jsonl:1: got .* expected one JSON object a line"),
        ("[1]", "expected texts `id` and `response`"),
        ({"id": "quiz/own/1"}, "expected texts `id` and `response`"),
        ({"id": "quiz/own/1", "response": "B", "truncated": 1}, "true or false for `truncated`"),
        ({"id": "quiz/own/9", "response": "B"}, "got id 'quiz/own/9', expected one of a prepared data set"),
    ],
)
def test_line_that_is_no_response_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    path = write_rows(tmp_path / "responses.jsonl", [row])
    with pytest.raises(DataError, match=message):
        list(grade_file(path, data=tmp_path / "data"))
