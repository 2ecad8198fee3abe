"""A served teacher on a real server: the scores of one in the trainer, its weights' life, its server's death."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import ScoringModel, TeacherQuestion, TokenRow
from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.model_folder import weights_digest
from sdpo_core.rollout.publish import publish
from sdpo_core.specs import CellSpec
from sdpo_core.workers import TeacherWorker
from tests.sdpo_core.micro import Base, load_model
from tests.sdpo_core.sglang.families import member
from tests.sdpo_core.teacher.serving import (
    IMPATIENT,
    TOLERANCE,
    K,
    ema_spec,
    largest_gap,
    questions,
    rows,
    running,
    scorer_of,
    served_teacher,
    static_spec,
    trainer_teacher,
)

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

SUPPORTS: tuple[Support | None, ...] = ("student", "teacher", "union", None)


class Student:
    """Weights that move by the same steps each time."""

    def __init__(self, base: Base) -> None:
        self._model = load_model(base.folder)
        self._generator = torch.Generator().manual_seed(3)

    def step(self) -> None:
        moved = {
            name: value + 0.05 * torch.randn(value.shape, generator=self._generator)
            for name, value in self._model.weights().items()
        }
        self._model.blend(moved, rate=1.0)

    def weights(self) -> "dict[str, Tensor]":
        return self._model.weights()


@pytest.mark.parametrize("support", SUPPORTS)
def test_scores_are_those_of_the_trainers_teacher(
    static: TeacherWorker, cell_spec: CellSpec, base: Base, support: Support | None
) -> None:
    """Contracts 6 and 29: every support at the cell's temperature, the same ids, shortest and longest sequences."""
    trainer = trainer_teacher(static_spec(cell_spec), folder=base.folder)
    asked = questions(trainer)
    top_k = 0 if support is None else K
    found = static.score(asked, support=support, top_k=top_k)
    gap = largest_gap(found, trainer.score(asked, support=support, top_k=top_k))
    assert gap <= TOLERANCE
    assert static.score([], support=support, top_k=top_k) == ()


def test_union_of_wide_supports_has_the_trainers_ids(static: TeacherWorker, cell_spec: CellSpec, base: Base) -> None:
    """As wide as almost the whole vocabulary: most ids are of both sides, and cells are empty."""
    trainer = trainer_teacher(static_spec(cell_spec), folder=base.folder)
    asked = questions(trainer, k=200)
    wanted = trainer.score(asked, support="union", top_k=200)
    assert largest_gap(static.score(asked, support="union", top_k=200), wanted) <= TOLERANCE


def test_static_teacher_is_unchanged_and_says_so(static: TeacherWorker, base: Base, tmp_path: Path) -> None:
    """Contract 26: its digest is that of the folder, before and after; its checkpoint holds the digest alone."""
    facts = static.facts()
    assert facts.weights_sha256 == weights_digest(base.folder)
    assert facts.pid == os.getpid()
    static.save(tmp_path / "teacher")
    assert [path.name for path in (tmp_path / "teacher").iterdir()] == ["served.json"]
    static.load(tmp_path / "teacher")
    (tmp_path / "teacher" / "served.json").write_text(json.dumps({"weights_sha256": "0" * 64}))
    with pytest.raises(CellError, match=f"got weights {facts.weights_sha256}, expected 0000"):
        static.load(tmp_path / "teacher")
    assert static.follow(Student(base)) is False
    with pytest.raises(SpecError, match="its schedule is 'static'"):
        scorer_of(static).blend({}, rate=1.0)
    assert static.peak_memory_bytes() > 100 * 2**20


def test_what_cannot_be_scored_is_refused_in_words(static: TeacherWorker) -> None:
    asked = questions(static)
    first = asked[0]
    assert first.student_ids is not None
    with pytest.raises(SpecError, match=r"output projection, expected a support of ids.* teacher_placement 'trainer'"):
        static.projection()
    with pytest.raises(SpecError, match="output projection"):
        static.score(asked, support="full", top_k=0)
    with pytest.raises(SpecError, match="without the student's ids for support 'student'"):
        static.score([TeacherQuestion(row=first.row)], support="student", top_k=K)
    for spoilt in (first.student_ids + 255, first.student_ids * 0, first.student_ids[:, :3], -1 - first.student_ids):
        with pytest.raises(DataError, match=f"expected {K} different ones from 0 to 258"):
            static.score([TeacherQuestion(row=first.row, student_ids=spoilt)], support="union", top_k=K)
    too_long = TokenRow(prompt_ids=tuple(range(200)), response_ids=tuple(range(57)))
    with pytest.raises(DataError, match="HTTP 400"):
        static.score([TeacherQuestion(row=too_long)], support=None, top_k=0)


def test_contract_30_a_served_teachers_weights_go_to_no_rollout_engine(static: TeacherWorker) -> None:
    scorer = scorer_of(static)
    assert isinstance(scorer, ScoringModel)
    with pytest.raises(SpecError, match="got a ServedScorer, expected the student's policy"):
        publish(scorer, canary=())


def test_ema_is_the_trainers_over_three_commits(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Contracts 26 and 28: after each commit scores, digest and checkpoint are those of the teacher in the trainer."""
    spec = ema_spec(cell_spec)
    trainer, student = trainer_teacher(spec, folder=base.folder), Student(base)
    with served_teacher(spec, folder=base.folder, scratch=tmp_path / "scratch") as served:
        gaps, digests = [], [served.facts().weights_sha256]
        for _ in range(3):
            student.step()
            assert served.follow(student) is trainer.follow(student) is True
            asked = questions(trainer)
            wanted = trainer.score(asked, support="student", top_k=K)
            gaps.append(largest_gap(served.score(asked, support="student", top_k=K), wanted))
            assert served.facts().weights_sha256 == trainer.facts().weights_sha256
            digests.append(served.facts().weights_sha256)
        assert max(gaps) <= TOLERANCE
        assert len(set(digests)) == 4
        kept = sorted(path.name for path in (tmp_path / "scratch").iterdir())
        assert kept == ["server.log", "version-3"]

        for side, worker in (("served", served), ("trainer", trainer)):
            worker.save(tmp_path / side)
        a, b = (load_file(tmp_path / side / WEIGHTS_FILE) for side in ("served", "trainer"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)

        student.step()
        served.follow(student)
        served.load(tmp_path / "served")
        assert largest_gap(served.score(asked, support="student", top_k=K), wanted) <= TOLERANCE
        processes = scorer_of(served).server.processes()
    assert running(processes) == []


def test_server_comes_back_with_the_weights_it_had_or_not_at_all(
    cell_spec: CellSpec, base: Base, tmp_path: Path
) -> None:
    """A checkpoint's weights over its base. The server hangs and is replaced; it dies and is replaced; it dies again,
    and what it would read has changed by then.
    """
    model = load_model(base.folder)
    model.blend({name: value + 0.1 for name, value in model.weights().items()}, rate=1.0)
    model.save_weights(tmp_path / "checkpoint")
    spec = static_spec(cell_spec)
    trainer = trainer_teacher(spec, folder=base.folder, weights=tmp_path / "checkpoint")
    digest = trainer.facts().weights_sha256
    where: dict[str, Any] = {"folder": base.folder, "weights": tmp_path / "checkpoint", "scratch": tmp_path / "scratch"}
    with pytest.raises(CellError, match=f"checkpoint: got weights {digest}, expected 1111"):  # noqa: SIM117
        with served_teacher(spec, sha256="1" * 64, **where):
            pass
    with served_teacher(spec, sha256=digest, limits=IMPATIENT, **where) as served:
        asked = questions(trainer)
        wanted = trainer.score(asked, support="union", top_k=K)
        assert largest_gap(served.score(asked, support="union", top_k=K), wanted) <= TOLERANCE
        assert served.facts().weights_sha256 == digest
        scorer = scorer_of(served)
        before = scorer.server.processes()
        member(before, "scheduler").suspend()
        assert largest_gap(served.score(asked, support="union", top_k=K), wanted) <= TOLERANCE
        assert running(before) == []

        # A cell asks for the facts of its workers at its end.
        for process in scorer.server.processes():
            process.kill()
        assert served.facts().weights_sha256 == digest
        assert largest_gap(served.score(asked, support="union", top_k=K), wanted) <= TOLERANCE

        path = tmp_path / "scratch" / "start" / WEIGHTS_FILE
        save_file({name: value * 1.01 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})
        before = scorer.server.processes()
        for process in before:
            process.kill()
        with pytest.raises(CellError, match=f"expected {digest}, as at the start"):
            served.score(asked, support="union", top_k=K)
        assert running(before) == []


def test_contract_28_lost_weights_are_found_by_the_canary(static: TeacherWorker, base: Base, tmp_path: Path) -> None:
    """A server whose weights have become uniform, or a little other ones, behind the teacher's back."""
    scorer, weights = scorer_of(static), load_model(base.folder).weights()
    changes: dict[str, Any] = {
        "nats from those of version 0": {name: value * 1.01 for name, value in weights.items()},
        "the same log-probability": {name: torch.zeros_like(value) for name, value in weights.items()},
    }
    try:
        for place, (message, changed) in enumerate(changes.items()):
            folder = tmp_path / str(place)
            folder.mkdir()
            save_file(changed, folder / WEIGHTS_FILE)
            scorer._client.update_from_folder(folder, version=place)
            with pytest.raises(DataError, match=r"scores of weights '.*', expected '.*', which the canary"):
                static.score([TeacherQuestion(row=rows()[0])], support=None, top_k=0)
            with pytest.raises(CellError, match=message):
                static.facts()
    finally:
        scorer._client.update_from_folder(base.folder, version=len(changes))
        assert static.facts().weights_sha256 == weights_digest(base.folder)


def test_bfloat16_is_served_within_its_own_tolerance(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """The master copy stays float32: after commits too small for bfloat16 it has moved all the same.

    A static teacher whose weights the dtype would round is refused before anything starts.
    """
    narrow = {"dtype": "bfloat16"}
    with pytest.raises(CellError, match="expected weights that this dtype holds"):  # noqa: SIM117
        with served_teacher(static_spec(cell_spec).model_copy(update=narrow), folder=base.folder, scratch=tmp_path):
            pass
    spec = ema_spec(cell_spec)
    trainer = trainer_teacher(spec, folder=base.folder)
    asked = questions(trainer)
    with served_teacher(spec.model_copy(update=narrow), folder=base.folder, scratch=tmp_path / "scratch") as served:
        student = Student(base)
        student.step()
        served.follow(student)
        trainer.follow(student)
        wanted = trainer.score(asked, support=None, top_k=0)
        assert TOLERANCE < largest_gap(served.score(asked, support=None, top_k=0), wanted) < 1.0
        small = {name: value * (1 + 2**-11) for name, value in scorer_of(served).weights().items()}
        scorer_of(served).blend(small, rate=1.0)
        assert all(torch.equal(value, small[name]) for name, value in scorer_of(served).weights().items())
