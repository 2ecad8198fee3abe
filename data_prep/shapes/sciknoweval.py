"""Reference SciKnowEval rows: a prompt with lettered options, a gold letter, one system message.

Keys used: `idx`, `kind` ("mcq"), `prompt`, `answer`, `system`. Options are read from the last run of labels A, B, ...
in the prompt, since an option's or stem's own line may begin like a label.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import (
    Origin,
    RowRejectedError,
    Shape,
    comparison_key,
    declared_domain,
    group_key,
    index_field,
    text_field,
)
from sdpo_core.records import Message, Problem

_CLOSING_REQUEST = "\nPlease reason step by step."
_LABEL_LINE = re.compile(r"^([A-Z]): ?", re.MULTILINE)
_SEQUENCE = re.compile(r"[A-Z]{20,}")
_PROMISES_DATA = re.compile(r"\bgiven (?:the following|data)\b", re.IGNORECASE)
_DECIMAL = re.compile(r"\d\.\d")


def _has_keys(row: Mapping[str, Any]) -> bool:
    return {"kind", "prompt"} <= row.keys() and row["kind"] != "tooluse"


def _problems(row: Mapping[str, Any], origin: Origin) -> Iterator[Problem]:
    yield _problem(row, origin)


def _problem(row: Mapping[str, Any], origin: Origin) -> Problem:
    idx = index_field(row, "idx")
    prompt = text_field(row, "prompt")
    gold = text_field(row, "answer").strip()
    system = text_field(row, "system")
    if row.get("kind") != "mcq":
        raise RowRejectedError("type_not_supported", f"kind: got {row.get('kind')!r}, expected 'mcq'")
    stem, choices = split_options(prompt)
    _check_gold(gold, choices=choices)
    return Problem(
        id=f"{origin.dataset}/{origin.source}/{idx}",
        prompt=(Message(role="system", content=system), Message(role="user", content=prompt)),
        label=gold,
        dataset=origin.dataset,
        task="mcq",
        domain=declared_domain(origin),
        split=origin.split,
        group_key=_group(stem, choices=choices),
        reference={
            "answer_key": gold,
            "choices": [{"label": label, "text": text} for label, text in choices.items()],
        },
        source=origin.to_json(idx=idx, shape=SHAPE.name),
        details={"num_options": len(choices)},
        flags=_flags(stem, choices=choices, system=system),
    )


SHAPE = Shape(name="sciknoweval-reference", has_keys=_has_keys, problems=_problems)


def split_options(prompt: str) -> tuple[str, dict[str, str]]:
    """Stem and options (label to text), trimmed, from the last run of labels A, B, ... of a prompt."""
    body = prompt.rstrip().removesuffix(_CLOSING_REQUEST)
    lines = list(_LABEL_LINE.finditer(body))
    starts = [position for position, line in enumerate(lines) if line[1] == "A"]
    run = lines[starts[-1] :] if starts else []
    labels = [line[1] for line in run]
    if len(run) < 2 or labels != [chr(ord("A") + position) for position in range(len(run))]:
        raise RowRejectedError("options_not_found", f"got labels {labels}, expected a run A, B, ...")
    ends = [line.start() for line in run[1:]] + [len(body)]
    texts = [body[line.end() : end].strip() for line, end in zip(run, ends, strict=True)]
    if not all(texts):
        raise RowRejectedError("empty_option", f"got no text under {labels[texts.index('')]}")
    return body[: run[0].start()].strip(), dict(zip(labels, texts, strict=True))


def _check_gold(gold: str, *, choices: Mapping[str, str]) -> None:
    if gold not in choices:
        raise RowRejectedError("gold_not_a_label", f"got gold {gold!r}, expected one of {', '.join(choices)}")
    keys = [comparison_key(text) for text in choices.values()]
    if keys.count(comparison_key(choices[gold])) > 1:
        raise RowRejectedError("gold_under_two_labels", f"the text of gold {gold} stands under another label, too")


def _group(stem: str, *, choices: Mapping[str, str]) -> str:
    # The stems of the two protein-pair tasks are generic: the two sequences to compare are the question's data.
    if len(choices) == 2 and all(_SEQUENCE.fullmatch(text) for text in choices.values()):
        return group_key(stem, *sorted(choices.values()))
    return group_key(stem)


def _flags(stem: str, *, choices: Mapping[str, str], system: str) -> tuple[str, ...]:
    keys = [comparison_key(text) for text in choices.values()]
    found = {
        "equal_options": len(set(keys)) < len(keys),
        "two_options_under_four_option_prompt": len(choices) == 2 and "four options" in system,
        "data_block_missing": bool(_PROMISES_DATA.search(stem)) and not _DECIMAL.search(stem),
    }
    return tuple(flag for flag, is_set in found.items() if is_set)
