"""One cell, spec to result: journal, metrics, resuming bit for bit, the choice on dev."""

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from sdpo_core.cell import CellData, Workers, require_splits
from sdpo_core.checkpoint import checkpoint_folder
from sdpo_core.errors import CellError, DataError
from sdpo_core.journal import Journal, MetricRecord
from sdpo_core.metrics import Moment, Trait, promised
from sdpo_core.records import Grade, Message, Problem, Split, Verdict
from sdpo_core.specs import CellSpec
from tests.sdpo_core.algorithms.teachers import WireTeacher
from tests.sdpo_core.micro import (
    ARMS,
    TRAITS,
    Base,
    grade_first_letter,
    make_cell,
    make_data,
    make_problem,
    make_spec,
    plain_workers,
)


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


def floats(journal: Journal) -> list[float]:
    return [value for record in journal.read_metrics() for value in record.metrics.values() if value is not None]


@pytest.mark.parametrize("arm", ARMS)
def test_journal_holds_what_the_arm_promises(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str
) -> None:
    """The self-distance first, dev at step 0, every second step and the last; test once at the end; nothing else."""
    spec = make_spec(cell_spec, arm=arm)
    journal = whole(spec)
    records = journal.read_metrics()
    moments = [(record.step, record.moment) for record in records]
    start = [(0, "start")] if "divergence" in TRAITS[arm] else []
    assert moments == [
        *start,
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
    assert all(math.isfinite(value) for value in floats(journal))
    samples = journal.read_samples()
    assert [sample["step"] for sample in samples] == [step for step in (1, 2, 3, 4) for _ in range(3)]
    assert any(sample["teacher_prompt"] for sample in samples) == ("context" in TRAITS[arm])


@pytest.mark.parametrize("arm", [arm for arm, traits in TRAITS.items() if "divergence" in traits])
def test_self_distance_is_measured_before_the_first_step(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str
) -> None:
    """Contract 7: equal weights on equal prompts; a later divergence is above this floor."""
    records = whole(make_spec(cell_spec, arm=arm)).read_metrics()
    floor = records[0].metrics["distill/self_distance"]
    assert floor is not None
    assert abs(floor) <= 1e-9
    later = [record.metrics["distill/divergence"] for record in records if record.moment == "step"]
    assert later[-1] is not None
    assert later[-1] > 1e-6


@pytest.mark.parametrize("arm", ARMS)
def test_result_sums_up_the_journal(cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str) -> None:
    journal = whole(make_spec(cell_spec, arm=arm))
    content, records = result(journal), journal.read_metrics()
    assert content["fingerprint"] == "f" * 20
    assert content["label"] == f"spell_backward/{arm}/42"
    assert content["steps"] == 4
    assert content["started"] < content["ended"]
    assert content["environment"] == {"threads": 1, "memory": "resident"}
    expected = {name for moment in get_args(Moment) for name in promised(moment, TRAITS[arm])}
    assert set(content["metrics"]) == expected
    steps = [record.metrics for record in records if record.moment == "step"]
    rewards = [metrics["train/reward"] or 0.0 for metrics in steps]
    assert content["metrics"]["train/reward"] == pytest.approx(sum(rewards) / 4)
    assert content["metrics"]["train/optimizer_steps"] == 4
    assert content["metrics"]["test/accuracy"] == records[-1].metrics["test/accuracy"]
    assert_weights_moved(content, traits=TRAITS[arm])


def assert_weights_moved(content: Mapping[str, Any], *, traits: Collection[Trait]) -> None:
    """The student's always, a teacher's where it follows, an anchor's never."""
    facts = content["workers"]
    assert set(facts) == {"student", *({"teacher", "anchor"} & set(traits))}
    student = facts["student"]
    assert student["weights_sha256_start"] != student["weights_sha256_end"]
    for name in facts.keys() - {"student"}:
        assert facts[name]["weights_sha256_start"] == student["weights_sha256_start"]
        moved = facts[name]["weights_sha256_end"] != facts[name]["weights_sha256_start"]
        assert moved == (name == "teacher" and "follows" in traits)
    if "follows" in traits:
        assert content["metrics"]["cost/ema_updates"] == content["metrics"]["train/optimizer_steps"]


@pytest.mark.parametrize("arm", ["sdpo-ema", "sdpo-live", "sdpo-trust-region"])
def test_teacher_that_follows_ends_where_its_schedule_says(
    cell_spec: CellSpec, whole: Callable[[CellSpec], Journal], arm: str
) -> None:
    """An EMA lags behind the student; a live teacher, and the second part of a trust region, are the student."""
    facts = result(whole(make_spec(cell_spec, arm=arm)))["workers"]
    is_student = facts["teacher"]["weights_sha256_end"] == facts["student"]["weights_sha256_end"]
    assert is_student == (arm != "sdpo-ema")


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
    journals = [whole(make_spec(cell_spec, arm=arm)) for arm in ARMS]
    starts = [next(row for row in numbers(journal) if row[1] == "evaluate") for journal in journals]
    assert all(start == starts[0] for start in starts)
    steps = [next(row for row in numbers(journal) if row[1] == "step") for journal in journals]
    assert len({step[2]["train/reward"] for step in steps}) == 1


def test_evaluations_ask_no_teacher(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Contract 36: dev and test are scored by the task alone, whatever the arm has beside it."""
    spec = make_spec(cell_spec, algorithm={"no_context": "drop"}, training={"steps": 1})
    workers = plain_workers(spec, folder=base.folder)
    teacher = WireTeacher(workers.teacher)
    asked: list[tuple[str, int]] = []

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        asked.append((problem.split, len(teacher.asked)))
        return grade_first_letter(problem, response, truncated)

    listening = replace(workers, teacher=teacher)
    make_cell(spec, journal=Journal(tmp_path), workers=listening, text=base.text, grade=grade).run()
    # The self-distance comes before the first evaluation, the questions of the one step before the second.
    assert list(dict.fromkeys(asked)) == [("dev", 1), ("train", 1), ("dev", 2), ("test", 2)]
    assert len(teacher.asked) == 2


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
    assert [record.moment for record in Journal(tmp_path).read_metrics()] == ["start", "evaluate"]
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
