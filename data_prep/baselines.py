"""What a guesser without a model scores: the floor that a trained policy has to beat.

Whatever a rule needs to know is chosen on train. Ties share the credit. `second_largest_number` plays only where all
options are bare numbers and the best constant letter elsewhere, as a policy that found the shortcut would. A rule has
nothing to say of rows of another task, and scores 0 there. Rows are looked at once, and counted, not kept.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Scores = dict[str, float | None]

SCORED = ("dev", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class Baselines:
    """Score by rule and split (None: no rows to choose or to score on), and what a rule chose on train."""

    scores: Mapping[str, Scores]
    choices: Mapping[str, str]


class _Play(NamedTuple):
    """What a rule makes of a row: `credit` as it is, or all of it if its `choice` on train was `right_for`."""

    rule: str
    credit: float = 0.0
    choice: str | None = None
    right_for: str | None = None


class Guesses:
    """Counts of what the guess rules would score on the rows that were added."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self._choice_of: dict[str, str | None] = {}
        self._credit: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._right_for: Counter[tuple[str, str, str]] = Counter()
        self._on_train: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count a canonical row; a task without a rule has none."""
        metadata = row["metadata"]
        split, task = metadata["split"], BASELINES.get(metadata["task"])
        self.rows[split] += 1
        if task is None:
            return
        if split == "train":
            self._on_train[task.choice].update(task.seen(row))
        for play in task.plays(row):
            self._choice_of[play.rule] = play.choice
            self._credit[play.rule, split] += play.credit
            if play.right_for is not None:
                self._right_for[play.rule, split, play.right_for] += 1

    def merge(self, other: "Guesses") -> None:
        """Count what another has counted."""
        self.rows += other.rows
        self._choice_of.update(other._choice_of)
        self._right_for += other._right_for
        for key, credit in other._credit.items():
            self._credit[key] += credit
        for choice, counts in other._on_train.items():
            self._on_train[choice] += counts

    def baselines(self) -> Baselines:
        """Scores on dev and test."""
        choices = {choice: _most_common(counts) for choice, counts in self._on_train.items() if counts}
        return Baselines(
            scores={
                rule: {split: self._score(rule, split, choices=choices) for split in SCORED} for rule in self._choice_of
            },
            choices=choices,
        )

    def _score(self, rule: str, split: str, *, choices: Mapping[str, str]) -> float | None:
        choice = self._choice_of[rule]
        if not self.rows[split] or (choice is not None and choice not in choices):
            return None
        chosen = 0 if choice is None else self._right_for[rule, split, choices[choice]]
        return (self._credit[rule, split] + chosen) / self.rows[split]


@dataclass(frozen=True, kw_only=True, slots=True)
class GuessRules:
    """The guess rules of one task, given canonical rows.

    `choice`: what is chosen on train, the most common of what is `seen` there. `plays`: what each rule makes of a row.
    """

    choice: str
    seen: Callable[[Mapping[str, Any]], Sequence[str]]
    plays: Callable[[Mapping[str, Any]], Iterator[_Play]]


def _mcq(row: Mapping[str, Any]) -> Iterator[_Play]:
    label = row["label"]
    texts = {choice["label"]: choice["text"] for choice in row["metadata"]["reference"]["choices"]}
    lengths = {key: len(text) for key, text in texts.items()}
    letter = "best_constant_letter"
    yield _Play("uniform", _share(label, list(texts)))
    yield _Play("longest_option", _share(label, _all_with(lengths, max(lengths.values()))))
    yield _Play("shortest_option", _share(label, _all_with(lengths, min(lengths.values()))))
    yield _Play(letter, choice=letter, right_for=label)
    second = _second_largest(texts)
    yield _Play("second_largest_number", _share(label, second), letter, None if second else label)


def _true_false(row: Mapping[str, Any]) -> Iterator[_Play]:
    yield _Play("uniform", 0.5)
    yield from _exact(row)


def _exact(row: Mapping[str, Any]) -> Iterator[_Play]:
    yield _Play("best_constant_answer", choice="best_constant_answer", right_for=row["label"])


def _tool_call(row: Mapping[str, Any]) -> Iterator[_Play]:
    """Right where one call, without arguments, of the tool most often called in train is all that is wanted."""
    calls = row["metadata"]["reference"]["calls"]
    is_bare = len(calls) == 1 and not calls[0]["arguments"]
    yield _Play("majority_tool", choice="majority_tool", right_for=calls[0]["name"] if is_bare else None)


def _gold(row: Mapping[str, Any]) -> Sequence[str]:
    return (row["label"],)


def _called(row: Mapping[str, Any]) -> Sequence[str]:
    return [call["name"] for call in row["metadata"]["reference"]["calls"]]


# By task; one that is not here has none.
BASELINES: dict[str, GuessRules] = {
    "mcq": GuessRules(choice="best_constant_letter", seen=_gold, plays=_mcq),
    "true_false": GuessRules(choice="best_constant_answer", seen=_gold, plays=_true_false),
    "exact": GuessRules(choice="best_constant_answer", seen=_gold, plays=_exact),
    "tool_call": GuessRules(choice="majority_tool", seen=_called, plays=_tool_call),
}


def _share(label: str, picks: Sequence[str]) -> float:
    return 1 / len(picks) if label in picks else 0.0


def _all_with(values: Mapping[str, float], target: float) -> list[str]:
    return [key for key, value in values.items() if value == target]


def _second_largest(texts: Mapping[str, str]) -> list[str]:
    try:
        numbers = {label: float(text) for label, text in texts.items()}
    except ValueError:
        return []
    ranked = sorted(set(numbers.values()))
    return _all_with(numbers, ranked[-2]) if len(ranked) > 1 else []


def _most_common(counts: Counter[str]) -> str:
    """The most frequent value; of equally frequent ones the first in order."""
    return min(counts, key=lambda value: (-counts[value], value))
