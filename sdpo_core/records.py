"""Torch-free records that travel between the parts: problems, rollouts, verdicts, groups."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sdpo_core.errors import DataError

Role = Literal["system", "user", "assistant"]
Split = Literal["train", "dev", "test", "warmup"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One chat turn."""

    role: Role
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One task: prompt messages, reference, metadata. The canonical row of `docs/data.md`.

    `reference` is what the grader of `task` needs; it never enters a student prompt. `group_key` names the
    rows that must stay on one side of a split. `privileged`: a right response in words, which only a teacher may read.
    """

    id: str
    prompt: tuple[Message, ...]
    label: str
    dataset: str
    task: str
    domain: str
    split: Split
    group_key: str
    reference: Mapping[str, Any]
    source: Mapping[str, Any]
    details: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    privileged: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The canonical JSON row; `privileged` only where there is one."""
        return {
            "id": self.id,
            "prompt": [{"role": turn.role, "content": turn.content} for turn in self.prompt],
            "label": self.label,
            **({} if self.privileged is None else {"privileged": self.privileged}),
            "metadata": {
                "dataset": self.dataset,
                "task": self.task,
                "domain": self.domain,
                "split": self.split,
                "source": dict(self.source),
                "reference": dict(self.reference),
                "details": dict(self.details),
                "group_key": self.group_key,
                "flags": list(self.flags),
            },
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any], *, where: str) -> "Problem":
        """Read a canonical row; `where` (file and line) opens the message of a broken one."""
        try:
            metadata = row["metadata"]
            place = f"{where}: {row['id']}"
            privileged = row.get("privileged")
            return cls(
                id=row["id"],
                prompt=tuple(
                    Message(role=turn["role"], content=plain_text(turn["content"], where=place))
                    for turn in row["prompt"]
                ),
                label=row["label"],
                dataset=metadata["dataset"],
                task=metadata["task"],
                domain=metadata["domain"],
                split=metadata["split"],
                group_key=metadata["group_key"],
                reference=metadata["reference"],
                source=metadata["source"],
                details=metadata["details"],
                flags=tuple(metadata["flags"]),
                privileged=None if privileged is None else plain_text(privileged, where=f"{place}: privileged"),
            )
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{where}: got a row without {error}, expected a canonical problem. Run `sdpo prepare` again."
            ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What grading says of one response.

    `score` lies in [0, 1]; only 1 counts as right. `reason` is a code of `data_prep/feedback.py` ("correct" when
    right). `feedback` is empty for a right answer and at feedback level `none`. `answer` is what was read.
    """

    score: float
    reason: str
    feedback: str
    format_ok: bool
    answer: str | None = None

    @property
    def is_correct(self) -> bool:
        return self.score == 1.0


# (problem, response text, was the response cut at the length limit) -> verdict
Grade = Callable[[Problem, str, bool], Verdict]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sampled response. `response_ids` ends with the end token when `finish` is "stop".

    `sampling_logps`: natural log-probability of each response token at the sampling temperature, under the
    weights of version `weights_version`.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampling_logps: tuple[float, ...]
    finish: Finish
    weights_version: int

    def __post_init__(self) -> None:
        if len(self.sampling_logps) != len(self.response_ids) or not self.prompt_ids:
            raise DataError(
                f"Rollout: got {len(self.prompt_ids)} prompt ids, {len(self.response_ids)} response ids and "
                f"{len(self.sampling_logps)} log-probabilities, expected a prompt and one log-probability a token."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GradedRollout:
    """A rollout with its decoded text (without the end token) and its verdict."""

    rollout: Rollout
    text: str
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The rollouts of one problem in one step. `position` is the problem's place in the cell's data order."""

    problem: Problem
    position: int
    members: tuple[GradedRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupExample:
    """One supervised example of the warm-up: the problem, optionally shown with teacher context, and a response."""

    problem: Problem
    response: str
    demonstration: str | None = None
    feedback: str | None = None


def plain_text(content: object, *, where: str) -> str:
    """`content`, which is text; DataError that names the kinds of its parts where it is anything else."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    kinds = dict.fromkeys(
        str(part.get("type", "object")) if isinstance(part, Mapping) else type(part).__name__ for part in parts
    )
    raise DataError(
        f"{where}: got content with parts of kind {', '.join(kinds) or 'none at all'}, expected plain text. Only text "
        "can be scored: leave such problems out."
    )


def read_problems(path: Path) -> tuple[Problem, ...]:
    """Read a canonical JSON Lines file."""
    problems = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: got {error}, expected one JSON object. Run `sdpo prepare` again.") from None
            problems.append(Problem.from_json(row, where=where))
    return tuple(problems)
