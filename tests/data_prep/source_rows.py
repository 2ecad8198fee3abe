"""Real rows for tests of shapes: the bundled files, the samples, and flat rows made as the hub's were."""

import json
import lzma
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import data_prep.shapes.base
from data_prep.shapes.base import Origin, RowRejectedError
from data_prep.shapes.table import recognise
from sdpo_core.records import Problem

SAMPLES = Path(__file__).parent / "samples"
BUNDLED = Path(data_prep.shapes.base.__file__).parents[1] / "bundled"
RAW = "hicai-zju-sciknoweval/v2-L3"
SIMULATED = "tangqiaoyu-toolalpaca/eval_simulated.json"
REAL = "tangqiaoyu-toolalpaca/eval_real.redacted.json"
TOOL_USE = "lasgroup-sdpo/tooluse/test.json"


@cache
def bundled(path: str) -> tuple[dict[str, Any], ...]:
    """Rows of a bundled file."""
    return _rows(lzma.decompress((BUNDLED / f"{path}.xz").read_bytes()))


@cache
def sample(name: str) -> tuple[dict[str, Any], ...]:
    """Rows of a sample file."""
    return _rows((SAMPLES / name).read_bytes())


def raw_files() -> list[str]:
    """The bundled raw SciKnowEval files."""
    folder = BUNDLED / RAW
    return sorted(f"{RAW}/{path.parent.name}/{path.stem}" for path in folder.rglob("*.xz"))


@cache
def reference(domain: str) -> tuple[dict[str, Any], ...]:
    """The reference's rows of a domain, both splits, in the order of their idx."""
    rows = [row for split in ("train", "test") for row in bundled(f"lasgroup-sdpo/sciknoweval/{domain}/{split}.json")]
    return tuple(sorted(rows, key=lambda row: row["idx"]))


@cache
def flat_rows() -> tuple[dict[str, Any], ...]:
    """The simulated requests in the columns of the hub's export, which keeps those without a `$` in their gold."""
    prompts = {row["prompt"].rpartition("\nQuestion: ")[2]: row["prompt"] for row in bundled(TOOL_USE)}
    return tuple(
        {
            "prompt": prompts[request],
            "name": api["Name"],
            "description": api["Description"],
            "nl_documentation": api["NLDocumentation"],
            "instruction": request,
            "golden_answer": answer,
            "golden_response": [""],
        }
        for api in bundled(SIMULATED)
        for request, answer in zip(api["Instructions"], api["Golden_Answers"], strict=True)
        if request in prompts
    )


def origin(path: str = "a/b.jsonl", *, line: int = 1, domain: str | None = None) -> Origin:
    """A place in a source."""
    return Origin(
        dataset="d", domain=domain, source="s", repository="r", revision="v", path=path, line=line, split="train"
    )


def outcomes(row: Mapping[str, Any], place: Origin) -> Iterator[Problem | RowRejectedError]:
    """What becomes of a row, a rejection of the whole row included."""
    try:
        yield from recognise(row).problems(row, place)
    except RowRejectedError as rejection:
        yield rejection


@cache
def read(path: str, *, domain: str | None = None) -> tuple[Problem | RowRejectedError, ...]:
    """What becomes of the rows of a bundled file."""
    return tuple(
        item
        for line, row in enumerate(bundled(path), start=1)
        for item in outcomes(row, origin(path, line=line, domain=domain))
    )


def _rows(content: bytes) -> tuple[dict[str, Any], ...]:
    text = content.decode("utf-8")
    return tuple(json.loads(text) if text.startswith("[") else map(json.loads, text.rstrip("\n").split("\n")))
