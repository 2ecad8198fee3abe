"""One problem as the student, its teacher and the grader see it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.problem_view import view
from sdpo_core.errors import DataError
from sdpo_core.records import Problem
from tests.data_prep.problems import mcq, spell, true_false


def write(data: Path, problem: Problem) -> Problem:
    """The problem, prepared as the only row of a data set."""
    named = replace(problem, id=f"quiz/own/{problem.task}", dataset="quiz")
    (data / "quiz").mkdir(parents=True)
    (data / "quiz" / "test.jsonl").write_text(json.dumps(named.to_json()) + "\n")
    return named


def parts(text: str) -> dict[str, str]:
    """The text under each heading."""
    return {title: body for title, _, body in (part.partition("\n") for part in text.split("\n--- ")[1:])}


def test_student_sees_no_gold_and_each_teacher_sees_its_context(tmp_path: Path) -> None:
    problem = write(tmp_path, replace(mcq(), privileged="It is zinc."))
    shown = parts(view(problem.id, data=tmp_path))
    assert list(shown) == [
        "student",
        "teacher with a right sibling",
        "teacher with feedback on a wrong response",
        "teacher with the privileged text",
        "grader (never in a student's prompt)",
    ]
    assert shown["student"] == "[user]\nq\n"
    assert "<answer>\nB\n</answer>" in shown["teacher with a right sibling"]
    assert "is not right" in shown["teacher with feedback on a wrong response"]
    assert "It is zinc." in shown["teacher with the privileged text"]
    assert "label: B" in shown["grader (never in a student's prompt)"]
    assert view(problem.id, data=tmp_path) == view(problem.id, data=tmp_path)


@pytest.mark.parametrize(("problem", "title"), [(true_false(), "an empty"), (spell(), "a wrong")])
def test_feedback_is_shown_for_every_task(tmp_path: Path, problem: Problem, title: str) -> None:
    """A task that is not probed has no example of a response, and so no demonstration."""
    shown = parts(view(write(tmp_path, problem).id, data=tmp_path))
    assert f"teacher with feedback on {title} response" in shown
    assert ("teacher with a right sibling" in shown) == (title == "a wrong")


def test_unknown_problem_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got no such id"):
        view("quiz/own/9", data=tmp_path)
