"""Rows survive the disk, and a broken one names its file and line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdpo_core.errors import DataError
from sdpo_core.records import Message, Problem, Rollout, Verdict, read_problems


@pytest.fixture
def problem() -> Problem:
    return Problem(
        id="spell_backward-train-0",
        prompt=(
            Message(role="system", content="Answer briefly."),
            Message(role="user", content="Spell caf\u00e9 back."),
        ),
        label="\u00e9fac",
        dataset="spell_backward",
        task="spell_backward",
        domain="words",
        split="train",
        group_key="caf\u00e9",
        reference={"answer": "\u00e9fac"},
        source={"file": "words.txt", "line": 3},
        details={"letters": 4},
        flags=("accented",),
    )


def test_problem_survives_json(problem: Problem) -> None:
    row = json.loads(json.dumps(problem.to_json()))
    assert Problem.from_json(row, where="x:1") == problem


@pytest.mark.parametrize("field", ["id", "prompt", "label", "metadata"])
def test_problem_without_a_field_names_place_and_field(problem: Problem, field: str) -> None:
    row = problem.to_json()
    del row[field]
    with pytest.raises(DataError, match=rf"^train\.jsonl:7: .*{field}.* Run `sdpo prepare` again"):
        Problem.from_json(row, where="train.jsonl:7")


def test_problem_without_metadata_field_names_it(problem: Problem) -> None:
    row = problem.to_json()
    del row["metadata"]["group_key"]
    with pytest.raises(DataError, match="group_key"):
        Problem.from_json(row, where="x:1")


@pytest.mark.parametrize("prompt", [3, [3], [{"role": "user"}], None])
def test_problem_refuses_a_prompt_that_is_none(problem: Problem, prompt: Any) -> None:
    row = problem.to_json() | {"prompt": prompt}
    with pytest.raises(DataError, match=r"^x:1: "):
        Problem.from_json(row, where="x:1")


def test_privileged_text_is_in_a_row_only_where_there_is_one(problem: Problem) -> None:
    """Rows without it keep their bytes, and so their digests."""
    assert "privileged" not in problem.to_json()
    told = replace(problem, privileged="\u00e9fac")
    row = json.loads(json.dumps(told.to_json()))
    assert row.pop("privileged") == "\u00e9fac"
    assert row == problem.to_json()
    assert Problem.from_json(told.to_json(), where="x:1") == told
    assert Problem.from_json(row | {"privileged": None}, where="x:1") == problem


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        ([{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}], "image, text"),
        ([{"type": "video"}, {"url": "x"}, "x"], "video, object, str"),
        ({"type": "audio"}, "audio"),
        (None, "NoneType"),
        ([], "none at all"),
    ],
)
def test_problem_refuses_content_that_is_no_text_by_kind(problem: Problem, content: Any, kinds: str) -> None:
    expected = f"x:1: {problem.id}: got content with parts of kind {kinds}, expected plain text"
    row = problem.to_json()
    row["prompt"][0]["content"] = content
    with pytest.raises(DataError, match=f"^{expected}"):
        Problem.from_json(row, where="x:1")


def test_problem_refuses_privileged_parts(problem: Problem) -> None:
    with pytest.raises(DataError, match=f"x:1: {problem.id}: privileged: got content with parts of kind image"):
        Problem.from_json(problem.to_json() | {"privileged": [{"type": "image"}]}, where="x:1")


def test_read_problems_keeps_order(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [problem.to_json() | {"id": name} for name in ("b", "a", "c")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [problem.id for problem in read_problems(path)] == ["b", "a", "c"]


@pytest.mark.parametrize("line", ['{"id": ', "", '{"id": "a"}'])
def test_read_problems_names_the_broken_line(problem: Problem, tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(f"{json.dumps(problem.to_json())}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*Run `sdpo prepare` again"):
        read_problems(path)


@pytest.mark.parametrize(
    ("prompt", "response", "logps"),
    [((1,), (2, 3), (-0.1,)), ((1,), (2,), (-0.1, -0.2)), ((), (2,), (-0.1,))],
)
def test_rollout_refuses_uneven_parts(
    prompt: tuple[int, ...], response: tuple[int, ...], logps: tuple[float, ...]
) -> None:
    with pytest.raises(DataError, match="one log-probability a token"):
        Rollout(prompt_ids=prompt, response_ids=response, sampling_logps=logps, finish="stop", weights_version=0)


@pytest.mark.parametrize(("score", "is_correct"), [(1.0, True), (0.999, False), (0.0, False)])
def test_verdict_is_correct_only_at_full_score(score: float, is_correct: bool) -> None:
    assert Verdict(score=score, reason="x", feedback="", format_ok=True).is_correct is is_correct
