"""SciKnowEval rows as they were before the first release: the right option apart from the wrong ones, no letters.

Keys used: `question`, `type`, `domain`, `details`, `correct_option`, `wrong_option_1`, and for four options
`wrong_option_2` and `wrong_option_3`. Options are text or numbers. Some rows have a `fewshot_question`, which is not
used. Letters are given by the SHA-256 of question and option, so a row gets the same ones wherever it stands.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, comparison_key
from data_prep.shapes.questions import MultipleChoice, TrueOrFalse, option_text, truth
from data_prep.shapes.sciknoweval_raw import NUM_OPTIONS, TRUE_OR_FALSE, Head, question_problem, read_head
from sdpo_core.records import Problem

_SEED = "option order 1"


def _has_keys(row: Mapping[str, Any]) -> bool:
    return "correct_option" in row and "question" in row


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    head = read_head(row, origin=origin)
    texts = _texts(row, count=NUM_OPTIONS.get(head.kind, 2), kind=head.kind)
    asked = _true_or_false(head, texts=texts) if head.kind == TRUE_OR_FALSE else _multiple_choice(head, texts=texts)
    yield question_problem(head, asked=asked, origin=origin, shape=SHAPE.name)


SHAPE = Shape(name="sciknoweval-prerelease", has_keys=_has_keys, problems=_problems)


def _texts(row: Mapping[str, Any], *, count: int, kind: str) -> list[str]:
    """The options, the right one first."""
    keys = ["correct_option", *(f"wrong_option_{number}" for number in range(1, count))]
    present = [key for key in row if key == "correct_option" or key.startswith("wrong_option_")]
    if sorted(present) != sorted(keys):
        raise RowRejectedError("choices_mismatch", f"got {', '.join(present)}, expected {', '.join(keys)} ({kind})")
    if row["correct_option"] is None or row["correct_option"] == "":
        raise RowRejectedError("no_gold", "correct_option: expected the gold")
    return [_as_text(row[key], key=key) for key in keys]


def _as_text(value: object, *, key: str) -> str:
    # Numbers beyond these bounds are no option of any row, and Python refuses to write some of them.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100:
        return json.dumps(value)
    return option_text(value, where=key)


def _multiple_choice(head: Head, *, texts: list[str]) -> MultipleChoice:
    def place(text: str) -> str:
        return hashlib.sha256("\x1f".join((_SEED, comparison_key(head.question), text)).encode()).hexdigest()

    options = {chr(ord("A") + position): text for position, text in enumerate(sorted(texts, key=place))}
    gold = next(label for label, text in options.items() if text == texts[0])
    return MultipleChoice(text=head.question, options=options, gold=gold)


def _true_or_false(head: Head, *, texts: list[str]) -> TrueOrFalse:
    gold, other = map(truth, texts)
    if gold == other:
        raise RowRejectedError("gold_under_two_labels", f"correct_option and wrong_option_1 both mean {gold}")
    return TrueOrFalse(text=head.question, gold=gold)
