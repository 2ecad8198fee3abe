"""Reference SciKnowEval rows: a prompt with lettered options, a gold letter, one system message.

Keys used: `idx`, `kind` ("mcq"), `prompt`, `answer`, `system`. Options are read from the last run of labels A, B, ...
in the prompt, since an option's or stem's own line may begin like a label.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from data_prep.shapes.base import Origin, RowRejectedError, Shape, declared_domain, index_field, shown, text_field
from data_prep.shapes.questions import CLOSING_REQUEST, MultipleChoice
from sdpo_core.records import Message, Problem

_LABEL_LINE = re.compile(r"^([A-Z]): ?", re.MULTILINE)


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
        raise RowRejectedError("type_not_supported", f"kind: got {shown(row.get('kind'))}, expected 'mcq'")
    stem, choices = split_options(prompt)
    question = MultipleChoice(text=stem, options=choices, gold=gold)
    return Problem(
        id=f"{origin.dataset}/{origin.source}/{idx}",
        prompt=(Message(role="system", content=system), Message(role="user", content=prompt)),
        label=gold,
        dataset=origin.dataset,
        task="mcq",
        domain=declared_domain(origin),
        split=origin.split,
        group_key=question.group(),
        reference=question.reference(),
        source=origin.to_json(idx=idx, shape=SHAPE.name),
        details=question.details(),
        flags=question.flags(system=system),
    )


SHAPE = Shape(name="sciknoweval-reference", has_keys=_has_keys, problems=_problems)


def split_options(prompt: str) -> tuple[str, dict[str, str]]:
    """Stem and options (label to text), trimmed, from the last run of labels A, B, ... of a prompt."""
    body = prompt.rstrip().removesuffix(CLOSING_REQUEST)
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
