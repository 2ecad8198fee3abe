"""Feedback: bounded, clean, and silent about the gold."""

import json
import re

import pytest

from data_prep.feedback import quote
from data_prep.graders.table import grade
from sdpo_core.records import Problem
from tests.data_prep.problems import mcq, spell, tool_call


def test_quote_takes_template_tokens_and_tags_out():
    text = "a <|im_start|>system b </think><answer> c <|im_<|im_end|>end|> [INST] d\n e \ud800"
    assert quote(text) == "a system b c d e ?"


def test_quote_is_bounded():
    assert quote("x" * 81) == "x" * 77 + "..."
    assert quote("x" * 80) == "x" * 80


def test_feedback_levels_differ_in_what_they_tell():
    problem = mcq("B")
    texts = [
        grade(problem, "<answer>C</answer>", False, level=level).feedback for level in ("none", "diagnostic", "reveal")
    ]
    assert texts[:2] == ["", "Option C is not right."]
    assert texts[2] == "Option C is not right. The right answer is B: zinc."
    assert grade(problem, "<answer>B</answer>", False, level="reveal").feedback == ""


def test_feedback_reveals_a_long_gold_within_the_bound():
    problem = tool_call(("f", {"text": "y" * 500}), tools=tuple(f"tool{number}" for number in range(99)))
    for response in ("", "Action: g\nAction Input: {}", "Action: f\nAction Input: {}"):
        text = grade(problem, response, False, level="reveal").feedback
        assert len(text) <= 400
        assert 'The right answer is [{"name": "f"' in text


def test_feedback_quotes_little_of_the_response():
    long = "z" * 300
    problem = tool_call(("f", {"a": 1}))
    responses = [
        f"Action: {long}\nAction Input: {{}}",
        f'Action: f\nAction Input: {{"a": 1, "{long}": 2}}',
        f'Action: f\nAction Input: {{"{long}": 1, "{long}": 2}}',
    ]
    texts = [grade(problem, response, False, level="diagnostic").feedback for response in responses]
    texts.append(grade(mcq(), f"<answer>{long}</answer>", False, level="diagnostic").feedback)
    assert all(0 < text.count("z") <= 80 for text in texts)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("tenapl", "4 of 6 letters are in the right place; wrong: 5, 6."),
        ("ten", "Got 3 letters, expected 6; 3 in the right place."),
        ("", "No answer was given."),
    ],
)
def test_feedback_on_words_says_where_letters_are_wrong(response, text):
    assert grade(spell(), response, False, level="diagnostic").feedback == text


WRONG_MCQ = [
    "",
    "no idea",
    "<answer>E</answer>",
    "<answer>it is 17 or so</answer>",
    "<think>so",
    "<answer>X: y</answer>",
]


def _rows(prepared, task):
    """All shipped rows of a task, each prompt once."""
    rows: dict[tuple[object, str], Problem] = {}
    for data in prepared.values():
        for problems in data.problems.values():
            rows |= {(problem.prompt, problem.label): problem for problem in problems if problem.task == task}
    return list(rows.values())


def test_diagnostic_feedback_never_names_the_gold_option(prepared):
    """Over all shipped rows: neither its letter, unless all labels are listed, nor its text."""
    rows = _rows(prepared, "mcq")
    assert len(rows) > 4_300
    for problem in rows:
        labels = [choice["label"] for choice in problem.reference["choices"]]
        texts = {choice["label"]: choice["text"] for choice in problem.reference["choices"]}
        wrong = [f"<answer>{label}</answer>" for label in labels if label != problem.label]
        for response in WRONG_MCQ + wrong:
            verdict = grade(problem, response, False, level="diagnostic")
            assert verdict.score == 0.0
            told = verdict.feedback.replace(", ".join(labels), "")
            assert not re.search(rf"\b{problem.label}\b", told), (problem.id, verdict.feedback)
            gold = texts[problem.label]
            assert len(gold) < 4 or gold in response or gold not in told


def _gold_values(problem):
    for call in problem.reference["calls"]:
        for value in call["arguments"].values():
            yield value if isinstance(value, str) else json.dumps(value)


def test_diagnostic_feedback_never_says_yes_or_no_for_the_gold(prepared):
    rows = _rows(prepared, "true_false")
    assert len(rows) == 100
    for problem in rows:
        gold, wrong = problem.label.lower(), "no" if problem.label == "Yes" else "yes"
        for response in ("", "<think>", "maybe", "<answer>yes and no</answer>", f"<answer>{wrong}</answer>"):
            words = re.findall(r"[a-z]+", grade(problem, response, False, level="diagnostic").feedback.lower())
            # The gold stands only where both answers are named.
            assert words
            assert gold not in words or wrong in words


def test_diagnostic_feedback_never_names_a_gold_value(prepared):
    rows = _rows(prepared, "tool_call")
    assert len(rows) == 169
    for problem in rows:
        tools = problem.reference["tool_names"]
        calls = problem.reference["calls"]
        empty = "\n".join(f"Action: {call['name']}\nAction Input: {{}}" for call in calls)
        other = "\n".join(
            f"Action: {call['name']}\nAction Input: {json.dumps(dict.fromkeys(call['arguments'], 'qq'))}"
            for call in calls
        )
        responses = ["", empty, other, empty + "\n" + empty, f"Action: {tools[0]}\nAction Input: {{'a': 1}}"]
        names = {*tools, *(name for call in calls for name in call["arguments"])}
        for response in responses:
            text = grade(problem, response, False, level="diagnostic").feedback
            for name in sorted(names, key=len, reverse=True):
                text = text.replace(name, "")
            for value in _gold_values(problem):
                assert len(value) < 4 or value not in text, (problem.id, value, text)


def test_diagnostic_feedback_on_words_is_short_and_never_holds_the_answer(prepared):
    for problem in prepared["spell_backward"].problems["train"]:
        word, gold = problem.reference["word"], problem.label
        for response in ("", word, gold[:-1], gold + gold, gold[0] * len(gold), "?" * 500):
            verdict = grade(problem, response, False, level="diagnostic")
            assert verdict.score < 1.0
            assert len(verdict.feedback) < 70
            assert gold not in re.findall(r"[a-z]+", verdict.feedback)
