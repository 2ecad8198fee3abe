"""A cell that is killed and started again: the same numbers and weights, bit for bit."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpo_core.checkpoint import checkpoint_folder
from sdpo_core.errors import CellError
from sdpo_core.journal import Journal
from sdpo_core.records import Grade, Problem, Verdict
from sdpo_core.specs import CellSpec
from tests.sdpo_core.micro import TRAITS, Base, grade_first_letter, make_cell, make_spec, plain_workers
from tests.sdpo_core.test_cell import numbers, result, run


class Killed(BaseException):
    """The process goes away: nothing of ours may catch it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: Base) -> Callable[[CellSpec], Journal]:
    """The undisturbed run of a spec, trained once a module."""
    done: dict[str, Journal] = {}

    def undisturbed(spec: CellSpec) -> Journal:
        if spec.arm not in done:
            done[spec.arm] = run(spec, tmp_path_factory.mktemp(spec.arm), base=base)[0]
        return done[spec.arm]

    return undisturbed


def interrupted_grade(calls: int) -> Grade:
    """Grade `calls` responses, then be killed."""
    left = itertools.count(calls, -1)

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        if next(left) == 0:
            raise Killed
        return grade_first_letter(problem, response, truncated)

    return grade


# In the first evaluation, steps 1, 3 and 4, and the test.
CALLS = (2, 9, 22, 30, 38)
# What an arm must find again beside the student's weights: a teacher that moved, a value head and its moments, the
# start of a trust region, a held projection, an anchor.
RESUMED = ("ppo", "sdpo-trust-region", "opsd", "opd-union", "opd-full", "sdpo-live", "blend", "gspo", "grpo-k1", "opd")


@pytest.mark.parametrize(
    ("arm", "calls"),
    [
        *((arm, calls) for arm in ("grpo", "sdpo-static", "sdpo-ema") for calls in CALLS),
        *((arm, 22) for arm in RESUMED),
    ],
)
def test_resumed_cell_equals_the_undisturbed_one(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], base: Base, tmp_path: Path, arm: str, calls: int
) -> None:
    """Killed while grading, started again with new workers: every number and every bit of the weights is the same."""
    spec = make_spec(cell_spec, arm=arm)
    with pytest.raises(Killed):
        run(spec, tmp_path, base=base, grade=interrupted_grade(calls))
    journal, _ = run(spec, tmp_path, base=base)
    assert_same(journal, whole(spec))


@pytest.mark.parametrize("arm", ["grpo", "sdpo-ema", "ppo"])
def test_sparse_checkpoints_lose_steps_but_change_nothing(
    cell_spec: CellSpec, base: Base, tmp_path: Path, arm: str
) -> None:
    """A checkpoint every second step: killed in step 4, the journal of step 3 is cut and step 3 is trained again."""
    spec = make_spec(cell_spec, arm=arm, training={"checkpoint_every": 2})
    undisturbed, _ = run(spec, tmp_path / "whole", base=base)
    with pytest.raises(Killed):
        run(spec, tmp_path / "cut", base=base, grade=interrupted_grade(4 + 12 + 4 + 6 + 3))
    journal = Journal(tmp_path / "cut")
    assert [record.step for record in journal.read_metrics()] == [*([0] * ("divergence" in TRAITS[arm])), 0, 1, 2, 2, 3]
    assert journal.committed_step() == 2
    assert_same(run(spec, tmp_path / "cut", base=base)[0], undisturbed)


class KilledAtCommit(Journal):
    """A journal whose process dies when it is asked for its sizes, after the step's records were written."""

    def __init__(self, folder: Path, *, at: int) -> None:
        super().__init__(folder)
        self._left = at

    def sizes(self) -> dict[str, int]:
        self._left -= 1
        if self._left < 0:
            raise Killed
        return super().sizes()


@pytest.mark.parametrize("commits", [0, 1, 2, 4])
def test_killed_between_journal_and_checkpoint(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], base: Base, tmp_path: Path, commits: int
) -> None:
    """The records of the lost step are in the files and no checkpoint knows of them: they are cut, half lines too."""
    spec = make_spec(cell_spec)
    journal, workers = KilledAtCommit(tmp_path, at=commits), plain_workers(spec, folder=base.folder)
    with pytest.raises(Killed):
        make_cell(spec, journal=journal, workers=workers, text=base.text).run()
    assert Journal(tmp_path).read_metrics()[-1].step == commits
    with journal.metrics_path.open("a") as file:
        file.write('{"step": 99, "mom')
    assert_same(run(spec, tmp_path, base=base)[0], whole(spec))


def test_killed_before_the_result_is_written(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], base: Base, tmp_path: Path
) -> None:
    """The last checkpoint is there, the result is not: only the test is run again."""
    spec = make_spec(cell_spec)
    run(spec, tmp_path, base=base)
    Journal(tmp_path).result_path.unlink()
    assert_same(run(spec, tmp_path, base=base)[0], whole(spec))


def assert_same(journal: Journal, undisturbed: Journal) -> None:
    assert numbers(journal) == numbers(undisturbed)
    assert journal.read_samples() == undisturbed.read_samples()
    found, expected = result(journal), result(undisturbed)
    assert found["workers"] == expected["workers"]
    for content in (found, expected):
        content["metrics"] = {k: v for k, v in content["metrics"].items() if not k.startswith("cost/")}
    assert found["metrics"] == expected["metrics"]


def test_damaged_checkpoint_stops_the_cell_and_keeps_everything(
    cell_spec: CellSpec, base: Base, tmp_path: Path
) -> None:
    spec = make_spec(cell_spec, arm="grpo")
    with pytest.raises(Killed):
        run(spec, tmp_path, base=base, grade=interrupted_grade(22))
    weights = checkpoint_folder(Journal(tmp_path), 2) / "student" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CellError, match=f"checkpoint {weights}: got a damaged file"):
        run(spec, tmp_path, base=base)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
