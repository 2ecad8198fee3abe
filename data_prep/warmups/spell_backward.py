"""Warm-up for words spelled backward: true reversals, plain and under both kinds of teacher context."""

from collections.abc import Iterator, Sequence

from numpy.random import Generator

from data_prep.graders.table import grade
from sdpo_core.records import Problem, WarmupExample

# Shares of examples by teacher context; the rest has feedback on a corrupted attempt.
PLAIN_SHARE = 0.40
DEMONSTRATION_SHARE = 0.40

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def spell_backward_examples(problems: Sequence[Problem], *, rng: Generator) -> Iterator[WarmupExample]:
    """Endless examples; the response is the reversed word, bare."""
    while True:
        yield _example(problems[int(rng.integers(len(problems)))], rng=rng)


def _example(problem: Problem, *, rng: Generator) -> WarmupExample:
    kind = rng.random()
    gold = problem.label
    if kind < PLAIN_SHARE:
        return WarmupExample(problem=problem, response=gold)
    if kind < PLAIN_SHARE + DEMONSTRATION_SHARE:
        return WarmupExample(problem=problem, response=gold, demonstration=gold)
    verdict = grade(problem, corrupted(gold, rng=rng), False, level="diagnostic")
    return WarmupExample(problem=problem, response=gold, feedback=verdict.feedback)


def corrupted(word: str, *, rng: Generator) -> str:
    """A wrong attempt: one letter replaced, dropped or doubled, or two neighbours exchanged."""
    place = int(rng.integers(len(word)))
    kind = int(rng.integers(4))
    if kind == 0 and place > 0 and word[place] != word[place - 1]:
        letters = list(word)
        letters[place], letters[place - 1] = letters[place - 1], letters[place]
        return "".join(letters)
    if kind == 1 and len(word) > 1:
        return word[:place] + word[place + 1 :]
    if kind == 2:
        return word[:place] + word[place] + word[place:]
    step = 1 + int(rng.integers(len(_ALPHABET) - 1))
    other = _ALPHABET[(_ALPHABET.index(word[place]) + step) % len(_ALPHABET)]
    return word[:place] + other + word[place + 1 :]
