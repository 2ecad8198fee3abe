"""What a guesser without a model scores: the floor that a trained policy has to beat.

Whatever a rule needs to know is chosen on train. Ties share the credit. `second_largest_number` plays only where all
options are bare numbers and the best constant letter elsewhere, as a policy that found the shortcut would.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdpo_core.records import Problem

Scores = dict[str, float | None]
_Picks = Callable[[Problem], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baselines:
    """Score by rule and split (None: no rows to choose or to score on), and what a rule chose on train."""

    scores: Mapping[str, Scores]
    choices: Mapping[str, str]


def baselines(task: str, *, problems: Mapping[str, Sequence[Problem]]) -> Baselines:
    """The guess baselines of a task on dev and test; a task without a rule has none."""
    train = problems["train"]
    scored = {split: problems[split] for split in ("dev", "test")}
    if task not in BASELINES:
        return Baselines(scores={}, choices={})
    return BASELINES[task](train, scored=scored)


def _mcq(train: Sequence[Problem], *, scored: Mapping[str, Sequence[Problem]]) -> Baselines:
    letter = _most_common([problem.label for problem in train])
    rules: dict[str, _Picks] = {
        "uniform": lambda problem: list(_texts(problem)),
        "longest_option": lambda problem: _extreme(problem, longest=True),
        "shortest_option": lambda problem: _extreme(problem, longest=False),
    }
    if letter is not None:
        rules["best_constant_letter"] = lambda _problem: [letter]
        rules["second_largest_number"] = lambda problem: _second_largest(problem) or [letter]
    scores: dict[str, Scores] = {
        name: {split: _score(rows, picks=picks) for split, rows in scored.items()} for name, picks in rules.items()
    }
    return Baselines(scores=scores, choices={} if letter is None else {"best_constant_letter": letter})


def _tool_call(train: Sequence[Problem], *, scored: Mapping[str, Sequence[Problem]]) -> Baselines:
    """Share of rows solved by one call, without arguments, of the tool most often called in train."""
    tool = _most_common([call["name"] for problem in train for call in problem.reference["calls"]])
    if tool is None:
        return Baselines(scores={"majority_tool": dict.fromkeys(scored)}, choices={})
    guess = [{"name": tool, "arguments": {}}]
    scores: Scores = {
        split: sum(problem.reference["calls"] == guess for problem in rows) / len(rows) if rows else None
        for split, rows in scored.items()
    }
    return Baselines(scores={"majority_tool": scores}, choices={"majority_tool": tool})


def _score(rows: Sequence[Problem], *, picks: _Picks) -> float | None:
    if not rows:
        return None
    shares = [(problem.label in chosen) / len(chosen) for problem in rows for chosen in [picks(problem)]]
    return sum(shares) / len(rows)


def _texts(problem: Problem) -> dict[str, str]:
    return {choice["label"]: choice["text"] for choice in problem.reference["choices"]}


def _extreme(problem: Problem, *, longest: bool) -> list[str]:
    lengths = {label: len(text) for label, text in _texts(problem).items()}
    target = max(lengths.values()) if longest else min(lengths.values())
    return [label for label, length in lengths.items() if length == target]


def _second_largest(problem: Problem) -> list[str]:
    try:
        numbers = {label: float(text) for label, text in _texts(problem).items()}
    except ValueError:
        return []
    ranked = sorted(set(numbers.values()))
    return [label for label, number in numbers.items() if number == ranked[-2]] if len(ranked) > 1 else []


def _most_common(values: Sequence[str]) -> str | None:
    """The most frequent value; of equally frequent ones the first in order."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value)) if counts else None


class Guess(Protocol):
    """The guess baselines of one task."""

    def __call__(self, train: Sequence[Problem], *, scored: Mapping[str, Sequence[Problem]]) -> Baselines: ...


# By task; one that is not here has none.
BASELINES: dict[str, Guess] = {
    "mcq": _mcq,
    "tool_call": _tool_call,
}
