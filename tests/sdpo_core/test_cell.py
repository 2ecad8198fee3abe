"""One cell, spec to result: journal, metrics, resuming bit for bit, the choice on dev."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdpo_core.cell import CellData, Workers, require_splits
from sdpo_core.checkpoint import checkpoint_folder
from sdpo_core.errors import CellError, DataError
from sdpo_core.journal import Journal, MetricRecord
from sdpo_core.metrics import Trait, promised
from sdpo_core.records import Grade, Message, Problem, Split, Verdict
from sdpo_core.specs import CellSpec
from tests.sdpo_core.micro import (
    ARMS,
    Base,
    grade_first_letter,
    make_cell,
    make_data,
    make_problem,
    make_spec,
    plain_workers,
)

TRAITS: Mapping[str, tuple[Trait, ...]] = {"grpo": (), "sdpo-static": ("distill",), "sdpo-ema": ("distill", "ema")}


class Killed(BaseException):
    """The process goes away: nothing of ours may catch it."""


def run(spec: CellSpec, folder: Path, *, base: Base, grade: Grade = grade_first_letter) -> tuple[Journal, Workers]:
    """Run the cell in `folder` with workers fresh from the base."""
    journal, workers = Journal(folder), plain_workers(spec, folder=base.folder)
    make_cell(spec, journal=journal, workers=workers, text=base.text, grade=grade).run()
    return journal, workers


def numbers(journal: Journal) -> list[tuple[int, str, dict[str, float | None]]]:
    """Everything measured, without time and cost."""
    return [
        (record.step, record.moment, {k: v for k, v in record.metrics.items() if not k.startswith("cost/")})
        for record in journal.read_metrics()
    ]


def result(journal: Journal) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(journal.result_path.read_text())
    return content


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: Base) -> Callable[[CellSpec], Journal]:
    """The undisturbed run of a spec, trained once a module."""
    done: dict[str, Journal] = {}

    def undisturbed(spec: CellSpec) -> Journal:
        if spec.arm not in done:
            done[spec.arm] = run(spec, tmp_path_factory.mktemp(spec.arm), base=base)[0]
        return done[spec.arm]

    return undisturbed


@pytest.mark.parametrize("arm", ARMS)
def test_journal_holds_what_the_arm_promises(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str
) -> None:
    """Dev at step 0, every second step and the last; test once at the end; nothing else, and every value finite."""
    journal = whole(make_spec(cell_spec, arm=arm))
    records = journal.read_metrics()
    moments = [(record.step, record.moment) for record in records]
    assert moments == [
        (0, "evaluate"),
        (1, "step"),
        (2, "step"),
        (2, "evaluate"),
        (3, "step"),
        (4, "step"),
        (4, "evaluate"),
        (4, "end"),
    ]
    for record in records:
        assert set(record.metrics) == promised(record.moment, TRAITS[arm])
    samples = journal.read_samples()
    assert [sample["step"] for sample in samples] == [step for step in (1, 2, 3, 4) for _ in range(3)]
    assert any(sample["teacher_prompt"] for sample in samples) == (arm != "grpo")


@pytest.mark.parametrize("arm", ARMS)
def test_result_sums_up_the_journal(cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str) -> None:
    journal = whole(make_spec(cell_spec, arm=arm))
    content, records = result(journal), journal.read_metrics()
    assert content["fingerprint"] == "f" * 20
    assert content["label"] == f"spell_backward/{arm}/42"
    assert content["steps"] == 4
    assert content["started"] < content["ended"]
    assert content["environment"] == {"threads": 1, "memory": "resident"}
    expected = {name for moment in ("step", "evaluate", "end") for name in promised(moment, TRAITS[arm])}
    assert set(content["metrics"]) == expected
    steps = [record.metrics for record in records if record.moment == "step"]
    rewards = [metrics["train/reward"] or 0.0 for metrics in steps]
    assert content["metrics"]["train/reward"] == pytest.approx(sum(rewards) / 4)
    assert content["metrics"]["train/optimizer_steps"] == 4
    assert content["metrics"]["test/accuracy"] == records[-1].metrics["test/accuracy"]
    student = content["workers"]["student"]
    assert student["weights_sha256_start"] != student["weights_sha256_end"]
    if arm == "grpo":
        assert set(content["workers"]) == {"student"}
        return
    teacher = content["workers"]["teacher"]
    assert teacher["weights_sha256_start"] == student["weights_sha256_start"]
    assert (teacher["weights_sha256_end"] == teacher["weights_sha256_start"]) == (arm == "sdpo-static")
    assert teacher["weights_sha256_end"] != student["weights_sha256_end"]
    if arm == "sdpo-ema":
        assert content["metrics"]["cost/ema_updates"] == 4


def test_steps_walk_through_the_data(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Four steps of two problems: an epoch of all five, then three of the next, none twice."""
    seen: list[str] = []

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        if problem.split == "train" and seen[-1:] != [problem.id]:
            seen.append(problem.id)
        return grade_first_letter(problem, response, truncated)

    run(make_spec(cell_spec, arm="grpo"), tmp_path, base=base, grade=grade)
    assert len(seen) == 8
    assert len(set(seen[:5])) == 5
    assert len(set(seen[5:])) == 3


def test_arms_start_from_one_evaluation(cell_spec: CellSpec, whole: Callable[[CellSpec], Journal]) -> None:
    """Same seed, same base: before the first update nothing tells the arms apart."""
    starts = [numbers(whole(make_spec(cell_spec, arm=arm)))[0] for arm in ARMS]
    rewards = [whole(make_spec(cell_spec, arm=arm)).read_metrics()[1].metrics["train/reward"] for arm in ARMS]
    assert starts[0] == starts[1] == starts[2]
    assert len(set(rewards)) == 1


def interrupted_grade(calls: int) -> Grade:
    """Grade `calls` responses, then be killed."""
    left = itertools.count(calls, -1)

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        if next(left) == 0:
            raise Killed
        return grade_first_letter(problem, response, truncated)

    return grade


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("calls", [2, 9, 22, 30, 38])
def test_resumed_cell_equals_the_undisturbed_one(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], base: Base, tmp_path: Path, arm: str, calls: int
) -> None:
    """Killed while grading: in the first evaluation, steps 1, 3 and 4, and the test."""
    spec = make_spec(cell_spec, arm=arm)
    with pytest.raises(Killed):
        run(spec, tmp_path, base=base, grade=interrupted_grade(calls))
    journal, _ = run(spec, tmp_path, base=base)
    assert_same(journal, whole(spec))


@pytest.mark.parametrize("arm", ["grpo", "sdpo-ema"])
def test_sparse_checkpoints_lose_steps_but_change_nothing(
    cell_spec: CellSpec, base: Base, tmp_path: Path, arm: str
) -> None:
    """A checkpoint every second step: killed in step 4, the journal of step 3 is cut and step 3 is trained again."""
    spec = make_spec(cell_spec, arm=arm, training={"checkpoint_every": 2})
    undisturbed, _ = run(spec, tmp_path / "whole", base=base)
    with pytest.raises(Killed):
        run(spec, tmp_path / "cut", base=base, grade=interrupted_grade(4 + 12 + 4 + 6 + 3))
    journal = Journal(tmp_path / "cut")
    assert [record.step for record in journal.read_metrics()] == [0, 1, 2, 2, 3]
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


def scripted_evaluations(*right: set[str]) -> Grade:
    """Dev problems: in evaluation n those in `right[n]` are solved. Others by their first letter."""
    seen = itertools.count()

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        verdict = grade_first_letter(problem, response, truncated)
        if problem.split != "dev":
            return verdict
        evaluation = next(seen) // 4  # two problems, two samples
        return replace(verdict, score=float(problem.id in right[evaluation]))

    return grade


@pytest.mark.parametrize(
    ("right", "best"),
    [
        (({"dev-0"}, {"dev-0", "dev-1"}, {"dev-1"}), 2),
        (({"dev-0"}, {"dev-1"}, {"dev-0"}), 0),  # the earliest of equals
        ((set(), {"dev-1"}, {"dev-0", "dev-1"}), 4),
    ],
)
def test_test_at_best_dev_uses_the_step_chosen_on_dev(
    cell_spec: CellSpec, base: Base, tmp_path: Path, right: tuple[set[str], ...], best: int
) -> None:
    """Its scores are those of a model with the weights of that step; `test/*` are those of the last one."""
    spec = make_spec(cell_spec, arm="grpo", evaluation={"test_problems": 3, "samples_per_problem": 2})
    journal, workers = run(spec, tmp_path, base=base, grade=scripted_evaluations(*right))
    end = journal.read_metrics()[-1]
    assert end.metrics["test_at_best_dev/step"] == best
    facts = result(journal)["workers"]["student"]
    assert (workers.student.facts().weights_sha256 == facts["weights_sha256_end"]) == (best == 4)
    for prefix, step in (("test", 4), ("test_at_best_dev", best)):
        folder = checkpoint_folder(journal, step)
        again = plain_workers(spec, folder=base.folder)
        again.student.load_weights(folder / "student")
        cell = make_cell(spec, journal=Journal(tmp_path / "again"), workers=again, text=base.text)
        scores = cell._scores(make_data().test)
        assert {name: end.metrics[name] for name in scores.named(prefix)} == scores.named(prefix)
    assert sorted(path.name for path in journal.checkpoints.iterdir()) == sorted({f"step-{best:06d}", "step-000004"})


def test_evaluations_read_the_first_problems_of_a_split(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    seen: set[str] = set()

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        seen.add(problem.id)
        return grade_first_letter(problem, response, truncated)

    spec = make_spec(
        cell_spec, arm="grpo", training={"steps": 1}, evaluation={"dev_problems": 1, "test_problems": None}
    )
    run(spec, tmp_path, base=base, grade=grade)
    assert {name for name in seen if not name.startswith("train")} == {"dev-0", "test-0", "test-1", "test-2"}


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_too_long_prompt_is_refused_before_the_first_step(
    cell_spec: CellSpec, base: Base, tmp_path: Path, split: Split
) -> None:
    """The fourth problem of its split; dev and test read two, so theirs is no obstacle there."""
    long = make_problem(3, split=split, prompt=(Message(role="user", content="x" * 90),))
    spec = make_spec(cell_spec, arm="grpo", evaluation={"dev_problems": 4, "test_problems": 4})
    for reads_it in (True, False):
        data = make_data()
        data = replace(data, **{split: [*getattr(data, split)[:3], long]})
        if not reads_it:
            spec = make_spec(cell_spec, arm="grpo", training={"steps": 1})
        journal, workers = Journal(tmp_path / str(reads_it)), plain_workers(spec, folder=base.folder)
        cell = make_cell(spec, journal=journal, workers=workers, text=base.text, data=data)
        if reads_it or split == "train":
            with pytest.raises(DataError, match=rf"problem {split}-3: got a prompt of \d+ tokens, expected at most 80"):
                cell.run()
            assert not journal.folder.exists()
        else:
            cell.run()


def test_non_finite_metric_stops_the_cell(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Nothing is written down for a step that cannot be true."""

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        verdict = grade_first_letter(problem, response, truncated)
        return replace(verdict, score=float("inf")) if problem.split == "train" else verdict

    spec = make_spec(cell_spec, arm="sdpo-static")
    with pytest.raises(CellError, match=r"step 1: got non-finite \['train/reward'\]"):
        run(spec, tmp_path, base=base, grade=grade)
    assert [record.moment for record in Journal(tmp_path).read_metrics()] == ["evaluate"]
    assert not Journal(tmp_path).result_path.exists()


def test_done_cell_forgets_its_last_error(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    Journal(tmp_path).error_path.write_text('{"error": "x", "time": 1}')
    journal, _ = run(make_spec(cell_spec, arm="grpo", training={"steps": 1}), tmp_path, base=base)
    assert journal.status().state == "done"
    assert not journal.error_path.exists()


def test_leftover_records_without_a_checkpoint_are_cut(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    Journal(tmp_path).append_metrics(MetricRecord(step=7, moment="step", time=0.0, metrics={}))
    journal, _ = run(make_spec(cell_spec, arm="grpo", training={"steps": 1}), tmp_path, base=base)
    assert [record.step for record in journal.read_metrics()] == [0, 1, 1, 1]


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_empty_split_is_refused_by_name(split: str) -> None:
    parts = {"train": make_data().train, "dev": make_data().dev, "test": make_data().test, split: []}
    with pytest.raises(DataError, match=f"split '{split}': got 0 rows"):
        require_splits(CellData(**parts))
    require_splits(make_data())
