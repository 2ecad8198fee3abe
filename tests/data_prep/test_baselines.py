"""Guess baselines: hand-worked rules, and known figures of the shipped data."""

import pytest

from data_prep.baselines import baselines
from tests.data_prep.problems import mcq, tool_call


def test_baselines_chooses_on_train_and_scores_elsewhere():
    train = [mcq("C"), mcq("C"), mcq("A")]
    test = [mcq("C", {"A": "5", "B": "7", "C": "6"}), mcq("B", {"A": "wide", "B": "wider", "C": "bread"})]
    found = baselines("mcq", problems={"train": train, "dev": [], "test": test})
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


def test_baselines_majority_tool_is_called_without_arguments():
    train = [tool_call(("f", {"a": 1})), tool_call(("f", {})), tool_call(("g", {}))]
    test = [tool_call(("f", {})), tool_call(("f", {"a": 1})), tool_call(("f", {}), ("g", {})), tool_call(("g", {}))]
    found = baselines("tool_call", problems={"train": train, "dev": [], "test": test})
    assert found.choices == {"majority_tool": "f"}
    assert found.scores == {"majority_tool": {"dev": None, "test": 0.25}}
