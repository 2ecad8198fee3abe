"""Questions for a teacher, in the trainer and served, and how far apart two answers are."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sdpo_core.algorithm_specs import TeacherSpec
from sdpo_core.backends.base import TeacherQuestion, TeacherScores, TokenRow, WeightsAt
from sdpo_core.journal import Journal
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Limits
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.served import ServedScorer
from sdpo_core.workers import TeacherWorker
from tests.sdpo_core.micro import MAX_POSITIONS, make_spec, ragged_rows
from tests.sdpo_core.test_cell import numbers

VOCAB = 259
K = 5
# Both sides run in float32, with sums in another order; the servers' own tests find up to 4.1e-6.
TOLERANCE = 1e-5
# Of servers that are killed: a cell's own limits hope for 10 s that they come back.
IMPATIENT = Limits(stall_seconds=2.0, health_seconds=3.0, attempts=3, retry_seconds=5.0)


def served_spec(spec: CellSpec) -> CellSpec:
    return CellSpec.model_validate({**spec.model_dump(), "teacher_placement": "sglang"})


def static_spec(spec: CellSpec) -> CellSpec:
    return served_spec(make_spec(spec, arm="sdpo-static", training={"temperature": 0.7}))


def ema_spec(spec: CellSpec) -> CellSpec:
    return served_spec(make_spec(spec, arm="sdpo-ema", training={"temperature": 0.7}))


@contextmanager
def served_teacher(
    spec: CellSpec,
    *,
    folder: Path,
    scratch: Path,
    weights: Path | None = None,
    sha256: str | None = None,
    limits: Limits | None = None,
) -> Iterator[TeacherWorker]:
    """A teacher with its server, which ends with the block."""
    life, at = spec.teacher, WeightsAt(folder=folder, weights=weights, sha256=sha256)
    assert life is not None
    worker = TeacherWorker(spec, life=life, at=at, device="cpu", where="sglang", scratch=scratch)
    scorer = scorer_of(worker)
    if limits is not None:
        scorer._client = SglangClient([scorer._endpoint()], limits=limits)
    try:
        yield worker
    finally:
        scorer.close()


def trainer_teacher(spec: CellSpec, *, folder: Path, weights: Path | None = None) -> TeacherWorker:
    life: TeacherSpec | None = spec.teacher
    assert life is not None
    return TeacherWorker(spec, life=life, at=WeightsAt(folder=folder, weights=weights), device="cpu")


def scorer_of(worker: TeacherWorker) -> ServedScorer:
    scorer = worker._scorer
    assert isinstance(scorer, ServedScorer)
    return scorer


def rows() -> list[TokenRow]:
    """A prompt of 2 tokens, a response of 1, and a sequence that fills the model's positions, among others."""
    draw = np.random.default_rng(4)
    shapes = ((2, 1), (2, 30), (100, MAX_POSITIONS - 100), (MAX_POSITIONS - 1, 1), (60, 8), (60, 8))
    drawn = [(draw.integers(0, VOCAB, prompt), draw.integers(0, VOCAB, response)) for prompt, response in shapes]
    more = [TokenRow(prompt_ids=tuple(p.tolist()), response_ids=tuple(r.tolist())) for p, r in drawn]
    return [*ragged_rows(), *more]


def questions(teacher: TeacherWorker, *, k: int = K) -> list[TeacherQuestion]:
    """At each token two of the teacher's best ids and others drawn at random."""
    plain = [TeacherQuestion(row=row) for row in rows()]
    found = []
    draw = np.random.default_rng(9)
    for question, answer in zip(plain, teacher.score(plain, support="teacher", top_k=2), strict=True):
        assert isinstance(answer, TeacherScores)
        assert answer.support_ids is not None
        ids = np.stack(
            [[*best, *[i for i in draw.permutation(VOCAB) if i not in best][: k - 2]] for best in answer.support_ids]
        )
        found.append(TeacherQuestion(row=question.row, student_ids=ids))
    return found


def largest_gap(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Between the numbers of answers; their ids, -1 and -inf of empty cells are equal, or it is infinite."""
    gaps = [0.0]
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, TeacherScores), one
        assert isinstance(other, TeacherScores), other
        for name in ("logps", "entropies", "support_ids", "table", "overlap", "states"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            if a is None:
                continue
            assert (a.shape, a.dtype) == (b.shape, b.dtype), name
            if name == "support_ids":
                np.testing.assert_array_equal(a, b)
                continue
            with np.errstate(invalid="ignore"):
                gaps.append(float(np.where(a == b, 0.0, np.abs(a - b)).max()))
    return max(gaps)


def largest_change(one: Journal, other: Journal) -> tuple[float, str]:
    """Of all that was measured, and where."""
    changes = [(0.0, "")]
    for (step, moment, found), (_, _, wanted) in zip(numbers(one), numbers(other), strict=True):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            expected = wanted[name]
            assert (value is None) == (expected is None), name
            if value is not None and expected is not None:
                changes.append((abs(value - expected) / max(1.0, abs(expected)), f"{name} at {moment} {step}"))
    return max(changes)


def running(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while."""
    deadline = time.monotonic() + 20
    while (left := [p for p in processes if _is_running(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
