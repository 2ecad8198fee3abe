"""Warm-up for words spelled backward: true reversals, and demonstrations to be copied whatever they say.

Half of the demonstrations are of another word: only copying predicts them, so the model learns to read its context
instead of spelling twice.
"""

from numpy.random import Generator

from data_prep.graders.table import grade
from data_prep.warmups.base import Shares, Warmup
from sdpo_core.records import Problem, WarmupExample

_OWN_DEMONSTRATIONS = 0.5
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _example(problem: Problem, other: Problem, *, shares: Shares, rng: Generator) -> WarmupExample:
    """The response is a reversed word, bare; feedback is the grader's on a corrupted attempt."""
    kind = rng.random()
    gold = problem.label
    if kind < shares.plain:
        return WarmupExample(problem=problem, response=gold)
    if kind < shares.plain + shares.demonstration:
        shown = gold if rng.random() < _OWN_DEMONSTRATIONS else other.label
        return WarmupExample(problem=problem, response=shown, demonstration=shown)
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


SPELL_BACKWARD = Warmup(
    example=_example,
    right=lambda problem: problem.label,
    wrong=lambda problem, rng: corrupted(problem.label, rng=rng),
)
