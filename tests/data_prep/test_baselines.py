"""Guess baselines: hand-worked rules, and known figures of the shipped data."""

import pytest

from data_prep.baselines import Baselines, Guesses
from sdpo_core.records import Problem
from tests.data_prep.problems import make_problem, mcq, tool_call, true_false


def _guesses(**splits: list[Problem]) -> Guesses:
    guesses = Guesses()
    for split, rows in splits.items():
        for row in rows:
            guesses.add({**row.to_json(), "metadata": {**row.to_json()["metadata"], "split": split}})
    return guesses


def _baselines(**splits: list[Problem]) -> Baselines:
    return _guesses(**splits).baselines()


def test_baselines_chooses_on_train_and_scores_elsewhere():
    train = [mcq("C"), mcq("C"), mcq("A")]
    test = [mcq("C", {"A": "5", "B": "7", "C": "6"}), mcq("B", {"A": "wide", "B": "wider", "C": "bread"})]
    found = _baselines(train=train, test=test)
    assert found.choices == {"best_constant_letter": "C"}
    scores = {name: score["test"] for name, score in found.scores.items()}
    assert scores == {
        "uniform": pytest.approx(1 / 3),
        "best_constant_letter": 0.5,
        # Row 1: all of one length, a third; row 2: B and C tie for longest, A is shortest.
        "longest_option": pytest.approx((1 / 3 + 1 / 2) / 2),
        "shortest_option": pytest.approx((1 / 3 + 0) / 2),
        # Row 1: 6 of 5, 6, 7 is right; row 2 has no numbers, so the letter C is played, which is wrong.
        "second_largest_number": 0.5,
    }
    assert all(score["dev"] is None for score in found.scores.values())


def test_baselines_of_shipped_data(prepared):
    physics = prepared["sciknoweval-physics"].manifest
    # Known of the reference split: always B is right in 41 % of test.
    assert physics.baseline_choices["best_constant_letter"] == "B"
    assert physics.baselines["best_constant_letter"]["test"] == pytest.approx(33 / 80)
    # Biology: 200 of 500 rows have two options.
    assert 0.3 < prepared["sciknoweval-biology"].manifest.baselines["uniform"]["test"] < 0.4
    # Known of Chemistry: 51 of the 210 test rows are solved by the second-largest number.
    assert prepared["sciknoweval-chemistry"].manifest.baselines["second_largest_number"]["test"] > 51 / 210
    assert prepared["toolalpaca"].manifest.baselines["majority_tool"] == {"dev": None, "test": None}
    assert prepared["spell_backward"].manifest.baselines == {}


def test_baselines_of_each_task_show_its_shortcut(prepared):
    """The gold of every molecular-property question is the second-largest number."""
    found = prepared["sciknoweval-chemistry-raw"].manifest.by_task["molecular_property_prediction"]
    assert sum(found["rows"].values()) == 500
    assert found["baselines"]["second_largest_number"] == {"dev": 1.0, "test": 1.0}
    assert found["baselines"]["uniform"]["test"] == pytest.approx(0.25)


def test_baselines_majority_tool_is_called_without_arguments():
    train = [tool_call(("f", {"a": 1})), tool_call(("f", {})), tool_call(("g", {}))]
    test = [tool_call(("f", {})), tool_call(("f", {"a": 1})), tool_call(("f", {}), ("g", {})), tool_call(("g", {}))]
    found = _baselines(train=train, test=test)
    assert found.choices == {"majority_tool": "f"}
    assert found.scores == {"majority_tool": {"dev": None, "test": 0.25}}


def test_baselines_of_answers_without_options():
    found = _baselines(train=[true_false("No"), true_false("No"), true_false("Yes")], test=[true_false("Yes")])
    assert found.scores == {
        "uniform": {"dev": None, "test": 0.5},
        "best_constant_answer": {"dev": None, "test": 0.0},
    }
    word = make_problem("exact", label="blue", reference={"answer": "blue"})
    assert _baselines(train=[word], dev=[word]).scores == {"best_constant_answer": {"dev": 1.0, "test": None}}


def test_baselines_of_two_tasks_score_nothing_on_each_others_rows():
    rows = [mcq("B"), mcq("B"), mcq("B"), tool_call(("f", {}))]
    scores = _baselines(train=rows, test=rows).scores
    assert scores["best_constant_letter"]["test"] == 0.75
    assert scores["majority_tool"]["test"] == 0.25


def test_merge_counts_what_both_have_counted():
    """The letter is chosen on both together: B leads in each part, C in all."""
    first = _guesses(train=[mcq("B"), mcq("B"), mcq("C")], test=[mcq("C")])
    first.merge(_guesses(train=[mcq("C"), mcq("C"), mcq("A")], test=[mcq("C"), mcq("A")]))
    found = first.baselines()
    assert found.choices == {"best_constant_letter": "C"}
    assert found.scores["best_constant_letter"]["test"] == pytest.approx(2 / 3)
    assert dict(first.rows) == {"train": 6, "test": 3}
