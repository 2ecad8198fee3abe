"""Multiple choice and true/false: reads one final label, never a letter in prose."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from data_prep.feedback import CORRECT, Finding, listing, quote
from data_prep.graders.base import last_answer_block, last_boxed, visible_text
from sdpo_core.errors import DataError
from sdpo_core.records import Problem

_CUE = re.compile(r"\banswer(?:[ \t]+is\b|[ \t]*[:*_]*:)[ \t]*:?\s*", re.IGNORECASE)
# Where the statement that follows a cue ends: line, sentence, or the reason for it.
_STATEMENT_END = re.compile(
    r"\n|[.;!](?=\s|$)|,?\s(?:because|since|as|due|which|so|but)\b|,\s(?!or\b|and\b)(?=[a-z]{2,})"
)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|boxed)\s*\{(.*)\}", re.DOTALL)
_PREFIX = re.compile(
    r"(?:(?:the\s+)?(?:(?:correct|final|right|best)\s+)*answer\s*(?:is\b|:)\s*:?|option\b:?|choice\b:?)\s*",
    re.IGNORECASE,
)
_MARKUP = " \t\r\n*_`$\"'"
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_LABELLED = re.compile(r"\(?([A-Za-z])\s*[:.)\]]\s*(\S.*)", re.DOTALL)
_HEDGE = re.compile(r"[A-Za-z](?:\s*(?:,|/|&|;|\bor\b|\band\b)\s*[A-Za-z])+", re.IGNORECASE)
_LONE_CAPITAL = re.compile(r"(?<![A-Za-z0-9])[A-Z](?![A-Za-z0-9])")
_TRUTH = {"yes": "Yes", "true": "Yes", "no": "No", "false": "No"}
_TRUTH_WORD = re.compile(r"\b(?:yes|true|no|false)\b", re.IGNORECASE)
# Longer than any option: such a text is neither a label nor an option, and is not worth taking apart.
_MAX_ANSWER = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A label that was read, or why none was. `reason` None: nothing that looks like an answer."""

    label: str | None = None
    reason: str | None = None
    text: str = ""


_Reader = Callable[[str], Reading]


def grade_mcq(problem: Problem, *, response: str, truncated: bool) -> Finding:
    """Finding for a multiple-choice response; `format_ok`: one label of the row could be read."""
    gold, choices = _reference(problem)
    reading = _find_answer(response, truncated=truncated, read=lambda text: _read_label(text, choices=choices))
    revealed = f"{gold}: {choices[gold]}."
    return _finding(reading, gold=gold, revealed=revealed, labels=", ".join(choices))


def grade_true_false(problem: Problem, *, response: str, truncated: bool) -> Finding:
    """Finding for a yes/no response; true counts as yes, false as no."""
    gold = problem.reference.get("answer")
    if gold not in ("Yes", "No"):
        raise DataError(f"{problem.id}: got reference answer {gold!r}, expected 'Yes' or 'No'. Prepare the data again.")
    reading = _find_answer(response, truncated=truncated, read=_read_truth)
    return _finding(reading, gold=gold, revealed=f"{gold}.", labels="Yes, No")


def strip_markup(text: str) -> str:
    """A label or option text without markdown, quotes, brackets, LaTeX wrappers, "Option" and the final full stop."""
    text = unicodedata.normalize("NFKC", text).strip()
    while True:
        before = text
        wrapped = _WRAPPER.fullmatch(text)
        text = (wrapped[1] if wrapped else text).strip(_MARKUP)
        if len(text) > 1 and _BRACKETS.get(text[0]) == text[-1]:
            text = text[1:-1]
        prefix = _PREFIX.match(text)
        text = text[prefix.end() :] if prefix and prefix.end() < len(text) else text
        text = text.removesuffix(".")
        if text == before:
            return text


def _reference(problem: Problem) -> tuple[str, dict[str, str]]:
    try:
        gold = problem.reference["answer_key"]
        choices = {choice["label"]: choice["text"] for choice in problem.reference["choices"]}
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{problem.id}: got a reference without {error}, expected answer_key and choices. Prepare the data again."
        ) from None
    if gold not in choices or len(choices) < 2:
        raise DataError(
            f"{problem.id}: got gold {gold!r} and labels {list(choices)}, expected a gold among two or more labels. "
            "Prepare the data again."
        )
    return gold, choices


def _find_answer(response: str, *, truncated: bool, read: _Reader) -> Reading:
    """The final answer: last answer block, else last box, else last cue, else a response that is only a label."""
    text = visible_text(response)
    if text is None:
        return Reading(reason="truncated" if truncated else "open_reasoning")
    block = last_answer_block(text)
    if block is not None and block.text.strip() and (block.is_closed or not truncated):
        reading = _or_invalid(read(block.text), text=block.text)
        # A stop string may have taken the closing tag; then nothing but the label may follow the opening one.
        return reading if block.is_closed or reading.label else Reading(reason="no_answer")
    # A response that was cut says nothing final outside a closed block.
    if truncated or block is not None:
        return Reading(reason="truncated" if truncated else "no_answer")
    boxed = last_boxed(text)
    if boxed is not None:
        return _or_invalid(read(boxed), text=boxed)
    return _read_statement(text, read=read)


def _read_statement(text: str, *, read: _Reader) -> Reading:
    cues = list(_CUE.finditer(text))
    ends = [*(cue.start() for cue in cues), len(text)][1:]
    for cue, end in zip(reversed(cues), reversed(ends), strict=True):
        reading = read(_STATEMENT_END.split(text[cue.end() : end], maxsplit=1)[0])
        if reading.label or reading.reason:
            return reading
    # Without any cue only a bare label counts, not an option's text or a phrase.
    is_bare = len(strip_markup(text[:_MAX_ANSWER])) == 1 or strip_markup(text[:_MAX_ANSWER]).casefold() in _TRUTH
    reading = read(text) if is_bare else Reading()
    return reading if reading.label or reading.reason else Reading(reason="no_answer")


def _or_invalid(reading: Reading, *, text: str) -> Reading:
    return reading if reading.label or reading.reason else Reading(reason="invalid_label", text=text)


def _read_label(text: str, *, choices: Mapping[str, str]) -> Reading:
    if len(text) > _MAX_ANSWER:
        return Reading()
    with_text = [label for label, option in choices.items() if _same_text(text, option)]
    clean = strip_markup(text)
    if len(clean) == 1 and clean.isalpha():
        label = clean.upper()
        return Reading(label=label) if label in choices else Reading(reason="invalid_label", text=text)
    if len(with_text) == 1:
        return Reading(label=with_text[0])
    labelled = _LABELLED.fullmatch(clean)
    if labelled and labelled[1].upper() in choices:
        label = labelled[1].upper()
        if _same_text(labelled[2], choices[label]):
            return Reading(label=label)
    if len(set(_LONE_CAPITAL.findall(clean)) & set(choices)) > 1 or _HEDGE.fullmatch(clean):
        return Reading(reason="multiple_labels", text=text)
    if labelled:
        known = labelled[1].upper() in choices
        return Reading(reason="label_text_conflict" if known else "invalid_label", text=text)
    return Reading()


def _same_text(text: str, option: str) -> bool:
    """Equal after NFKC and markup; case counts, since it carries meaning in SMILES."""
    return " ".join(strip_markup(text).split()) == " ".join(strip_markup(option).split())


def _read_truth(text: str) -> Reading:
    clean = strip_markup(text[:_MAX_ANSWER])
    words = {_TRUTH[word.casefold()] for word in _TRUTH_WORD.findall(clean)}
    if len(words) > 1:
        return Reading(reason="multiple_labels", text=text)
    first = re.split(r"[\s,.:;!]", clean, maxsplit=1)[0].casefold()
    is_stated = clean.casefold() in _TRUTH or re.match(r"\w+[,.:;!]", clean) is not None
    return Reading(label=_TRUTH[first]) if first in _TRUTH and is_stated else Reading()


def _finding(reading: Reading, *, gold: str, revealed: str, labels: str) -> Finding:
    if reading.label is None:
        assert reading.reason is not None
        facts = {"quote": f'"{quote(reading.text, limit=78)}"', "labels": listing([labels], limit=100)}
        answer = quote(reading.text) or None
        return Finding(reason=reading.reason, gold=revealed, format_ok=False, answer=answer, facts=facts)
    is_right = reading.label == gold
    return Finding(
        reason=CORRECT if is_right else "wrong_label",
        gold=revealed,
        format_ok=True,
        score=1.0 if is_right else 0.0,
        answer=reading.label,
        facts={"label": reading.label},
    )
