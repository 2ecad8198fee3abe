"""One cell, spec to result: resume or start, train, evaluate on dev, checkpoint, and test at the end."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sdpo_core.algorithms.base import Student
from sdpo_core.algorithms.table import algorithm
from sdpo_core.checkpoint import DriverState, Savable, checkpoint_folder, load_checkpoint, read_state, save_checkpoint
from sdpo_core.errors import CellError, DataError
from sdpo_core.evaluate import Scores, evaluate
from sdpo_core.journal import Journal, MetricRecord, write_json
from sdpo_core.metrics import Moment, check_emitted, summarise
from sdpo_core.records import Grade, Problem
from sdpo_core.self_distance import self_distance
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.text import ChatTokenizer
from sdpo_core.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The cell's workers; `teacher` and `anchor` are None for arms without them."""

    student: Student
    teacher: Teacher | None
    anchor: Teacher | None = None

    def named(self) -> dict[str, Student | Teacher]:
        """The workers there are."""
        workers = {"student": self.student, "teacher": self.teacher, "anchor": self.anchor}
        return {name: worker for name, worker in workers.items() if worker is not None}

    def savable(self) -> dict[str, Savable]:
        """Those with a part of the checkpoint: an anchor never changes."""
        return {name: worker for name, worker in self.named().items() if name != "anchor"}

    def checksums(self) -> dict[str, str]:
        return {name: worker.facts().weights_sha256 for name, worker in self.named().items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellData:
    """The problems of a cell, by split, in the order of their files."""

    train: Sequence[Problem]
    dev: Sequence[Problem]
    test: Sequence[Problem]


class Cell:
    """A cell on its way from spec to result."""

    def __init__(
        self,
        spec: CellSpec,
        *,
        fingerprint: str,
        journal: Journal,
        data: CellData,
        workers: Workers,
        text: ChatTokenizer,
        grade: Grade,
        clock: Callable[[], float],
        wall_time: Callable[[], float],
        environment: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._fingerprint = fingerprint
        self._journal = journal
        self._data = data
        self._workers = workers
        self._text = text
        self._grade = grade
        self._clock = clock
        self._wall_time = wall_time
        self._environment = environment
        self._algorithm = algorithm(spec)
        self._trainer = Trainer(
            spec,
            problems=data.train,
            student=workers.student,
            teacher=workers.teacher,
            anchor=workers.anchor,
            text=text,
            algorithm=self._algorithm,
            grade=grade,
            clock=clock,
        )

    def run(self) -> None:
        """Train to the last step from wherever the journal stands, then write `result.json`.

        Errors do not name the cell: whoever drives it puts its label in front.
        """
        self._check_prompts()
        self._algorithm.check_problems(self._data.train)
        state = self._resume() or self._start()
        while state.step < self._spec.training.steps:
            state = self._advance(state)
        self._finish(state)

    def _check_prompts(self) -> None:
        """Raise DataError for a prompt that is too long: before the first step, not when its turn comes."""
        limit, evaluation = self._spec.training.max_prompt_tokens, self._spec.evaluation
        dev, test = self._data.dev[: evaluation.dev_problems], self._data.test[: evaluation.test_problems]
        for problem in (*self._data.train, *dev, *test):
            size = len(self._text.prompt_ids(problem.prompt))
            if size > limit:
                raise DataError(
                    f"problem {problem.id}: got a prompt of {size} tokens, expected at most {limit}. "
                    "Raise max_prompt_tokens in the profile."
                )

    def _resume(self) -> DriverState | None:
        state = load_checkpoint(self._journal, workers=self._workers.savable())
        if state is not None:
            self._journal.truncate(state.journal_sizes)
            _log.info("%s: resumes after step %d", self._spec.label, state.step)
        return state

    def _start(self) -> DriverState:
        self._journal.truncate({})
        state = DriverState(
            step=0,
            cursor=0,
            journal_sizes={},
            best_step=0,
            best_accuracy=-1.0,
            weights_sha256_start=self._workers.checksums(),
            started=self._wall_time(),
            trained_seconds=0.0,
        )
        floor = self_distance(
            self._spec,
            problems=self._data.train,
            student=self._workers.student,
            teacher=self._workers.teacher,
            text=self._text,
        )
        if floor:
            self._record("start", 0, floor)
        return self._commit(self._evaluate_dev(state))

    def _advance(self, state: DriverState) -> DriverState:
        """One training step, and what is due after it."""
        training = self._spec.training
        start = self._clock()
        outcome = self._trainer.step(state.step + 1, cursor=state.cursor)
        state = replace(
            state,
            step=state.step + 1,
            cursor=outcome.cursor,
            trained_seconds=state.trained_seconds + self._clock() - start,
        )
        self._record("step", state.step, outcome.metrics)
        for sample in outcome.samples:
            self._journal.append_sample(sample)
        is_last = state.step == training.steps
        if is_last or state.step % training.evaluate_every == 0:
            state = self._evaluate_dev(state)
        if is_last or state.step % training.checkpoint_every == 0:
            state = self._commit(state)
        return state

    def _evaluate_dev(self, state: DriverState) -> DriverState:
        start = self._clock()
        scores = self._scores(self._data.dev[: self._spec.evaluation.dev_problems])
        metrics: dict[str, float | None] = {**scores.named("eval")}
        metrics["cost/step_seconds/evaluate"] = self._clock() - start
        self._record("evaluate", state.step, metrics)
        _log.info(
            "%s: step %d/%d dev accuracy %.3f", self._spec.label, state.step, self._spec.training.steps, scores.accuracy
        )
        if scores.accuracy > state.best_accuracy:
            return replace(state, best_step=state.step, best_accuracy=scores.accuracy)
        return state

    def _commit(self, state: DriverState) -> DriverState:
        state = replace(state, journal_sizes=self._journal.sizes())
        save_checkpoint(self._journal, state, workers=self._workers.savable())
        return state

    def _finish(self, state: DriverState) -> None:
        """Test the last step and the step chosen on dev; facts of the workers are taken before weights are swapped."""
        facts = {name: worker.facts() for name, worker in self._workers.named().items()}
        problems = self._data.test[: self._spec.evaluation.test_problems]
        last = self._scores(problems)
        best = last
        if state.best_step != state.step:
            chosen = checkpoint_folder(self._journal, state.best_step)
            read_state(chosen)
            self._workers.student.load_weights(chosen / "student")
            best = self._scores(problems)
        metrics: dict[str, float | None] = {**last.named("test"), **best.named("test_at_best_dev")}
        metrics["test_at_best_dev/step"] = float(state.best_step)
        self._record("end", state.step, metrics)
        records = self._journal.read_metrics()
        write_json(
            self._journal.result_path,
            {
                "fingerprint": self._fingerprint,
                "label": self._spec.label,
                "steps": state.step,
                "started": state.started,
                "ended": self._wall_time(),
                "trained_seconds": state.trained_seconds,
                "metrics": summarise([(record.moment, record.metrics) for record in records]),
                "workers": {
                    name: {
                        "pid": fact.pid,
                        "weights_sha256_start": state.weights_sha256_start[name],
                        "weights_sha256_end": fact.weights_sha256,
                    }
                    for name, fact in facts.items()
                },
                "parts": {
                    "test": [asdict(part) for part in last.parts],
                    "test_at_best_dev": [asdict(part) for part in best.parts],
                },
                "environment": {**self._environment, "memory": facts["student"].memory_kind},
            },
        )
        self._journal.error_path.unlink(missing_ok=True)

    def _scores(self, problems: Sequence[Problem]) -> Scores:
        return evaluate(
            problems,
            engine=self._workers.student,
            text=self._text,
            grade=self._grade,
            spec=self._spec.evaluation,
            max_response_tokens=self._spec.training.max_response_tokens,
            seed=self._spec.seed,
        )

    def _record(self, moment: Moment, step: int, metrics: Mapping[str, float | None]) -> None:
        where = f"step {step}"
        check_emitted(metrics, moment=moment, traits=self._spec.traits, where=where)
        bad = [name for name, value in metrics.items() if value is not None and not abs(value) < float("inf")]
        if bad:
            raise CellError(f"{where}: got non-finite {bad}, expected finite metrics. Look at the last samples.")
        self._journal.append_metrics(MetricRecord(step=step, moment=moment, time=self._wall_time(), metrics=metrics))


def require_splits(data: CellData) -> None:
    """Raise DataError when a split a cell needs is empty."""
    for name in ("train", "dev", "test"):
        if not getattr(data, name):
            raise DataError(f"split {name!r}: got 0 rows, expected at least 1. Run `sdpo prepare` and read its table.")
