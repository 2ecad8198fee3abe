"""What SciKnowEval rows of every shape share: checks of options and gold, group, flags, the reference's messages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from data_prep.shapes.base import RowRejectedError, comparison_key, group_key, plain_text, shown
from sdpo_core.records import Message

CLOSING_REQUEST = "\nPlease reason step by step."
_SEQUENCE = re.compile(r"[A-Z]{20,}")
_PROMISES_DATA = re.compile(r"\bgiven (?:the following|data)\b", re.IGNORECASE)
_DECIMAL = re.compile(r"\d\.\d")
_TRUTH = {"yes": "Yes", "true": "Yes", "no": "No", "false": "No"}
_NUMBER_WORDS = {2: "two", 4: "four"}
# The reference's system message for four options is this text, to the byte.
_SYSTEM = """
{task} Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>

For the answer, only output {what}, and nothing else. {more}For example, if the answer is "{example}", just output:
<answer>
{example}
</answer>
"""
_TRUTH_SYSTEM = _SYSTEM.format(
    task="Given a true or false question, please answer whether it is true or not.",
    what='"Yes" or "No"',
    more="",
    example="Yes",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultipleChoice:
    """A question with options (label to text), texts as they stand in the source, and the gold label.

    `choices`: the options trimmed; `keys`: their texts for comparison.

    Raises:
        RowRejectedError: the gold is not among the labels, or its text stands under another, too.
    """

    text: str
    options: Mapping[str, str]
    gold: str
    choices: Mapping[str, str] = field(init=False)
    keys: tuple[str, ...] = field(init=False)

    task: ClassVar[str] = "mcq"

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", {label: text.strip() for label, text in self.options.items()})
        object.__setattr__(self, "keys", tuple(comparison_key(text) for text in self.options.values()))
        if self.gold not in self.options:
            labels = ", ".join(self.options)
            raise RowRejectedError("gold_not_a_label", f"got gold {shown(self.gold)}, expected one of {labels}")
        if self.keys.count(comparison_key(self.options[self.gold])) > 1:
            note = f"the text of gold {self.gold} stands under another label, too"
            raise RowRejectedError("gold_under_two_labels", note)

    def messages(self) -> tuple[Message, Message]:
        """The reference's messages: outer blanks of the texts survive, and the labels named are the row's."""
        system = _system_for(tuple(self.options))
        options = "".join(f"\n{label}: {text}" for label, text in self.options.items())
        user = f"{self.text}\n{options}{CLOSING_REQUEST}"
        return Message(role="system", content=system), Message(role="user", content=user)

    def group(self) -> str:
        """What stays on one side of a split: the stem, with the pair of sequences where the stem is generic."""
        texts = self.choices.values()
        if len(texts) == 2 and all(map(_SEQUENCE.fullmatch, texts)):
            return group_key(self.text, *sorted(texts))
        return group_key(self.text)

    def reference(self) -> dict[str, Any]:
        """What the grader needs."""
        choices = [{"label": label, "text": text} for label, text in self.choices.items()]
        return {"answer_key": self.gold, "choices": choices}

    def details(self) -> dict[str, int]:
        """Sizes."""
        return {"num_options": len(self.options)}

    def flags(self, *, system: str) -> tuple[str, ...]:
        """Defects that are kept; `system` is the message that stands before the question."""
        found = {
            "equal_options": len(set(self.keys)) < len(self.keys),
            "two_options_under_four_option_prompt": len(self.keys) == 2 and "four options" in system,
            "data_block_missing": _is_data_block_missing(self.text),
        }
        return tuple(flag for flag, is_set in found.items() if is_set)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrueOrFalse:
    """A question whose answer is Yes or No, text as it stands in the source."""

    text: str
    gold: str

    task: ClassVar[str] = "true_false"

    def messages(self) -> tuple[Message, Message]:
        """Messages in the style of the reference's, which has no such questions."""
        user = f"{self.text}\n{CLOSING_REQUEST}"
        return Message(role="system", content=_TRUTH_SYSTEM), Message(role="user", content=user)

    def group(self) -> str:
        """What stays on one side of a split."""
        return group_key(self.text)

    def reference(self) -> dict[str, Any]:
        """What the grader needs."""
        return {"answer": self.gold}

    def details(self) -> dict[str, int]:
        """Sizes: none."""
        return {}

    def flags(self, *, system: str) -> tuple[str, ...]:
        """Defects that are kept."""
        return ("data_block_missing",) if _is_data_block_missing(self.text) else ()


def option_text(value: object, *, where: str) -> str:
    """An option as it stands; blank text is `empty_option`."""
    if isinstance(value, str) and not value.strip():
        raise RowRejectedError("empty_option", f"got no text under {where}")
    return plain_text(value, where=where)


def truth(text: str) -> str:
    """Yes or No for a gold in words; true counts as yes, false as no."""
    found = _TRUTH.get(text.strip().casefold())
    if found is None:
        raise RowRejectedError("gold_not_a_label", f"got gold {shown(text)}, expected Yes or No")
    return found


@cache
def _system_for(labels: tuple[str, ...]) -> str:
    listed = " or ".join(labels) if len(labels) == 2 else f"{', '.join(labels[:-1])}, or {labels[-1]}"
    return _SYSTEM.format(
        task=f"Given a question and {_NUMBER_WORDS[len(labels)]} options, please select the right answer.",
        what=f"the letter corresponding to the correct option ({listed})",
        more="Do not restate the answer text. ",
        example=labels[0],
    )


def _is_data_block_missing(question: str) -> bool:
    return bool(_PROMISES_DATA.search(question)) and not _DECIMAL.search(question)
