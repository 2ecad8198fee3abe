"""The text of every reason code, word for word, from a response that brings it about."""

import pytest

from data_prep.feedback import TEXTS
from data_prep.graders.table import grade
from sdpo_core.records import Problem
from tests.data_prep.problems import make_problem, mcq, spell, tool_call, true_false

PLAN = tool_call(("copy", {"from": "a", "count": 1}), tools=("move",))
TWO = tool_call(("copy", {"from": "a"}), ("move", {"to": "b"}))
EXACT = make_problem("exact", label="4 km", reference={"answer": "4 km"})


def call(name: str, arguments: str = "") -> str:
    return f"Action: {name}\n" + (f"Action Input: {arguments}\n" if arguments else "")


# (task, reason) -> problem, response, whether it was cut, text at level `diagnostic`
GOLDEN: dict[tuple[str, str], tuple[Problem, str, bool, str]] = {
    ("mcq", "no_answer"): (
        mcq(),
        "It may be copper.",
        False,
        "No final answer was found. After the reasoning, give one option label in an answer block.",
    ),
    ("mcq", "truncated"): (
        mcq(),
        "It may be",
        True,
        "The response was cut at the length limit before its final answer. Reason more briefly.",
    ),
    ("mcq", "open_reasoning"): (
        mcq(),
        "<think>It may be",
        False,
        "No final answer was found: the reasoning did not end. Close it, then give one option label.",
    ),
    ("mcq", "multiple_labels"): (
        mcq(),
        "<answer>A or B</answer>",
        False,
        'The answer names more than one label: "A or B". Give exactly one of A, B, C, D.',
    ),
    ("mcq", "invalid_label"): (
        mcq(),
        "<answer>iron <|im_end|></answer>",
        False,
        'The answer was read as "iron", which is not one of the labels A, B, C, D.',
    ),
    ("mcq", "label_text_conflict"): (
        mcq(),
        "<answer>A: zinc</answer>",
        False,
        'The answer "A: zinc" contradicts itself: the text is not that of the label.',
    ),
    ("mcq", "wrong_label"): (mcq(), "<answer>(a)</answer>", False, "Option A is not right."),
    ("true_false", "no_answer"): (
        true_false(),
        "",
        False,
        "No final answer was found. After the reasoning, give yes or no in an answer block.",
    ),
    ("true_false", "truncated"): (
        true_false(),
        "The",
        True,
        "The response was cut at the length limit before its final answer. Reason more briefly.",
    ),
    ("true_false", "open_reasoning"): (
        true_false(),
        "<think>",
        False,
        "No final answer was found: the reasoning did not end. Close it, then give yes or no.",
    ),
    ("true_false", "multiple_labels"): (
        true_false(),
        "<answer>yes and no</answer>",
        False,
        'The answer says both yes and no: "yes and no". Give exactly one of them.',
    ),
    ("true_false", "invalid_label"): (
        true_false(),
        "<answer>maybe</answer>",
        False,
        'The answer was read as "maybe", which is neither yes nor no.',
    ),
    ("true_false", "wrong_label"): (true_false(), "<answer>true</answer>", False, "The answer Yes is not right."),
    ("exact", "no_answer"): (EXACT, " ", False, "No answer was given."),
    ("exact", "truncated"): (
        EXACT,
        "so",
        True,
        "The response was cut at the length limit before its final answer. Reason more briefly.",
    ),
    ("exact", "open_reasoning"): (EXACT, "<think>", False, "No answer was given: the reasoning did not end."),
    ("exact", "wrong_answer"): (EXACT, "<answer>5 km</answer>", False, 'The answer "5 km" is not right.'),
    ("tool_call", "no_action"): (
        PLAN,
        "I copy it.",
        False,
        "No tool call was found. Write a line Action: with a tool's name, then Action Input:.",
    ),
    ("tool_call", "truncated"): (
        PLAN,
        call("copy"),
        True,
        "The response was cut at the length limit before its tool calls were complete.",
    ),
    ("tool_call", "open_reasoning"): (
        PLAN,
        "<think>" + call("copy"),
        False,
        "No tool call was found: the reasoning did not end. Close it, then write the calls.",
    ),
    ("tool_call", "no_input"): (
        PLAN,
        call("copy"),
        False,
        "The call to copy has no Action Input: line with a JSON object.",
    ),
    ("tool_call", "invalid_json"): (
        PLAN,
        call("copy", "{'from': 'a'}"),
        False,
        "The input of the call to copy is not valid JSON: Expecting property name enclosed in double quotes "
        "(character 2).",
    ),
    ("tool_call", "not_object"): (
        PLAN,
        call("copy", "[1]"),
        False,
        "The input of the call to copy is a list, and must be one JSON object.",
    ),
    ("tool_call", "duplicate_key"): (
        PLAN,
        call("copy", '{"from": "a", "from": "b"}'),
        False,
        "The input of the call to copy gives the argument from twice.",
    ),
    ("tool_call", "unknown_tool"): (
        PLAN,
        call("paste", "{}"),
        False,
        "There is no tool paste. The tools are: copy, move.",
    ),
    ("tool_call", "wrong_tool"): (
        PLAN,
        call("move", "{}"),
        False,
        "The call to move is not among the calls that this request needs.",
    ),
    ("tool_call", "call_count"): (
        TWO,
        call("copy", '{"from": "a"}'),
        False,
        "The response makes 1 call, which is not the number of calls that this request needs.",
    ),
    ("tool_call", "missing_argument"): (PLAN, call("copy", '{"from": "a"}'), False, "The call to copy lacks: count."),
    ("tool_call", "unexpected_argument"): (
        PLAN,
        call("copy", '{"from": "a", "count": 1, "by": 2}'),
        False,
        "The call to copy gives what is not needed: by.",
    ),
    ("tool_call", "wrong_type"): (
        PLAN,
        call("copy", '{"from": "a", "count": "1"}'),
        False,
        "The call to copy has a value of the wrong type in: count.",
    ),
    ("tool_call", "wrong_value"): (
        PLAN,
        call("copy", '{"from": "b", "count": 1}'),
        False,
        "The call to copy has a wrong value in: from.",
    ),
    ("spell_backward", "no_answer"): (spell(), "", False, "No answer was given."),
    ("spell_backward", "truncated"): (spell(), "ten", True, "The answer was cut at the length limit."),
    ("spell_backward", "open_reasoning"): (
        spell(),
        "<think>ten",
        False,
        "No answer was given: the reasoning did not end.",
    ),
    ("spell_backward", "wrong_length"): (spell(), "tena", False, "Got 4 letters, expected 6; 4 in the right place."),
    ("spell_backward", "wrong_letters"): (
        spell(),
        "tenplo",
        False,
        "4 of 6 letters are in the right place; wrong: 4, 6.",
    ),
}


def test_every_reason_has_a_golden_text() -> None:
    assert set(GOLDEN) == {(task, reason) for task, texts in TEXTS.items() for reason in texts}


@pytest.mark.parametrize(("task", "reason"), list(GOLDEN))
def test_feedback_is_the_golden_text(task: str, reason: str) -> None:
    problem, response, truncated, text = GOLDEN[task, reason]
    verdict = grade(problem, response, truncated, level="diagnostic")
    assert (problem.task, verdict.reason) == (task, reason)
    assert verdict.feedback == text
    assert grade(problem, response, truncated, level="none").feedback == ""
    revealed = grade(problem, response, truncated, level="reveal").feedback
    assert revealed.startswith(text)
    assert " The right answer is " in revealed[len(text) :]
