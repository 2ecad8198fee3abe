"""Cells whose teacher is served: they train as with one in the trainer, and outlive its server or say why not."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sdpo_core.cell import Workers
from sdpo_core.errors import CellError
from sdpo_core.journal import Journal
from sdpo_core.records import Problem, Verdict
from sdpo_core.specs import CellSpec
from sdpo_core.workers import StudentWorker, TeacherWorker
from tests.sdpo_core.micro import Base, grade_first_letter, make_cell, make_spec, plain_workers
from tests.sdpo_core.sglang.families import member
from tests.sdpo_core.teacher.serving import (
    IMPATIENT,
    largest_change,
    running,
    scorer_of,
    served_spec,
    served_teacher,
)
from tests.sdpo_core.test_cell import result

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

# Of losses, divergences and probabilities; the scores themselves differ by 4e-6 at most.
TOLERANCE = 1e-5
STEPS = 3


@contextmanager
def served_workers(spec: CellSpec, *, folder: Path, scratch: Path) -> Iterator[tuple[Workers, TeacherWorker]]:
    with served_teacher(spec, folder=folder, scratch=scratch, limits=IMPATIENT) as teacher:
        yield Workers(student=StudentWorker(spec, folder=folder, device="cpu"), teacher=teacher), teacher


def at_grade(number: int, act: Callable[[], None]) -> Callable[[Problem, str, bool], Verdict]:
    """The micro cell's grader, which acts when it is called for the `number`-th time."""
    count = itertools.count(1)

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        if next(count) == number:
            act()
        return grade_first_letter(problem, response, truncated)

    return grade


def test_cell_trains_as_with_its_teacher_in_the_trainer(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Its scheduler is killed after the second step: a new one has the EMA of the last commit. Losses stay the same."""
    plain = make_spec(cell_spec, arm="sdpo-ema", training={"steps": STEPS})
    journals = {name: Journal(tmp_path / name) for name in ("trainer", "sglang")}
    workers = plain_workers(plain, folder=base.folder)
    make_cell(plain, journal=journals["trainer"], workers=workers, text=base.text).run()
    spec = served_spec(plain)
    with served_workers(spec, folder=base.folder, scratch=tmp_path / "scratch") as (workers, teacher):
        before = scorer_of(teacher).server.processes()

        # 6 answers to dev before the first step, 6 rollouts a step, and 6 answers to dev after the second.
        grade = at_grade(6 + 2 * 6 + 6 + 1, member(before, "scheduler").kill)
        make_cell(spec, journal=journals["sglang"], workers=workers, text=base.text, grade=grade).run()
        after = scorer_of(teacher).server.processes()
        assert {process.pid for process in before}.isdisjoint(process.pid for process in after)
        assert len(after) >= 4
        assert running(before) == []
    change, where = largest_change(journals["sglang"], journals["trainer"])
    assert change <= TOLERANCE, where
    assert journals["sglang"].read_samples() == journals["trainer"].read_samples()
    found, wanted = (result(journals[name])["workers"]["teacher"] for name in ("sglang", "trainer"))
    assert found["weights_sha256_start"] == wanted["weights_sha256_start"]


def test_cell_whose_server_cannot_come_back_fails_with_its_reason(
    cell_spec: CellSpec, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 27: no scores stand in, no process is left, and the checkpoint before it is whole."""
    spec = served_spec(make_spec(cell_spec, arm="sdpo-static", training={"steps": STEPS}))
    journal = Journal(tmp_path / "cell")
    with served_workers(spec, folder=base.folder, scratch=tmp_path / "scratch") as (workers, teacher):
        processes = scorer_of(teacher).server.processes()

        def kill() -> None:
            for process in processes:
                process.kill()
            monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(shutil.which("false")))

        grade = at_grade(6 + 6 + 1, kill)
        with pytest.raises(CellError, match=r"(?s)ManagedServer: got an end before it was ready.*server\.log"):
            make_cell(spec, journal=journal, workers=workers, text=base.text, grade=grade).run()
        assert running(processes) == []
        assert scorer_of(teacher).server.processes() == ()
    assert not journal.result_path.exists()
    assert journal.committed_step() == 1
