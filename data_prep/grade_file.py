"""Grading of responses that stand in a file: what every mode says of each, beside each other.

One JSON object a line: `id` of a problem, `response`, and `truncated` (optional) for a response that was cut.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from data_prep.graders.table import GradeMode, grade, score
from sdpo_core.errors import DataError
from sdpo_core.records import Problem, Verdict, read_problems

MODES: tuple[GradeMode, ...] = get_args(GradeMode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """One response: its verdict, and the score in each mode (None where a mode has no rule for the task)."""

    problem: Problem
    verdict: Verdict
    scores: Mapping[GradeMode, float | None]

    def to_json(self) -> dict[str, Any]:
        """The JSON row."""
        return {
            "id": self.problem.id,
            "score": self.verdict.score,
            "reason": self.verdict.reason,
            "answer": self.verdict.answer,
            "format_ok": self.verdict.format_ok,
            "feedback": self.verdict.feedback,
            "scores": dict(self.scores),
        }


def grade_file(path: Path, *, data: Path) -> Iterator[Graded]:
    """Every response of a file, in order, with the problems of the data sets prepared below `data`.

    Raises:
        DataError: a line that is no response, or an id that no prepared data set holds.
    """
    lines = list(_responses(path))
    problems = find_problems(data, ids={line["id"] for _, line in lines})
    for number, line in lines:
        problem = problems.get(line["id"])
        if problem is None:
            raise DataError(
                f"{path}:{number}: got id {line['id']!r}, expected one of a prepared data set. "
                "Run `sdpo prepare` for its data set first."
            )
        response, truncated = line["response"], line.get("truncated", False)
        yield Graded(
            problem=problem,
            verdict=grade(problem, response, truncated, level="diagnostic"),
            scores={mode: score(problem, response, truncated, mode=mode) for mode in MODES},
        )


def summary(graded: Sequence[Graded]) -> list[tuple[str, ...]]:
    """Rows of a table: data set, responses, mean score in each mode, the most frequent reasons."""
    rows = []
    for dataset in dict.fromkeys(item.problem.dataset for item in graded):
        part = [item for item in graded if item.problem.dataset == dataset]
        reasons = Counter(item.verdict.reason for item in part).most_common(4)
        means = [_mean([item.scores[mode] for item in part]) for mode in MODES]
        rows.append((dataset, str(len(part)), *means, ", ".join(f"{reason} {count}" for reason, count in reasons)))
    return rows


def _responses(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not text.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: got {error}, expected one JSON object a line. Repair the file.") from None
        is_response = (
            isinstance(line, dict) and isinstance(line.get("id"), str) and isinstance(line.get("response"), str)
        )
        if not is_response or not isinstance(line.get("truncated", False), bool):
            raise DataError(
                f"{where}: got {str(line)[:60]}, expected texts `id` and `response`, and true or false for `truncated` "
                "if it stands. Repair the line."
            )
        yield number, line


def find_problems(data: Path, *, ids: set[str]) -> dict[str, Problem]:
    """The wanted problems of the data sets prepared below `data`; an id begins with the name of its data set."""
    found: dict[str, Problem] = {}
    names = {id_.split("/")[0] for id_ in ids}
    for folder in sorted(data.iterdir()) if data.is_dir() else ():
        if folder.name not in names:
            continue
        for split in ("train", "dev", "test"):
            path = folder / f"{split}.jsonl"
            if path.is_file():
                found |= {problem.id: problem for problem in read_problems(path) if problem.id in ids}
    return found


def _mean(scores: Sequence[float | None]) -> str:
    known = [value for value in scores if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "n/a"
