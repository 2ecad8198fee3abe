"""Raw SciKnowEval rows, V1 and V2: a question, its options in parallel lists, the gold letter or word.

Keys used: `question`, `type`, `domain`, `details` (level, task, subtask, source), `choices` ({text, label}) with
`answerKey`, or `answer`. Dumps before November 2024 leave out the fields that a row's type does not need. The
instruction under `prompt` asks for the bare answer; a problem has the reference's messages instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, file_stem, plain_text, shown, text_field
from data_prep.shapes.questions import MultipleChoice, TrueOrFalse, option_text, truth
from sdpo_core.records import Problem

TRUE_OR_FALSE = "true_or_false"
# Type of a multiple-choice row to its number of options.
NUM_OPTIONS = {"mcq-4-choices": 4, "mcq-2-choices": 2}
_DOMAINS = {
    "biology": "biology",
    "chemistry": "chemistry",
    "material": "materials",
    "materials": "materials",
    "physics": "physics",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a row says of itself: its question as it stands, its type, its domain in our words, its details."""

    question: str
    kind: str
    domain: str
    details: Mapping[str, str]


def read_head(row: Mapping[str, Any], *, origin: Origin) -> Head:
    """What every SciKnowEval row has; a level, type or domain that is not wanted is refused."""
    details = row.get("details")
    if not isinstance(details, Mapping):
        raise RowRejectedError("missing_field", f"details: got {shown(details)}, expected an object")
    level = text_field(details, "level")
    if level != "L3":
        raise RowRejectedError("level_not_l3", f"details.level: got {shown(level)}, expected 'L3'")
    kind = _kind(row)
    name = text_field(row, "domain")
    domain = _DOMAINS.get(name.casefold())
    if domain is None or origin.domain not in (None, domain):
        expected = origin.domain or f"one of {', '.join(_DOMAINS)}"
        raise RowRejectedError("other_domain", f"domain: got {shown(name)}, expected {expected}")
    names = {key: text_field(details, key) for key in ("task", "subtask", "source") if key in details}
    return Head(
        question=text_field(row, "question"),
        kind=kind,
        domain=domain,
        details={"level": level, **names, "type": kind},
    )


def question_problem(head: Head, *, asked: MultipleChoice | TrueOrFalse, origin: Origin, shape: str) -> Problem:
    """The problem of a row; its id names the file, in which a line has one place."""
    messages = asked.messages()
    idx = origin.line - 1
    return Problem(
        id=f"{origin.dataset}/{origin.source}/{head.domain}/{file_stem(origin.path)}/{idx}",
        prompt=messages,
        label=asked.gold,
        dataset=origin.dataset,
        task=asked.task,
        domain=head.domain,
        split=origin.split,
        group_key=asked.group(),
        reference=asked.reference(),
        source=origin.to_json(idx=idx, shape=shape),
        details={**head.details, **asked.details()},
        flags=asked.flags(system=messages[0].content),
    )


def _has_keys(row: Mapping[str, Any]) -> bool:
    return {"question", "details"} <= row.keys() and "correct_option" not in row


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    head = read_head(row, origin=origin)
    asked = _true_or_false(row, head=head) if head.kind == TRUE_OR_FALSE else _multiple_choice(row, head=head)
    yield question_problem(head, asked=asked, origin=origin, shape=SHAPE.name)


SHAPE = Shape(name="sciknoweval-raw", has_keys=_has_keys, problems=_problems)


def _kind(row: Mapping[str, Any]) -> str:
    value = row.get("type")
    # Older dumps hold a list; the benchmark's own evaluator reads its first element.
    kind = value[0] if isinstance(value, list) and value else value
    if not isinstance(kind, str) or kind not in (TRUE_OR_FALSE, *NUM_OPTIONS):
        known = ", ".join((TRUE_OR_FALSE, *NUM_OPTIONS))
        raise RowRejectedError("type_not_supported", f"type: got {shown(kind)}, expected one of {known}")
    return kind


def _gold(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None or value == "":
        raise RowRejectedError("no_gold", f"{key}: got {shown(value)}, expected the gold")
    return plain_text(value, where=key).strip()


def _true_or_false(row: Mapping[str, Any], *, head: Head) -> TrueOrFalse:
    choices = row.get("choices")
    if isinstance(choices, Mapping) and choices.get("text"):
        raise RowRejectedError("choices_mismatch", f"type: got {head.kind}, and choices with texts")
    return TrueOrFalse(text=head.question, gold=truth(_gold(row, "answer")))


def _multiple_choice(row: Mapping[str, Any], *, head: Head) -> MultipleChoice:
    choices = row.get("choices")
    texts, labels = (choices.get("text"), choices.get("label")) if isinstance(choices, Mapping) else (None, None)
    if not isinstance(texts, list) or not isinstance(labels, list):
        raise RowRejectedError("missing_field", "choices: expected an object with the lists text and label")
    count = NUM_OPTIONS[head.kind]
    if not len(texts) == len(labels) == count:
        got = f"got {len(texts)} texts and {len(labels)} labels"
        raise RowRejectedError("choices_mismatch", f"choices: {got}, expected {count} of each ({head.kind})")
    expected = [chr(ord("A") + position) for position in range(count)]
    if labels != expected:
        raise RowRejectedError("labels_not_read", f"choices.label: expected {', '.join(expected)}")
    options = {label: option_text(text, where=label) for label, text in zip(expected, texts, strict=True)}
    return MultipleChoice(text=head.question, options=options, gold=_gold(row, "answerKey"))
