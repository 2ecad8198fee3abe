"""Rules that look across rows: repeats, groups that cross into test, contradicting golds.

Order matters: repeats go first, then training rows whose group is in test, then flags on what is left.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_prep.shapes.base import Quarantined, comparison_key
from data_prep.splits import Candidate
from sdpo_core.records import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the rules leave, in the order read."""

    kept: tuple[Candidate, ...]
    quarantined: tuple[Quarantined, ...]


def apply_rules(candidates: Sequence[Candidate]) -> Outcome:
    """Keep the first of exact repeats, take training rows whose group is in test out, flag contradictions."""
    quarantined: list[Quarantined] = []
    unique = _without_repeats(candidates, quarantined=quarantined)
    test_groups = {item.problem.group_key: item.problem.id for item in unique if item.problem.split == "test"}
    kept = []
    for item in unique:
        test_id = test_groups.get(item.problem.group_key)
        if test_id is None or item.problem.split == "test":
            kept.append(item)
        else:
            quarantined.append(item.row.quarantined("group_in_test", f"its question stands in test as {test_id}"))
    return Outcome(kept=_flag_contradictions(kept), quarantined=tuple(quarantined))


def _without_repeats(candidates: Sequence[Candidate], *, quarantined: list[Quarantined]) -> list[Candidate]:
    first_with_content: dict[tuple[str, ...], str] = {}
    ids: set[str] = set()
    kept = []
    # Test rows first: of a row on both sides of the split, training loses its copy.
    for index in sorted(range(len(candidates)), key=lambda index: candidates[index].problem.split != "test"):
        item = candidates[index]
        problem = item.problem
        # Within one side of the split; across it, the rule on groups decides.
        side = "test" if problem.split == "test" else "train"
        content = (side, problem.group_key, _gold_text(problem), *sorted(_choices(problem).values()))
        if content in first_with_content:
            quarantined.append(item.row.quarantined("exact_repeat", f"repeats {first_with_content[content]}"))
        elif problem.id in ids:
            quarantined.append(item.row.quarantined("repeated_id", f"{problem.id} was read before"))
        else:
            first_with_content[content] = problem.id
            ids.add(problem.id)
            kept.append(index)
    return [candidates[index] for index in sorted(kept)]


def _flag_contradictions(kept: Sequence[Candidate]) -> tuple[Candidate, ...]:
    golds: dict[str, set[str]] = defaultdict(set)
    for item in kept:
        golds[item.problem.group_key].add(_gold_text(item.problem))
    return tuple(
        _flagged(item, flag="same_stem_other_gold") if len(golds[item.problem.group_key]) > 1 else item for item in kept
    )


def _choices(problem: Problem) -> dict[str, str]:
    """Options for comparison, by label; none where the task has none."""
    return {choice["label"]: comparison_key(choice["text"]) for choice in problem.reference.get("choices", ())}


def _gold_text(problem: Problem) -> str:
    """The gold as content: of a choice its text, since letters are permuted between rows."""
    return _choices(problem).get(problem.label, problem.label)


def _flagged(item: Candidate, *, flag: str) -> Candidate:
    return replace(item, problem=replace(item.problem, flags=(*item.problem.flags, flag)))
