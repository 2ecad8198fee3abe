"""Graders: the agreed cases, the rules one by one, broken references, and responses of any kind."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.grade_file import MODES
from data_prep.graders.table import grade, score
from sdpo_core.errors import DataError
from tests.data_prep.problems import COPPER, make_problem, mcq, spell, tool_call, true_false

CASES = [json.loads(line) for line in (Path(__file__).parent / "verifier_cases.jsonl").read_text().splitlines()]


def _case_problem(case):
    reference = case["reference"]
    if case["task"] == "sciknoweval_mcq":
        return mcq(reference["answer_key"], reference["choices"])
    if case["task"] == "sciknoweval_tf":
        return true_false(reference["answer"])
    return tool_call(*((call["name"], call["arguments"]) for call in reference["calls"]))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_grade_agrees_with_the_case(case):
    verdict = grade(_case_problem(case), case["response"], False, level="diagnostic")
    assert verdict.is_correct == case["expected_correct"], case["why"]
    assert (verdict.feedback == "") == verdict.is_correct


@pytest.mark.parametrize(
    "response",
    [
        "<answer>\nB\n</answer>",
        "<answer>A</answer> no, <answer> b </answer> and so on",
        "<think><answer>A</answer></think><answer>B</answer>",
        "Reasoning.\n<answer>\nB",
        "<answer>**Option (B).**</answer>",
        "<answer>$\\boxed{\\text{B}}$</answer>",
        "<answer>zinc</answer>",
        "<answer>B) zinc</answer>",
        "<answer>(B) zinc.</answer>",
        "<answer>The correct answer is B.</answer>",
        "So \\boxed{A}, or rather \\boxed{\\mathrm{B}}.",
        "A is wrong.\n**Answer:** B",
        "The answer is A? No, the answer is (B), since zinc is.",
        "The answer is: option B",
        "Final answer: zinc",
        "B",
        " **b.** ",
        "\uff22",
    ],
)
def test_mcq_reads_the_gold(response):
    verdict = grade(mcq(), response, False, level="diagnostic")
    assert (verdict.score, verdict.reason, verdict.format_ok, verdict.answer) == (1.0, "correct", True, "B")


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "no_answer"),
        ("I think zinc it is, B would be good.", "no_answer"),
        ("Answer seems to be nothing; a better one is B", "no_answer"),
        ("The answer is a good approximation.", "no_answer"),
        ("The answer is not B", "no_answer"),
        ("<answer></answer>", "no_answer"),
        ("<answer>B</answer> once more: <answer>it is the", "no_answer"),
        ("<think>so B <answer>B</answer>", "open_reasoning"),
        ("<answer>A, B</answer>", "multiple_labels"),
        ("<answer>b or c</answer>", "multiple_labels"),
        ("The answer is B or C.", "multiple_labels"),
        ("\\boxed{B \\text{ and } C}", "multiple_labels"),
        ("<answer>E</answer>", "invalid_label"),
        ("<answer>zinc and more</answer>", "invalid_label"),
        ("\\boxed{5}", "invalid_label"),
        ("<answer>B: copper</answer>", "label_text_conflict"),
        ("<answer>Zinc</answer>", "invalid_label"),
        ("<answer>C</answer>", "wrong_label"),
        ("nickel <answer>nickel</answer>", "wrong_label"),
    ],
)
def test_mcq_tells_unread_from_wrong(response, reason):
    verdict = grade(mcq(), response, False, level="diagnostic")
    assert (verdict.score, verdict.reason) == (0.0, reason)
    assert verdict.format_ok == (reason == "wrong_label")


@pytest.mark.parametrize(
    ("response", "score"), [("<answer>B</answer> and then", 1.0), ("<answer>B", 0.0), ("The answer is B", 0.0)]
)
def test_mcq_cut_response_needs_a_closed_block(response, score):
    verdict = grade(mcq(), response, True, level="diagnostic")
    assert verdict.score == score
    assert score == 1.0 or verdict.reason == "truncated"


def test_mcq_text_of_equal_options_names_none():
    problem = mcq("A", {"A": "1", "B": "2", "C": "2"})
    assert grade(problem, "<answer>2</answer>", False, level="none").reason == "invalid_label"
    assert grade(problem, "<answer>1</answer>", False, level="none").is_correct


@pytest.mark.parametrize(
    ("response", "score", "reason"),
    [
        ("<answer>No</answer>", 1.0, "correct"),
        ("<answer>False.</answer>", 1.0, "correct"),
        ("The answer is: no, because it melts.", 1.0, "correct"),
        ("no", 1.0, "correct"),
        ("<answer>true</answer>", 0.0, "wrong_label"),
        ("<answer>yes or no</answer>", 0.0, "multiple_labels"),
        ("<answer>unknown</answer>", 0.0, "invalid_label"),
        ("There is no way to know.", 0.0, "no_answer"),
    ],
)
def test_true_false_reads_whole_words(response, score, reason):
    verdict = grade(true_false(), response, False, level="diagnostic")
    assert (verdict.score, verdict.reason) == (score, reason)


FIND = ("find", {"name": "Lyon", "limit": 3})


@pytest.mark.parametrize(
    "response",
    [
        'Action: find\nAction Input: {"limit": 3e0, "name": "Lyon"}',
        'Thought: x\n**Action:** `find`\n**Action Input:** {"name": "Lyon", "limit": 3, "page": null, "lang": ""}',
        '1. action: "find"\n   ACTION INPUT: ```json\n{"name": "Lyon",\n "limit": 3.0}\n```\nObservation: Action',
        '<think>Action: other\nAction Input: {}</think>\nAction 1: find\nAction Input 1: {"name": "Lyon", "limit": 3}',
        'Action: find\nAction Input: with {"name": "Lyon", "limit": 3} as given',
    ],
)
def test_tool_call_reads_the_call(response):
    verdict = grade(tool_call(FIND), response, False, level="diagnostic")
    assert (verdict.score, verdict.reason, verdict.format_ok) == (1.0, "correct", True)


def _call(given: str, name: str = "find") -> str:
    return f"Action: {name}\nAction Input: {given}"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("I would call find.", "no_action"),
        ("The Action: find\nAction Input: {}", "no_action"),
        ("<think>" + _call('{"name": "Lyon", "limit": 3}'), "open_reasoning"),
        ("Action: find\nDone.", "no_input"),
        (_call(""), "no_input"),
        (_call("```json\n```"), "invalid_json"),
        (_call('{"name": "Lyon", "limit": 3'), "invalid_json"),
        (_call("{'name': 'Lyon', 'limit': 3}"), "invalid_json"),
        (_call('{"name": "Lyon", "limit": 3,}'), "invalid_json"),
        (_call('{"name": "Lyon", "limit": NaN}'), "invalid_json"),
        (_call('[{"name": "Lyon", "limit": 3}]'), "not_object"),
        (_call('"{\\"name\\": \\"Lyon\\", \\"limit\\": 3}"'), "not_object"),
        (_call('{"name": "Lyon", "limit": 3, "limit": 3}'), "duplicate_key"),
        (_call('{"name": "Lyon", "limit": 3}', name="Find"), "unknown_tool"),
        (_call('{"name": "Lyon", "limit": 3}', name="list-all"), "wrong_tool"),
        (_call('{"name": "Lyon", "limit": 3}') + "\n" + _call("{}"), "call_count"),
        (_call('{"name": "Lyon"}'), "missing_argument"),
        (_call('{"name": "Lyon", "limit": 3, "page": 1}'), "unexpected_argument"),
        (_call('{"name": "Lyon", "limit": "3"}'), "wrong_type"),
        (_call('{"name": "Lyon", "limit": true}'), "wrong_type"),
        (_call('{"name": "lyon", "limit": 3}'), "wrong_value"),
    ],
)
def test_tool_call_names_what_is_wrong(response, reason):
    verdict = grade(tool_call(FIND, tools=("list-all",)), response, False, level="diagnostic")
    assert (verdict.score, verdict.reason) == (0.0, reason)


def test_tool_call_compares_calls_as_a_multiset():
    """Two calls in any order; swapped arguments, and a call made twice, are wrong."""
    problem = tool_call(("f", {"id": 1}), ("g", {"id": 2}), ("f", {"id": True}))
    right = ["f", '{"id": true}', "g", '{"id": 2}', "f", '{"id": 1}']
    swapped = ["f", '{"id": 2}', "g", '{"id": 1}', "f", '{"id": true}']
    twice = ["f", '{"id": 1}', "g", '{"id": 2}', "f", '{"id": 1}']
    scores = [
        grade(problem, "\n".join(_call(b, name=a) for a, b in zip(r[::2], r[1::2], strict=True)), False, level="none")
        for r in (right, swapped, twice)
    ]
    assert [verdict.score for verdict in scores] == [1.0, 0.0, 0.0]


def test_tool_call_made_twice_in_place_of_another_is_wrong():
    response = "\n".join([_call("{}", name="f"), _call("{}", name="f")])
    assert grade(tool_call(("f", {}), ("g", {})), response, False, level="none").reason == "wrong_tool"


def test_tool_call_equal_strings_in_other_unicode_forms():
    problem = tool_call(("f", {"name": "Am\u00e9thyste", "ratio": 0.1, "ids": [1, 2]}))
    response = _call('{"name": "Ame\\u0301thyste", "ratio": 1e-1, "ids": [1.0, 2]}', name="f")
    assert grade(problem, response, False, level="none").is_correct
    assert not grade(problem, response.replace("[1.0, 2]", "[2, 1]"), False, level="none").is_correct


def test_tool_call_cut_at_the_end_is_truncated():
    verdict = grade(tool_call(FIND), _call('{"name": "Ly'), True, level="diagnostic")
    assert (verdict.reason, verdict.format_ok) == ("truncated", False)


@pytest.mark.parametrize(
    ("response", "score", "reason"),
    [
        ("tenalp", 1.0, "correct"),
        (" TENALP\n", 1.0, "correct"),
        ("so <answer>x</answer> <answer>tenalp</answer>", 1.0, "correct"),
        ("<answer>tenalp", 1.0, "correct"),
        ("tenapl", 4 / 6, "wrong_letters"),
        # Letters 2 to 6 agree.
        ("xenalp", 5 / 6, "wrong_letters"),
        # t e n agree, then the word ends.
        ("ten", 3 / 6, "wrong_length"),
        # The whole word and more would reach 1 by positions.
        ("tenalpx", 0.8, "wrong_length"),
        ("planet", 0.0, "wrong_letters"),
        ("", 0.0, "no_answer"),
        ("<answer> </answer>", 0.0, "no_answer"),
        ("<think>tenalp", 0.0, "open_reasoning"),
    ],
)
def test_spell_backward_gives_partial_scores(response, score, reason):
    verdict = grade(spell(), response, False, level="diagnostic")
    assert verdict.score == pytest.approx(score, abs=1e-12)
    assert verdict.reason == reason
    assert verdict.format_ok == (reason not in ("no_answer", "open_reasoning"))


def test_spell_backward_cut_response_scores_nothing():
    verdict = grade(spell(), "tenalp", True, level="diagnostic")
    assert (verdict.score, verdict.reason, verdict.format_ok) == (0.0, "truncated", False)


BROKEN = [
    mcq("E"),
    mcq("A", {"A": "1"}),
    make_problem("mcq", label="A", reference={"answer_key": "A"}),
    true_false("true"),
    tool_call(),
    make_problem("tool_call", label="", reference={"calls": [{"name": "f"}], "tool_names": ["f"], "order": "any"}),
    make_problem(
        "tool_call",
        label="",
        reference={"calls": [{"name": "f", "arguments": {}}], "tool_names": ["g"], "order": "any"},
    ),
    make_problem("spell_backward", label="", reference={"answer": ""}),
    make_problem("essay", label="", reference={}),
]


@pytest.mark.parametrize("problem", BROKEN)
def test_grade_refuses_a_broken_reference(problem):
    with pytest.raises(DataError, match=problem.id):
        grade(problem, "<answer>A</answer>", False, level="none")


# 10,000 were run; the default keeps the suite short.
EXAMPLES = int(os.environ.get("SDPO_FUZZ_EXAMPLES", "300"))
EXACT = make_problem("exact", label="zinc", reference={"answer": "zinc"})
PROBLEMS = [mcq(), mcq("A", {"A": "C", "B": "[x]"}), true_false(), tool_call(FIND, ("g", {})), spell(), EXACT]
PIECES = [
    *("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}", "{", '"', "[", "]", ":", "\n", "```json\n"),
    *(
        "Action:",
        "Action Input:",
        "\nAction: find\nAction Input: ",
        '{"name": "Lyon", "limit": 3}',
        '{"a": 1e999999999}',
    ),
    *("The answer is ", "answer: ", "A", "B or C", "(", ")", "**", "yes", "no", '"\\ud800"', "zinc", "tenalp", "\x00"),
    *COPPER.values(),
]
RESPONSES = st.one_of(st.text(max_size=80), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    problem=st.sampled_from(PROBLEMS),
    response=RESPONSES,
    truncated=st.booleans(),
    level=st.sampled_from(["none", "diagnostic", "reveal"]),
)
def test_grade_never_raises_on_a_response(problem, response, truncated, level):
    verdict = grade(problem, response, truncated, level=level)
    assert 0.0 <= verdict.score <= 1.0
    assert verdict.is_correct == (verdict.reason == "correct")
    assert (verdict.feedback == "") == (verdict.is_correct or level == "none")
    assert len(verdict.feedback) <= 400
    assert "\n" not in verdict.feedback
    # A journal is UTF-8: half characters must not come through.
    f"{verdict.feedback}{verdict.answer}".encode()
    for mode in MODES:
        found = score(problem, response, truncated, mode=mode)
        assert found is None or 0.0 <= found <= 1.0


@settings(max_examples=EXAMPLES, deadline=None)
@given(problem=st.sampled_from(BROKEN), response=RESPONSES, truncated=st.booleans())
def test_grade_raises_on_a_broken_reference_whatever_the_response(problem, response, truncated):
    with pytest.raises(DataError):
        grade(problem, response, truncated, level="diagnostic")


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 20_000,
        "answer is " * 20_000,
        "<answer>" * 20_000,
        "<answer>" + "(" * 100_000 + "</answer>",
        "answer" + " " * 200_000,
        "answer" + ":*_" * 60_000,
        "Action:" * 20_000,
        "\nAction:\nAction Input: {" * 5_000,
        _call('{"name": ' + "[" * 100_000),
        _call('{"limit": ' + "9" * 100_000 + "}"),
        _call('{"limit": 1e99999999999999999999}'),
        "\n" * 100_000 + " " * 100_000,
    ],
)
def test_grade_ends_soon_on_hostile_responses(response):
    for problem in PROBLEMS:
        assert grade(problem, response, False, level="diagnostic").score < 1.0
