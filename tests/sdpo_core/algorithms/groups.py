"""Hand-made groups for the algorithms, and updates held against dense float64 formulas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdpo_core.algorithms.base import Algorithm, Batch, StepTools
from sdpo_core.algorithms.table import algorithm
from sdpo_core.backends.base import TrainRow, UpdateStats
from sdpo_core.backends.hf import HfOptimizer
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.cell import Workers
from sdpo_core.phases import PhaseClock
from sdpo_core.records import GradedRollout, Group
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import Teacher
from tests.sdpo_core.algorithms.dense import TEMPERATURE, DenseModel, assert_gradients, weighed
from tests.sdpo_core.micro import Base, load_model, make_member, make_problem, make_spec, plain_workers

# Loss of each token of a row, and its slope in the token's own log-probability, given what these are now.
Truth = Callable[[TrainRow, list[float]], tuple[list[float], list[float]]]
# Share of a row in the loss: a number with the loss's gradient, and the loss itself.
RowLoss = Callable[[DenseModel, TrainRow], tuple[Tensor, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An arm with its workers."""

    spec: CellSpec
    workers: Workers
    base: Base

    @property
    def arm(self) -> Algorithm:
        return algorithm(self.spec)

    @property
    def policy(self) -> ModelPolicy:
        policy: ModelPolicy = self.workers.student._policy  # type: ignore[attr-defined]
        return policy

    def tools(self, *, step: int = 1) -> StepTools:
        return make_tools(self.spec, base=self.base, workers=self.workers, step=step)

    def build(self, groups: Sequence[Group], *, num_rejected: int = 0) -> Batch:
        return self.arm.build(groups, num_rejected=num_rejected, tools=self.tools())

    def update(self, batch: Batch, *, minibatch: int = 0, learning_rate: float = 1e-3) -> UpdateStats:
        return self.workers.student.update(batch.minibatches[minibatch], batch.objective, learning_rate=learning_rate)

    def dense(self) -> DenseModel:
        """The student as it is now."""
        return DenseModel(self.base, self.workers.student.weights())

    def start(self) -> DenseModel:
        """The base: what teacher and anchor start from."""
        return DenseModel(self.base, load_model(self.base.folder).weights())

    def move(self, *, scale: float = 0.03, seed: int = 1) -> None:
        """Take the student away from the base, so that it and its teacher differ on equal prompts."""
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: value + scale * value.abs().mean() * torch.randn(value.shape, generator=generator)
            for name, value in self.workers.student.weights().items()
        }
        self.policy.model.blend(weights, rate=1.0)

    def with_teacher(self, teacher: Teacher | None) -> "Setting":
        return replace(self, workers=replace(self.workers, teacher=teacher))

    def gradient(self) -> dict[str, Tensor]:
        """What the last update left behind; not clipped, since the settings' limit is out of reach."""
        optimizer = self.policy.optimizer
        assert isinstance(optimizer, HfOptimizer)
        return {name: p.grad.clone() for name, p in optimizer.parameters.items() if p.grad is not None}


def make_setting(
    cell_spec: CellSpec,
    base: Base,
    *,
    arm: str,
    training: Mapping[str, Any] | None = None,
    is_moved: bool = False,
    **settings: Any,
) -> Setting:
    """`arm` of the micro cell with single settings replaced, at a temperature, without gradient clipping."""
    spec = make_spec(
        cell_spec,
        arm=arm,
        algorithm=settings,
        optimizer={"max_grad_norm": 1e9},
        training={"temperature": TEMPERATURE, "rollouts_per_problem": 4, **(training or {})},
    )
    setting = Setting(spec=spec, workers=plain_workers(spec, folder=base.folder), base=base)
    if is_moved:
        setting.move()
    return setting


def make_tools(spec: CellSpec, *, base: Base, workers: Workers, step: int = 1) -> StepTools:
    return StepTools(
        step=step,
        spec=spec,
        text=base.text,
        student=workers.student,
        teacher=workers.teacher,
        anchor=workers.anchor,
        phases=PhaseClock(lambda: 0.0),
    )


def make_group(
    base: Base, *, position: int, scores: Sequence[float], feedback: str = "odd", lengths: Sequence[int] = (3, 1, 5, 2)
) -> Group:
    """One rollout a score, of ragged lengths; failures carry `feedback`."""
    problem = make_problem(position)
    prompt = base.text.prompt_ids(problem.prompt)
    members: list[GradedRollout] = []
    for index, score in enumerate(scores):
        ids = tuple(range(60 + 9 * index + position, 60 + 9 * index + position + lengths[index]))
        members.append(
            make_member(
                ids,
                prompt=prompt,
                score=score,
                feedback="" if score == 1.0 else feedback,
                text=base.text.decode(ids),
            )
        )
    return Group(problem=problem, position=position, members=tuple(members))


def three_groups(base: Base) -> list[Group]:
    """A mixed group, one of equal scores, and one with a partial score: 12 rollouts of 32 tokens."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 0, 0, 0), lengths=(2, 2, 4, 1)),
        make_group(base, position=2, scores=(0.5, 0, 1, 0), lengths=(1, 6, 2, 3)),
    ]


def responses(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """The step's responses in order; each is another."""
    return [member.rollout.response_ids for group in groups for member in group.members]


def scores_of(groups: Sequence[Group]) -> list[list[float]]:
    return [[member.verdict.score for member in group.members] for group in groups]


def by_response(groups: Sequence[Group], values: Sequence[Any]) -> dict[tuple[int, ...], Any]:
    """One value a rollout, under its response."""
    return dict(zip(responses(groups), values, strict=True))


def assert_step(
    setting: Setting, batch: Batch, row_loss: RowLoss, *, minibatch: int = 0, learning_rate: float = 1e-3
) -> UpdateStats:
    """One update is that of the sum of the rows' losses: its value and its gradient."""
    dense = setting.dense()
    loss, value = torch.zeros((), dtype=torch.float64), 0.0
    for row in batch.minibatches[minibatch]:
        part, amount = row_loss(dense, row)
        loss, value = loss + part, value + amount
    stats = setting.update(batch, minibatch=minibatch, learning_rate=learning_rate)
    assert abs(stats.loss - value) < 2e-5 * max(1.0, abs(value))
    expected, found = dense.gradients(loss), setting.gradient()
    assert expected.keys() == found.keys()
    assert_gradients(found, expected)
    return stats


def assert_policy_step(
    setting: Setting,
    batch: Batch,
    truth: Truth,
    *,
    weights: Callable[[TrainRow], float],
    minibatch: int = 0,
    learning_rate: float = 1e-3,
) -> UpdateStats:
    """`assert_step` for losses of the sampled tokens' log-probabilities alone."""

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        now, weight = dense.own_logps(row.row), weights(row)
        losses, slopes = truth(row, now.tolist())
        return weight * weighed(slopes, now), weight * sum(losses)

    return assert_step(setting, batch, row_loss, minibatch=minibatch, learning_rate=learning_rate)


def token_mean(rows: Sequence[TrainRow]) -> Callable[[TrainRow], float]:
    """One over the tokens of all rows."""
    tokens = sum(len(row.row.response_ids) for row in rows)
    return lambda _: 1 / tokens


def sequence_mean(rows: Sequence[TrainRow]) -> Callable[[TrainRow], float]:
    """One over the rows and the tokens of each."""
    return lambda row: 1 / (len(rows) * len(row.row.response_ids))


def batch_bytes(batch: Batch) -> list[list[tuple[object, ...]]]:
    """Everything a policy would be trained on, to the last bit."""
    return [
        [
            (
                row.row,
                row.weight,
                row.distill_weight,
                row.task_advantage,
                *((name, array.dtype, array.shape, array.tobytes()) for name, array in sorted(row.arrays().items())),
            )
            for row in rows
        ]
        for rows in batch.minibatches
    ]


def with_sampling(groups: Sequence[Group], logps: Mapping[tuple[int, ...], Sequence[float]]) -> list[Group]:
    """`groups` as an engine with other log-probabilities would have sampled them."""

    def sampled(member: GradedRollout) -> GradedRollout:
        found = tuple(float(np.float32(value)) for value in logps[member.rollout.response_ids])
        return replace(member, rollout=replace(member.rollout, sampling_logps=found))

    return [replace(group, members=tuple(sampled(member) for member in group.members)) for group in groups]
