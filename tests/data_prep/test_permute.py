"""Options in another order: gold, labels and prompt move together, or nothing moves."""

from collections import Counter
from dataclasses import replace

import pytest

from data_prep.graders.table import grade
from data_prep.permute import REFUSED, permuted
from data_prep.shapes.sciknoweval import split_options
from sdpo_core.records import Message, Problem
from tests.data_prep.problems import COPPER, mcq, tool_call


def _shown(
    problem: Problem, *, mark: str = "{}: ", gap: str = "\n", end: str = "\nPlease reason step by step."
) -> Problem:
    """The problem with a prompt that shows its options."""
    options = "".join(f"{gap}{mark.format(c['label'])}{c['text']}" for c in problem.reference["choices"])
    prompt = f"A: a stem may begin like a label\n{options}{end}"
    return replace(problem, prompt=(problem.prompt[0], Message(role="user", content=prompt)))


def _texts(problem):
    return {choice["label"]: choice["text"] for choice in problem.reference["choices"]}


@pytest.mark.parametrize("mark", ["{}: ", "{}. ", "({}) ", "{}) "])
@pytest.mark.parametrize("gap", ["\n", "\n\n"])
def test_permuted_moves_gold_labels_and_prompt_together(mark, gap):
    problem = _shown(mcq("B"), mark=mark, gap=gap)
    moved = permuted(problem, seed=1)
    assert _texts(moved)[moved.label] == COPPER["B"]
    assert moved.reference["answer_key"] == moved.label
    assert list(_texts(moved)) == list(COPPER)
    assert sorted(_texts(moved).values()) == sorted(COPPER.values())
    assert moved.prompt == _shown(moved, mark=mark, gap=gap).prompt
    assert moved.prompt != problem.prompt
    assert grade(moved, f"<answer>{moved.label}</answer>", False, level="none").score == 1.0


def test_permuted_depends_on_seed_and_row_alone():
    rows = [replace(_shown(mcq("B")), id=f"d/{n}") for n in range(2_000)]
    assert [permuted(row, seed=1) for row in rows[:50]] == [permuted(row, seed=1) for row in rows[:50]]
    assert [permuted(row, seed=1).label for row in rows] != [permuted(row, seed=2).label for row in rows]
    # 2,000 rows with gold B: a quarter each within four standard deviations of 19.4.
    counts = Counter(permuted(row, seed=1).label for row in rows)
    assert set(counts) == set("ABCD")
    assert all(abs(count - 500) < 78 for count in counts.values())


@pytest.mark.parametrize(
    "text",
    [
        "both A and B",
        "All of the above",
        "None of these",
        "Neither A nor C",
        "A, B and C",
        "only B",
        "both a and b",
        "Options A and B",
        "(A) and (C) are right",
        "A and C",
    ],
)
def test_permuted_refuses_options_that_speak_of_others(text):
    problem = _shown(mcq("B", {**COPPER, "D": text}))
    assert permuted(problem, seed=1) == replace(problem, flags=(REFUSED,))


@pytest.mark.parametrize(
    "text", ["C and H bonds", "A or B antigens", "vitamin D", "both t and e orbitals", "an option"]
)
def test_permuted_moves_options_that_only_look_so(text):
    problem = _shown(mcq("B", {**COPPER, "D": text}))
    assert REFUSED not in permuted(problem, seed=1).flags


def test_permuted_refuses_a_prompt_that_does_not_show_the_options_once():
    hidden = mcq("B")
    twice = _shown(mcq("B"))
    text = twice.prompt[-1].content
    twice = replace(twice, prompt=(Message(role="user", content=f"{text}\n\n{text}"),))
    for problem in (hidden, twice):
        assert permuted(problem, seed=1).flags == (REFUSED,)
        assert permuted(problem, seed=1).prompt == problem.prompt


def test_permuted_leaves_other_tasks_alone():
    problem = tool_call(("f", {}))
    assert permuted(problem, seed=1) is problem


def test_permuted_shipped_rows_read_as_their_references(prepared):
    """Every option of every row of the four domains, as the shape reads it from the prompt."""
    for domain in ("biology", "chemistry", "materials", "physics"):
        for rows in prepared[f"sciknoweval-{domain}"].problems.values():
            for row in rows:
                moved = permuted(row, seed=5)
                assert REFUSED not in moved.flags
                stem, options = split_options(moved.prompt[-1].content)
                assert options == _texts(moved)
                assert options[moved.label] == _texts(row)[row.label]
                assert stem == split_options(row.prompt[-1].content)[0]


def test_permuted_physics_has_no_favourite_letter(prepared):
    """B is right in 39 % of the rows as they come."""
    rows = [row for part in prepared["sciknoweval-physics-permuted"].problems.values() for row in part]
    counts = Counter(row.label for row in rows)
    assert max(counts.values()) / len(rows) < 0.30
    assert prepared["sciknoweval-physics-permuted"].manifest.splits == prepared["sciknoweval-physics"].manifest.splits
