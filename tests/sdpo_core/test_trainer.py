"""The step loop: data order, polling, learning rate, metrics of a step, samples."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sdpo_core.algorithms.table import algorithm
from sdpo_core.backends.base import Objective, TrainRow, UpdateStats
from sdpo_core.cell import Workers
from sdpo_core.errors import CellError, DataError
from sdpo_core.metrics import promised
from sdpo_core.records import Grade, Problem, Rollout, Verdict
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.trainer import StepOutcome, Trainer
from sdpo_core.workers import StudentWorker
from tests.sdpo_core.micro import ARMS, TRAITS, Base, grade_first_letter, make_problem, make_spec, plain_workers

# Arms that build their batches in different ways.
KINDS = ("grpo", "sdpo-ema", "opsd", "ppo", "opd", "blend")


def make_trainer(
    spec: CellSpec,
    *,
    base: Base,
    grade: Grade = grade_first_letter,
    problems: Sequence[Problem] | None = None,
    workers: Workers | None = None,
) -> Trainer:
    ticks = itertools.count()
    workers = workers or plain_workers(spec, folder=base.folder)
    return Trainer(
        spec,
        problems=[make_problem(i) for i in range(5)] if problems is None else problems,
        student=workers.student,
        teacher=workers.teacher,
        anchor=workers.anchor,
        text=base.text,
        algorithm=algorithm(spec),
        grade=grade,
        clock=lambda: float(next(ticks)),
    )


class Grader:
    """Half credit and feedback for all but the problems in `hopeless`. Remembers the order it met them in."""

    def __init__(self, *hopeless: str) -> None:
        self._hopeless = hopeless
        self.seen: list[str] = []

    def __call__(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        if not self.seen or self.seen[-1] != problem.id:
            self.seen.append(problem.id)
        if problem.id in self._hopeless:
            return Verdict(score=0.0, reason="wrong", feedback="", format_ok=False)
        verdict = grade_first_letter(problem, response, truncated)
        return Verdict(score=0.5, reason="wrong", feedback="Try again.", format_ok=verdict.format_ok)


def run_steps(spec: CellSpec, count: int, *, base: Base, grade: Grade) -> list[StepOutcome]:
    trainer, cursor, outcomes = make_trainer(spec, base=base, grade=grade), 0, []
    for number in range(1, count + 1):
        outcomes.append(trainer.step(number, cursor=cursor))
        cursor = outcomes[-1].cursor
    return outcomes


def test_arms_of_a_seed_see_the_same_problems(cell_spec: CellSpec, base: Base) -> None:
    """Two epochs of five problems, two a step: every epoch a permutation of its own, the same for each arm."""
    orders = {}
    for arm in KINDS:
        grader = Grader()
        run_steps(make_spec(cell_spec, arm=arm), 5, base=base, grade=grader)
        orders[arm] = grader.seen
    first = orders["grpo"]
    assert all(order == first for order in orders.values())
    assert sorted(first[:5]) == sorted(first[5:]) == [f"train-{i}" for i in range(5)]
    assert first[:5] != first[5:]
    other = Grader()
    spec = make_spec(cell_spec, arm="grpo").model_copy(update={"seed": 43})
    run_steps(spec, 5, base=base, grade=other)
    assert other.seen != first


def test_a_step_needs_only_its_number_and_cursor(cell_spec: CellSpec, base: Base) -> None:
    """A new trainer in a later epoch draws what the old one would have drawn."""
    spec = make_spec(cell_spec, arm="grpo")
    grader = Grader()
    make_trainer(spec, base=base, grade=grader).step(4, cursor=6)
    whole = Grader()
    run_steps(spec, 4, base=base, grade=whole)
    assert grader.seen == whole.seen[6:8]


def test_every_rollout_has_a_stream_of_its_own(cell_spec: CellSpec, base: Base) -> None:
    """Two steps at one cursor under one seed, and one under another: 18 rollouts, 18 streams."""
    keys: list[int] = []

    class Listening(StudentWorker):
        def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
            keys.extend(request.stream_key for request in requests)
            return super().generate(requests, sampling=sampling)

    spec = make_spec(cell_spec, arm="grpo")
    for seed, step in ((1, 1), (1, 2), (2, 1)):
        seeded = spec.model_copy(update={"seed": seed})
        student = Listening(seeded, folder=base.folder, device="cpu")
        make_trainer(seeded, base=base, workers=Workers(student=student, teacher=None)).step(step, cursor=0)
    assert len(keys) == len(set(keys)) == 18


@pytest.mark.parametrize("arm", ARMS)
def test_step_emits_the_promised_metrics(cell_spec: CellSpec, base: Base, arm: str) -> None:
    spec = make_spec(cell_spec, arm=arm)
    (outcome,) = run_steps(spec, 1, base=base, grade=grade_first_letter)
    assert set(outcome.metrics) == promised("step", TRAITS[arm])
    empty = {name for name, value in outcome.metrics.items() if value is None}
    # On the plain prompt equal weights have no divergence whose share the tail could be, and a support of the teacher's
    # own ids has nothing in common with it to measure.
    plain = {"distill/tail_share"} if arm in ("opd-student", "opd-teacher", "opd-union") else set()
    assert empty == plain | ({"distill/topk_overlap"} if arm == "opd-teacher" else set())


def test_metrics_of_a_step_are_those_of_its_rollouts(cell_spec: CellSpec, base: Base) -> None:
    """Counted from what the grader saw; a clock of whole ticks makes the seconds countable."""
    seen: list[tuple[str, bool, float]] = []

    def grade(problem: Problem, response: str, truncated: bool) -> Verdict:
        verdict = grade_first_letter(problem, response, truncated)
        seen.append((problem.id, truncated, verdict.score))
        return verdict

    (outcome,) = run_steps(make_spec(cell_spec, arm="grpo"), 1, base=base, grade=grade)
    metrics = outcome.metrics
    assert len(seen) == 6
    scores = [score for _, _, score in seen]
    assert metrics["train/reward"] == pytest.approx(sum(scores) / 6)
    assert metrics["train/truncated_fraction"] == pytest.approx(sum(cut for _, cut, _ in seen) / 6)
    assert metrics["train/dead_group_fraction"] == sum(len(set(scores[i : i + 3])) == 1 for i in (0, 3)) / 2
    assert metrics["train/optimizer_steps"] == 1
    phases = {name: metrics[f"cost/step_seconds/{name}"] for name in ("rollout", "grade", "teacher", "update", "other")}
    assert phases["rollout"] == phases["grade"] == phases["update"] == 1
    assert phases["teacher"] == 0
    seconds = sum(value for value in phases.values() if value is not None)
    tokens = metrics["train/response_tokens"]
    assert tokens is not None
    assert metrics["cost/rollouts_per_second"] == pytest.approx(6 / seconds)
    assert metrics["cost/tokens_per_second"] == pytest.approx(6 * tokens / seconds)


@pytest.mark.parametrize("minibatches", [1, 3])
def test_gap_to_the_engine_is_measured_before_any_update(cell_spec: CellSpec, base: Base, minibatches: int) -> None:
    """An engine whose first token of each rollout is 0.5 off, and two optimizer steps that move the policy far."""
    spec = make_spec(
        cell_spec, arm="grpo", algorithm={"minibatches": minibatches}, optimizer={"learning_rate": 0.5, "beta1": 0.0}
    )
    seen: list[Rollout] = []

    class Shifted(StudentWorker):
        def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
            found = super().generate(requests, sampling=sampling)
            seen.extend(found)
            return tuple(
                replace(one, sampling_logps=(one.sampling_logps[0] - 0.5, *one.sampling_logps[1:])) for one in found
            )

    workers = replace(plain_workers(spec, folder=base.folder), student=Shifted(spec, folder=base.folder, device="cpu"))
    metrics = make_trainer(spec, base=base, workers=workers).step(1, cursor=0).metrics
    first = seen[::minibatches]
    tokens = sum(len(rollout.response_ids) for rollout in first)
    assert tokens > len(first)
    assert metrics["train/engine_gap"] == pytest.approx(0.5 * len(first) / tokens, abs=1e-5)
    assert metrics["train/engine_gap_max"] == pytest.approx(0.5, abs=1e-5)


class Late(StudentWorker):
    """Hands out what it has sampled in the step before."""

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        kept, self.kept = getattr(self, "kept", None), super().generate(requests, sampling=sampling)
        return kept or self.kept


def late_trainer(spec: CellSpec, *, base: Base) -> Trainer:
    student = Late(spec, folder=base.folder, device="cpu")
    return make_trainer(spec, base=base, workers=replace(plain_workers(spec, folder=base.folder), student=student))


def test_rollouts_of_older_weights_need_a_correction(cell_spec: CellSpec, base: Base) -> None:
    trainer = late_trainer(make_spec(cell_spec, optimizer={"learning_rate": 0.1}), base=base)
    assert trainer.step(1, cursor=0).metrics["train/optimizer_steps"] == 1
    with pytest.raises(
        CellError, match=r"step 2: got rollouts of weights version 0, expected 1, .* need a rollout_cap"
    ):
        trainer.step(2, cursor=0)


def test_rollouts_of_older_weights_count_by_their_truncated_ratio(cell_spec: CellSpec, base: Base) -> None:
    """Weights that have hardly moved give ratios of about 1; a cap far below leaves as much of the gradient."""
    norms = {}
    for cap in (1e-9, 2.0):
        spec = make_spec(cell_spec, algorithm={"rollout_cap": cap}, optimizer={"learning_rate": 1e-7})
        trainer = late_trainer(spec, base=base)
        trainer.step(1, cursor=0)
        norms[cap] = trainer.step(2, cursor=0).metrics["train/grad_norm"]
    assert norms[2.0] is not None
    assert norms[2.0] > 1e-3
    assert norms[1e-9] == pytest.approx(norms[2.0] * 1e-9, rel=1e-2)


def test_rollouts_of_newer_weights_are_refused(cell_spec: CellSpec, base: Base) -> None:
    """Whoever sampled them counts otherwise than the student does."""
    spec = make_spec(cell_spec, algorithm={"rollout_cap": 2.0})

    class Ahead(StudentWorker):
        def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
            return tuple(replace(one, weights_version=1) for one in super().generate(requests, sampling=sampling))

    student = Ahead(spec, folder=base.folder, device="cpu")
    workers = replace(plain_workers(spec, folder=base.folder), student=student)
    with pytest.raises(CellError, match="got rollouts of weights version 1, expected 0"):
        make_trainer(spec, base=base, workers=workers).step(1, cursor=0)


def test_learning_rate_rises_linearly_to_its_constant(cell_spec: CellSpec, base: Base) -> None:
    """w = 3: a quarter of the rate at step 1, all of it from step 4 on."""
    spec = make_spec(cell_spec, arm="grpo", optimizer={"lr_warmup_steps": 3, "learning_rate": 0.4})
    rates: list[float] = []

    class Listening(StudentWorker):
        def update(self, rows: Sequence[TrainRow], objective: Objective, *, learning_rate: float) -> UpdateStats:
            rates.append(learning_rate)
            return super().update(rows, objective, learning_rate=learning_rate)

    student = Listening(spec, folder=base.folder, device="cpu")
    trainer = make_trainer(spec, base=base, workers=Workers(student=student, teacher=None))
    for number in range(1, 6):
        trainer.step(number, cursor=0)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_drop_skips_the_update_of_a_step_without_context(cell_spec: CellSpec, base: Base) -> None:
    spec = make_spec(cell_spec)
    workers = plain_workers(spec, folder=base.folder)
    before = workers.checksums()
    grader = Grader(*(f"train-{i}" for i in range(5)))
    outcome = make_trainer(spec, base=base, grade=grader, workers=workers).step(1, cursor=0)
    metrics = outcome.metrics
    assert (metrics["train/optimizer_steps"], metrics["train/loss"], metrics["train/grad_norm"]) == (0, None, None)
    assert metrics["feedback/skipped_prompts"] == 2
    assert metrics["distill/divergence"] is None
    assert metrics["cost/ema_updates"] == 0
    assert workers.checksums() == before
    assert outcome.cursor == 2


def test_poll_draws_other_problems_until_the_step_is_full(cell_spec: CellSpec, base: Base) -> None:
    """Four of five problems give no context: the cursor passes them, the reward still counts them."""
    spec = make_spec(cell_spec, algorithm={"no_context": "poll"})
    grader = Grader("train-0", "train-1", "train-2", "train-3")
    (outcome,) = run_steps(spec, 1, base=base, grade=grader)
    trained = [sample["problem_id"] for sample in outcome.samples]
    assert set(trained) == {"train-4"}
    assert grader.seen.count("train-4") == 2
    assert len(grader.seen) == outcome.cursor
    assert outcome.metrics["feedback/skipped_prompts"] == outcome.cursor - 2
    assert outcome.metrics["feedback/effective_fraction"] == 1
    assert outcome.cursor >= 6  # an epoch holds train-4 once
    assert outcome.metrics["train/reward"] == pytest.approx(0.5 * 2 / outcome.cursor)


@pytest.mark.parametrize("wanted", [1, 3])
def test_poll_gives_up_after_a_hundred_times_the_step(cell_spec: CellSpec, base: Base, wanted: int) -> None:
    """At most 100 problems for each wanted one, also when the last draw could pass the limit."""
    training = {"problems_per_step": wanted, "rollouts_per_problem": 1, "max_response_tokens": 1}
    spec = make_spec(cell_spec, algorithm={"no_context": "poll"}, training=training)
    problems = [make_problem(i) for i in range(7)]
    polled = 0

    def grade(_problem: Problem, _response: str, _truncated: bool) -> Verdict:
        """One single problem of the whole search has context, so that later draws are smaller than the step."""
        nonlocal polled
        polled += 1
        feedback = "Try again." if polled == 2 and wanted > 1 else ""
        return Verdict(score=0.0, reason="wrong", feedback=feedback, format_ok=True)

    found = 1 if wanted > 1 else 0
    with pytest.raises(CellError, match=f"step 1: got {found} usable groups from {100 * wanted} polled problems"):
        make_trainer(spec, base=base, grade=grade, problems=problems).step(1, cursor=0)
    assert polled == 100 * wanted


def test_error_policy_stops_the_step(cell_spec: CellSpec, base: Base) -> None:
    spec = make_spec(cell_spec, algorithm={"no_context": "error"})
    workers = plain_workers(spec, folder=base.folder)
    before = workers.checksums()
    grader = Grader(*(f"train-{i}" for i in range(5)))
    with pytest.raises(CellError, match=r"for rollout 0 of train-\d, expected a teacher context"):
        make_trainer(spec, base=base, grade=grader, workers=workers).step(1, cursor=0)
    assert workers.checksums() == before


def test_samples_show_what_the_teacher_saw(cell_spec: CellSpec, base: Base) -> None:
    (outcome,) = run_steps(make_spec(cell_spec), 1, base=base, grade=Grader())
    first = outcome.samples[0]
    assert [sample["rollout"] for sample in outcome.samples] == [0, 1, 2]
    assert first["step"] == 1
    assert first["feedback"] == "Try again."
    assert first["teacher_prompt"].startswith(first["prompt"].split("<|im_end|>")[0])
    assert "Try again." in first["teacher_prompt"]
    assert first["demonstrator"] is None
    (outcome,) = run_steps(make_spec(cell_spec, arm="grpo"), 1, base=base, grade=Grader())
    assert outcome.samples[0]["teacher_prompt"] is None


def test_training_on_nothing_is_refused(cell_spec: CellSpec, base: Base) -> None:
    with pytest.raises(DataError, match="got 0 training problems"):
        make_trainer(make_spec(cell_spec, arm="grpo"), base=base, problems=[])
