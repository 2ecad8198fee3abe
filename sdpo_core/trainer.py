"""The step loop: rollouts, verdicts, one algorithm's batch, its optimizer steps. It knows no algorithm by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sdpo_core import random_streams
from sdpo_core.algorithms.base import Algorithm, Batch, StepTools, Student
from sdpo_core.backends.base import UpdateStats
from sdpo_core.errors import CellError, DataError
from sdpo_core.metrics import check_emitted
from sdpo_core.phases import PhaseClock
from sdpo_core.records import Grade, GradedRollout, Group, Problem
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import Teacher
from sdpo_core.text import ChatTokenizer

_POLL_LIMIT = 100
_SAMPLES_PER_STEP = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What one training step leaves behind; `cursor` is the place of the next problem in the data order."""

    metrics: dict[str, float | None]
    samples: tuple[dict[str, Any], ...]
    cursor: int


class Trainer:
    """One cell's training steps."""

    def __init__(
        self,
        spec: CellSpec,
        *,
        problems: Sequence[Problem],
        student: Student,
        teacher: Teacher | None,
        anchor: Teacher | None,
        text: ChatTokenizer,
        algorithm: Algorithm,
        grade: Grade,
        clock: Callable[[], float],
    ) -> None:
        if not problems:
            raise DataError("Trainer: got 0 training problems, expected at least 1. Run `sdpo prepare`.")
        self._spec = spec
        self._problems = problems
        self._student = student
        self._teacher = teacher
        self._anchor = anchor
        self._text = text
        self._algorithm = algorithm
        self._grade = grade
        self._clock = clock
        self._order: tuple[int, list[int]] = (-1, [])

    def step(self, number: int, *, cursor: int) -> StepOutcome:
        """Training step `number` (from 1), drawing problems from `cursor` on."""
        phases = PhaseClock(self._clock)
        start = self._clock()
        tools = StepTools(
            step=number,
            spec=self._spec,
            text=self._text,
            student=self._student,
            teacher=self._teacher,
            anchor=self._anchor,
            phases=phases,
        )
        polled, accepted = self._collect(tools, cursor=cursor)
        self._check_age(polled, step=number)
        batch = self._algorithm.build(accepted, num_rejected=len(polled) - len(accepted), tools=tools)
        rate = self._learning_rate(number)
        with phases.phase("update"):
            updates = [
                self._student.update(rows, batch.objective, learning_rate=rate) for rows in batch.minibatches if rows
            ]
        metrics = {
            **_reward_metrics(polled),
            **_update_metrics(updates),
            **batch.metrics,
            **self._algorithm.after_update(updates, tools=tools),
            **self._cost_metrics(polled, phases=phases, seconds=self._clock() - start),
        }
        check_emitted(metrics, moment="step", traits=self._spec.traits, where=f"step {number}")
        samples = _samples(accepted, batch=batch, step=number, text=self._text)
        return StepOutcome(metrics=metrics, samples=samples, cursor=cursor + len(polled))

    def _collect(self, tools: StepTools, *, cursor: int) -> tuple[list[Group], list[Group]]:
        """Poll problems until enough groups are accepted."""
        wanted = self._spec.training.problems_per_step
        limit = _POLL_LIMIT * wanted
        polled: list[Group] = []
        accepted: list[Group] = []
        while len(accepted) < wanted:
            if len(polled) == limit:
                raise CellError(
                    f"step {tools.step}: got {len(accepted)} usable groups from {limit} polled problems, expected "
                    f"{wanted}. The model gives the teacher no context: choose no_context 'drop', or turn "
                    "feedback on."
                )
            first, count = cursor + len(polled), min(wanted - len(accepted), limit - len(polled))
            groups = self._groups(range(first, first + count), tools=tools)
            polled += groups
            accepted += [group for group in groups if self._algorithm.accepts(group, tools=tools)]
        return polled, accepted

    def _groups(self, positions: Sequence[int], *, tools: StepTools) -> list[Group]:
        training = self._spec.training
        problems = [self._problem_at(position) for position in positions]
        requests = []
        for position, problem in zip(positions, problems, strict=True):
            prompt_ids = self._text.prompt_ids(problem.prompt)
            requests += [
                RolloutRequest(
                    prompt_ids=prompt_ids,
                    stream_key=random_streams.stream_key(
                        self._spec.seed, random_streams.SAMPLING, tools.step, position, member
                    ),
                )
                for member in range(training.rollouts_per_problem)
            ]
        sampling = Sampling(temperature=training.temperature, max_response_tokens=training.max_response_tokens)
        with tools.phases.phase("rollout"):
            rollouts = self._student.generate(requests, sampling=sampling)
        with tools.phases.phase("grade"):
            texts = [self._text.decode(rollout.response_ids) for rollout in rollouts]
            owners = [problem for problem in problems for _ in range(training.rollouts_per_problem)]
            graded = [
                GradedRollout(rollout=rollout, text=text, verdict=self._grade(owner, text, rollout.finish == "length"))
                for owner, text, rollout in zip(owners, texts, rollouts, strict=True)
            ]
        size = training.rollouts_per_problem
        return [
            Group(problem=problem, position=position, members=tuple(graded[index * size : (index + 1) * size]))
            for index, (position, problem) in enumerate(zip(positions, problems, strict=True))
        ]

    def _check_age(self, groups: Sequence[Group], *, step: int) -> None:
        """Rollouts of older weights than the student's are off-policy: `rollout_cap` is what corrects for that."""
        held = self._student.weights_version()
        found = {member.rollout.weights_version for group in groups for member in group.members}
        if max(found, default=held) > held or (found != {held} and self._spec.algorithm.rollout_cap is None):
            raise CellError(
                f"step {step}: got rollouts of weights version {', '.join(map(str, sorted(found)))}, expected "
                f"{held}, the student's. Sample with its weights of the moment; older ones need a rollout_cap."
            )

    def _problem_at(self, position: int) -> Problem:
        """The data order: a fresh permutation every epoch, the same for every arm of a seed."""
        epoch, index = divmod(position, len(self._problems))
        if self._order[0] != epoch:
            generator = random_streams.stream(self._spec.seed, random_streams.DATA_ORDER, epoch)
            self._order = (epoch, generator.permutation(len(self._problems)).tolist())
        return self._problems[self._order[1][index]]

    def _learning_rate(self, step: int) -> float:
        optimizer = self._spec.optimizer
        return optimizer.learning_rate * min(1.0, step / (optimizer.lr_warmup_steps + 1))

    def _cost_metrics(self, polled: Sequence[Group], *, phases: PhaseClock, seconds: float) -> dict[str, float | None]:
        members = [member for group in polled for member in group.members]
        tokens = sum(len(member.rollout.response_ids) for member in members)
        seconds_by_phase = dict(phases.seconds)
        seconds_by_phase["other"] = max(0.0, seconds - sum(phases.seconds.values()))
        return {
            "cost/tokens_per_second": tokens / seconds,
            "cost/rollouts_per_second": len(members) / seconds,
            **{f"cost/step_seconds/{name}": value for name, value in seconds_by_phase.items()},
            "cost/peak_memory_bytes/student": float(self._student.peak_memory_bytes()),
        }


def _reward_metrics(polled: Sequence[Group]) -> dict[str, float | None]:
    members = [member for group in polled for member in group.members]
    dead = sum(len({member.verdict.score for member in group.members}) == 1 for group in polled)
    return {
        "train/reward": sum(member.verdict.score for member in members) / len(members),
        "train/dead_group_fraction": dead / len(polled),
        "train/response_tokens": sum(len(member.rollout.response_ids) for member in members) / len(members),
        "train/truncated_fraction": sum(member.rollout.finish == "length" for member in members) / len(members),
    }


def _update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float | None]:
    """Means over the optimizer steps; a step in which nothing could be trained has no loss, no norm and no gap.

    Before the first of them the policy has the weights that sampled: what its tokens differ by is the engine's doing.
    """
    count = len(updates)
    first = updates[0].sums if updates else {}
    tokens = first.get("sampled_tokens", 0.0)
    return {
        "train/optimizer_steps": float(count),
        "train/loss": sum(update.loss for update in updates) / count if count else None,
        "train/grad_norm": sum(update.grad_norm for update in updates) / count if count else None,
        "train/engine_gap": first["engine_gap"] / tokens if tokens else None,
        "train/engine_gap_max": first["largest_engine_gap"] if tokens else None,
    }


def _samples(groups: Sequence[Group], *, batch: Batch, step: int, text: ChatTokenizer) -> tuple[dict[str, Any], ...]:
    """The first rollouts of the step's first group, as the journal keeps them."""
    group = groups[0]
    samples = []
    for member, graded in enumerate(group.members[:_SAMPLES_PER_STEP]):
        note = batch.notes.get((0, member))
        samples.append(
            {
                "step": step,
                "problem_id": group.problem.id,
                "rollout": member,
                "prompt": text.render(group.problem.prompt),
                "response": graded.text,
                "score": graded.verdict.score,
                "reason": graded.verdict.reason,
                "feedback": graded.verdict.feedback,
                "teacher_prompt": note.teacher_prompt if note else None,
                "demonstrator": note.demonstrator if note else None,
            }
        )
    return tuple(samples)
