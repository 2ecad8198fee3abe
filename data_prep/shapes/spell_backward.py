"""Words to spell backward: a line of a word list as {"word": ...}, in reasoning-gym's wording, no system message."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, declared_domain, group_key, text_field
from sdpo_core.records import Message, Problem

QUESTION = "Spell this word backward (example: sun -> nus): {word}"
_WORD = re.compile(r"[a-z]+")


def _has_keys(row: Mapping[str, Any]) -> bool:
    return row.keys() == {"word"}


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    word = text_field(row, "word")
    if not _WORD.fullmatch(word):
        raise RowRejectedError("not_a_word", f"got {word[:40]!r}, expected lower-case ASCII letters")
    answer = word[::-1]
    # Copying the word would be right: the row cannot tell a reversal from a copy.
    if answer == word:
        raise RowRejectedError("palindrome", f"{word} reads the same backward")
    yield Problem(
        id=f"{origin.dataset}/{origin.source}/{word}",
        prompt=(Message(role="user", content=QUESTION.format(word=word)),),
        label=answer,
        dataset=origin.dataset,
        task="spell_backward",
        domain=declared_domain(origin),
        split=origin.split,
        group_key=group_key(word),
        reference={"answer": answer, "word": word},
        source=origin.to_json(idx=origin.line - 1, shape=SHAPE.name),
        details={"num_letters": len(word)},
        # As the grader wants a response, and as the warm-up shows a demonstration: the bare word.
        privileged=answer,
    )


SHAPE = Shape(name="word", has_keys=_has_keys, problems=_problems)
