"""Rules across rows, on hand-made problems in a spool."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.rules import FATES, NOT_DRAWN, Verdicts, apply_rules, thin
from data_prep.spool import RECORD, Spool
from sdpo_core.records import Problem
from tests.data_prep.problems import COPPER, mcq


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with Spool(tmp_path / "spool") as opened:
        yield opened


def _add(spool, idx, *, group, split="train", gold="B", choices=COPPER, stem="", source=0):
    problem: Problem = replace(mcq(gold, choices), id=f"d/s/{idx}", split=split, group_key=group)
    spool.add_problem(problem, f"{idx}\n".encode(), source=source, shape="made", extra=stem)


def _fates(spool: Spool) -> list[str]:
    return [FATES[fate] for fate in apply_rules(spool.records()).fate]


def _witnesses(verdicts: Verdicts) -> list[int]:
    return [int(row) for row in verdicts.witness]


def test_apply_rules_keeps_the_first_of_exact_repeats(spool):
    """Other letters for the same options and gold text are a repeat, too; another gold is none."""
    permuted = {"A": "zinc", "B": "copper", "C": "nickel", "D": "cobalt"}
    _add(spool, 1, group="g")
    _add(spool, 2, group="g", gold="A", choices=permuted)
    _add(spool, 3, group="g", gold="C")
    _add(spool, 4, group="g", split="warmup")
    verdicts = apply_rules(spool.records())
    assert [FATES[fate] for fate in verdicts.fate] == ["", "exact_repeat", "", "exact_repeat"]
    assert _witnesses(verdicts) == [-1, 0, -1, 0]
    assert list(verdicts.contradicts) == [True, False, True, False]


def test_apply_rules_takes_only_training_rows_out_for_test(spool):
    _add(spool, 1, group="g")
    _add(spool, 2, group="h", split="dev")
    _add(spool, 3, group="g", split="test")
    _add(spool, 4, group="h", split="test", gold="A")
    _add(spool, 5, group="i")
    verdicts = apply_rules(spool.records())
    assert [FATES[fate] for fate in verdicts.fate] == ["group_in_test", "group_in_test", "", "", ""]
    assert _witnesses(verdicts)[:2] == [2, 3]
    # The row that contradicted the fourth has left.
    assert not verdicts.contradicts.any()


def test_apply_rules_takes_training_rows_out_for_dev(spool):
    """Where a user names the splits, a question may stand in train and dev."""
    _add(spool, 1, group="g", gold="A")
    _add(spool, 2, group="g", split="dev")
    assert _fates(spool) == ["group_in_dev", ""]


def test_apply_rules_refuses_a_second_row_of_one_id(spool):
    _add(spool, 1, group="g")
    _add(spool, 1, group="h")
    assert _fates(spool) == ["", "repeated_id"]


def test_apply_rules_lets_a_refused_row_stand_in_nobodys_way(spool):
    """The second row leaves for its id, so the third repeats nothing that was kept."""
    _add(spool, 1, group="g")
    _add(spool, 1, group="h")
    _add(spool, 2, group="h")
    assert _fates(spool) == ["", "repeated_id", ""]


def test_apply_rules_keeps_the_test_row_of_an_id_on_both_sides(spool):
    _add(spool, 1, group="g")
    _add(spool, 2, group="i")
    _add(spool, 1, group="h", split="test")
    assert _fates(spool) == ["repeated_id", "", ""]


def test_apply_rules_marks_stems_as_the_source_has_them(spool):
    """Also of a training row that leaves, here for being a repeat; groups and stems are two things."""
    _add(spool, 1, group="g", stem="which is longer?")
    _add(spool, 2, group="g", stem="which is older?")
    _add(spool, 3, group="h", split="test", stem="which is older?")
    _add(spool, 4, group="i", split="test", stem="which is newer?")
    verdicts = apply_rules(spool.records())
    assert [FATES[fate] for fate in verdicts.fate] == ["", "exact_repeat", "", ""]
    assert list(verdicts.shares_stem) == [False, False, True, False]


def test_apply_rules_leaves_rejected_rows_alone(spool):
    spool.add_rejected(b"{}\n", source=0, shape="made", code="bad_json")
    spool.add_rejected(b"{}\n", source=0, shape="made", code="bad_json")
    _add(spool, 1, group="g")
    assert _fates(spool) == ["", "", ""]
    assert [int(code) for code in spool.records()["code"]] == [1, 1, 0]
    assert spool.line(spool.records()[2]) == b"1\n"


def test_apply_rules_of_nothing(spool):
    assert len(apply_rules(spool.records()).fate) == 0


def test_thin_keeps_the_proportion_of_the_weights(spool):
    for idx in range(30):
        _add(spool, idx, group=f"a{idx}", stem=f"draw {idx}")
    for idx in range(30, 40):
        _add(spool, idx, group=f"b{idx}", stem=f"draw {idx}", source=1)
    _add(spool, 40, group="c", split="dev")
    records = spool.records()
    fate = apply_rules(records).fate
    # The second source is the scarcer: 10 rows for a weight of 1, so 20 of the first for its 2.
    thin(records, weights=[2, 1], fate=fate)
    kept = fate != NOT_DRAWN
    assert [int(kept[:30].sum()), int(kept[30:40].sum()), bool(kept[40])] == [20, 10, True]
    assert set(np.argsort(records["extra"][:30])[:20]) == set(np.flatnonzero(kept[:30]))


def test_records_are_small():
    """Of the 200 bytes that preparing may keep of a row; the rules need some of them for a moment."""
    assert RECORD.itemsize <= 64
