"""Rules across rows, on hand-made candidates."""

from dataclasses import replace

from data_prep.rules import apply_rules
from data_prep.shapes.base import Origin
from data_prep.splits import Candidate, RawRow
from tests.data_prep.problems import COPPER, mcq

ORIGIN = Origin(dataset="d", domain="x", source="s", repository="r", revision="v", path="p", line=1, split="train")


def _candidate(idx, *, group, split="train", gold="B", choices=COPPER):
    problem = replace(mcq(gold, choices), id=f"d/s/{idx}", split=split, group_key=group)
    return Candidate(problem=problem, row=RawRow(line=str(idx).encode(), origin=ORIGIN))


def _ids(outcome):
    kept = [item.problem.id for item in outcome.kept]
    return kept, [(item.row, item.code) for item in outcome.quarantined]


def test_apply_rules_keeps_the_first_of_exact_repeats():
    """Other letters for the same options and gold text are a repeat, too; another gold is none."""
    permuted = {"A": "zinc", "B": "copper", "C": "nickel", "D": "cobalt"}
    rows = [
        _candidate(1, group="g"),
        _candidate(2, group="g", gold="A", choices=permuted),
        _candidate(3, group="g", gold="C"),
        _candidate(4, group="g", split="warmup"),
    ]
    outcome = apply_rules(rows)
    assert _ids(outcome) == (["d/s/1", "d/s/3"], [("2", "exact_repeat"), ("4", "exact_repeat")])
    assert [item.problem.flags for item in outcome.kept] == [("same_stem_other_gold",)] * 2


def test_apply_rules_takes_only_training_rows_out_for_test():
    rows = [
        _candidate(1, group="g"),
        _candidate(2, group="h", split="dev"),
        _candidate(3, group="g", split="test"),
        _candidate(4, group="h", split="test", gold="A"),
        _candidate(5, group="i"),
    ]
    outcome = apply_rules(rows)
    assert _ids(outcome) == (["d/s/3", "d/s/4", "d/s/5"], [("1", "group_in_test"), ("2", "group_in_test")])
    assert all(not item.problem.flags for item in outcome.kept)


def test_apply_rules_refuses_a_second_row_of_one_id():
    outcome = apply_rules([_candidate(1, group="g"), _candidate(1, group="h")])
    assert _ids(outcome) == (["d/s/1"], [("1", "repeated_id")])


def test_apply_rules_keeps_the_test_row_of_an_id_on_both_sides():
    rows = [_candidate(1, group="g"), _candidate(2, group="i"), _candidate(1, group="h", split="test")]
    outcome = apply_rules(rows)
    assert _ids(outcome) == (["d/s/2", "d/s/1"], [("1", "repeated_id")])
    assert [item.problem.split for item in outcome.kept] == ["train", "test"]
