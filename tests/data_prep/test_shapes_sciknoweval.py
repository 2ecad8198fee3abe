"""Raw and pre-release SciKnowEval rows: real ones, and one damage for each code."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from data_prep.shapes.base import RowRejectedError
from sdpo_core.records import Problem
from tests.data_prep.source_rows import RAW, bundled, origin, outcomes, sample

FOUR = bundled(f"{RAW}/Chemistry/reaction_prediction.jsonl")[0]
TWO = bundled(f"{RAW}/Biology/fluorescence_prediction.jsonl")[0]
TRUTH = bundled(f"{RAW}/Biology/solubility_prediction.jsonl")[0]
EARLY_FOUR, EARLY_NUMBERS, EARLY_FEWSHOT, EARLY_TWO, EARLY_TRUTH, EARLY_FILLING = sample("sciknoweval_prerelease.jsonl")


def _problem(row: Mapping[str, Any], **place: Any) -> Problem:
    (found,) = outcomes(row, origin(**place))
    if isinstance(found, RowRejectedError):
        raise found
    return found


def _code(row: Mapping[str, Any], **place: Any) -> str:
    with pytest.raises(RowRejectedError) as rejection:
        _problem(row, **place)
    return rejection.value.code


def _choices(**change: object) -> dict[str, object]:
    return {"choices": {**FOUR["choices"], **change}}


def test_raw_row_has_id_details_and_source():
    problem = _problem(FOUR, path="raw/Chemistry/reaction_prediction.jsonl", line=8)
    assert problem.id == "d/s/chemistry/reaction_prediction/7"
    assert problem.details == {
        "level": "L3",
        "task": "reaction_prediction",
        "subtask": "reaction_pred_mcq",
        "source": "uspto_mixed",
        "type": "mcq-4-choices",
        "num_options": 4,
    }
    assert problem.source == {
        "repository": "r",
        "revision": "v",
        "file": "raw/Chemistry/reaction_prediction.jsonl",
        "line": 8,
        "idx": 7,
        "shape": "sciknoweval-raw",
    }


def test_raw_row_of_two_options_names_two():
    problem = _problem(TWO)
    assert problem.prompt[0].content.startswith("\nGiven a question and two options, please select")
    assert "(A or B)" in problem.prompt[0].content
    assert (problem.label, problem.flags, problem.details["num_options"]) == (TWO["answerKey"], (), 2)


def test_raw_row_of_yes_or_no_is_a_task_of_its_own():
    problem = _problem(TRUTH)
    assert (problem.task, problem.label, problem.reference) == ("true_false", "No", {"answer": "No"})
    assert problem.prompt[1].content == f"{TRUTH['question']}\n\nPlease reason step by step."
    assert 'only output "Yes" or "No", and nothing else.' in problem.prompt[0].content
    assert "four options" not in problem.prompt[0].content
    assert "<answer>\nYes\n</answer>" in problem.prompt[0].content


@pytest.mark.parametrize(("word", "label"), [("true", "Yes"), ("False", "No"), (" yes ", "Yes"), ("NO", "No")])
def test_raw_gold_in_other_words_is_yes_or_no(word, label):
    assert _problem({**TRUTH, "answer": word}).label == label


def test_raw_rows_of_june_2024_lack_fields():
    *_, choice, truth, _, _ = sample("sciknoweval_v1.jsonl")
    assert "answer" not in choice
    assert not {"choices", "answerKey"} & truth.keys()
    assert _problem(choice).task == "mcq"
    assert _problem(truth).task == "true_false"


def test_raw_type_may_be_a_list():
    assert _problem({**FOUR, "type": ["mcq-4-choices"]}) == _problem(FOUR)
    assert _code({**FOUR, "type": []}) == "type_not_supported"


@pytest.mark.parametrize("name", ["Material", "Materials", "material"])
def test_raw_domain_in_our_words(name):
    row = bundled(f"{RAW}/Material/lattice_volume_calculation.jsonl")[0]
    assert _problem({**row, "domain": name}).domain == "materials"
    assert _problem({**row, "domain": name}, domain="materials").domain == "materials"
    assert _code({**row, "domain": name}, domain="physics") == "other_domain"


def test_raw_blanks_stand_in_the_prompt_and_not_in_the_options():
    row = bundled(f"{RAW}/Material/lattice_volume_calculation.jsonl")[0]
    problem = _problem(row)
    assert "\nA: 310.10 \u00c5\u00b3\n\nB: " in problem.prompt[1].content
    assert problem.reference["choices"][0] == {"label": "A", "text": "310.10 \u00c5\u00b3"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"details": None}, "missing_field"),
        ({"details": {"task": "x"}}, "missing_field"),
        ({"details": {"level": "L3", "task": 3}}, "missing_field"),
        ({"details": {**FOUR["details"], "level": "L2"}}, "level_not_l3"),
        ({"type": "filling"}, "type_not_supported"),
        ({"type": "open-ended-qa"}, "type_not_supported"),
        ({"type": "relation_extraction"}, "type_not_supported"),
        ({"type": {"mcq": 4}}, "type_not_supported"),
        ({"domain": "Astronomy"}, "other_domain"),
        ({"question": " "}, "missing_field"),
        ({"question": "half \ud800"}, "missing_field"),
        ({"choices": None}, "missing_field"),
        (_choices(text="abcd"), "missing_field"),
        (_choices(text=["1", "2", 3, "4"]), "missing_field"),
        (_choices(text=["1", "2", "3", "4", "5"]), "choices_mismatch"),
        (_choices(label=["A", "B", "C"]), "choices_mismatch"),
        (_choices(text=["1", "2"], label=["A", "B"]), "choices_mismatch"),
        (_choices(label=["A", "B", "C", "C"]), "labels_not_read"),
        (_choices(label=["1", "2", "3", "4"]), "labels_not_read"),
        (_choices(text=["1", "2", " \n", "4"]), "empty_option"),
        ({"answerKey": ""}, "no_gold"),
        ({"answerKey": None}, "no_gold"),
        ({"answerKey": 1}, "missing_field"),
        ({"answerKey": "E"}, "gold_not_a_label"),
        ({"answerKey": "a"}, "gold_not_a_label"),
        ({**_choices(text=["1", " 2", "2\n", "4"]), "answerKey": "B"}, "gold_under_two_labels"),
        ({"type": "true_or_false"}, "choices_mismatch"),
    ],
)
def test_raw_refuses_damaged_rows(change, code):
    assert _code({**FOUR, **change}) == code


@pytest.mark.parametrize(("answer", "code"), [("", "no_gold"), ("perhaps", "gold_not_a_label"), ([1], "missing_field")])
def test_raw_refuses_damaged_golds_of_yes_or_no(answer, code):
    assert _code({**TRUTH, "answer": answer}) == code


def test_raw_keeps_equal_options_beside_a_unique_gold():
    problem = _problem({**FOUR, **_choices(text=["1", "2", "2 ", "4"]), "answerKey": "D"})
    assert problem.flags == ("equal_options",)


@pytest.mark.parametrize("row", [EARLY_FOUR, EARLY_NUMBERS, EARLY_FEWSHOT, EARLY_TWO])
def test_prerelease_options_keep_their_text_and_gold(row):
    problem = _problem(row)
    texts = {choice["label"]: choice["text"] for choice in problem.reference["choices"]}
    given = [value if isinstance(value, str) else json.dumps(value) for key, value in row.items() if "_option" in key]
    assert sorted(texts.values()) == sorted(given)
    gold = row["correct_option"]
    assert texts[problem.label] == (gold if isinstance(gold, str) else json.dumps(gold))
    listed = "\n".join(f"{label}: {text}" for label, text in texts.items())
    assert problem.prompt[1].content == f"{row['question']}\n\n{listed}\nPlease reason step by step."
    assert problem.source["shape"] == "sciknoweval-prerelease"


def test_prerelease_order_depends_on_the_row_alone():
    """Wherever it stands and however its wrong options are numbered; over questions, no letter is preferred."""
    problem = _problem(EARLY_FOUR)
    swapped = {
        **EARLY_FOUR,
        "wrong_option_1": EARLY_FOUR["wrong_option_3"],
        "wrong_option_3": EARLY_FOUR["wrong_option_1"],
    }
    assert _problem(swapped, line=9).reference == problem.reference
    labels = [_problem({**EARLY_FOUR, "question": f"Question {number}?"}).label for number in range(400)]
    # Expected 100 each, standard deviation 8.7.
    assert all(70 < labels.count(letter) < 130 for letter in "ABCD")


def test_prerelease_yes_or_no():
    problem = _problem(EARLY_TRUTH)
    assert (problem.task, problem.label) == ("true_false", EARLY_TRUTH["correct_option"])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"correct_option": ""}, "no_gold"),
        ({"correct_option": None}, "no_gold"),
        ({"correct_option": True}, "missing_field"),
        ({"correct_option": float("nan")}, "missing_field"),
        ({"wrong_option_2": 10**5000}, "missing_field"),
        ({"wrong_option_2": " "}, "empty_option"),
        ({"wrong_option_4": "a fifth"}, "choices_mismatch"),
        ({"type": "mcq-2-choices"}, "choices_mismatch"),
        ({"wrong_option_2": EARLY_FOUR["correct_option"]}, "gold_under_two_labels"),
        ({"type": "filling"}, "type_not_supported"),
    ],
)
def test_prerelease_refuses_damaged_rows(change, code):
    assert _code({**EARLY_FOUR, **change}) == code


def test_prerelease_refuses_damaged_truths():
    assert _code({**EARLY_TRUTH, "wrong_option_1": "No"}) == "gold_under_two_labels"
    assert _code({**EARLY_TRUTH, "wrong_option_1": "Maybe"}) == "gold_not_a_label"
    row = {key: value for key, value in EARLY_FOUR.items() if key != "wrong_option_3"}
    assert _code(row) == "choices_mismatch"
    assert _code(EARLY_FILLING) == "type_not_supported"


def test_rows_of_a_split_keep_it():
    (found,) = outcomes(FOUR, replace(origin(), split="test"))
    assert isinstance(found, Problem)
    assert found.split == "test"
