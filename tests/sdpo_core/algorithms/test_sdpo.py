"""SDPO: gradient against a dense oracle, the teacher's part, policies for rollouts without context, refusals."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.algorithms.base import Batch
from sdpo_core.algorithms.sdpo import Sdpo
from sdpo_core.backends.base import TokenRow, TrainRow, UpdateStats, WorkerFacts
from sdpo_core.cell import Workers
from sdpo_core.errors import CellError, DataError
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec, SdpoSpec
from sdpo_core.teacher.base import HasWeights, Teacher
from sdpo_core.teacher.context import TeacherContext, teacher_messages
from tests.oracles import distributions
from tests.sdpo_core.algorithms.groups import DenseModel, make_group, make_tools
from tests.sdpo_core.micro import Base, make_spec, plain_workers

TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An arm with its workers."""

    spec: CellSpec
    workers: Workers
    base: Base

    @property
    def arm(self) -> Sdpo:
        assert isinstance(self.spec.algorithm, SdpoSpec)
        return Sdpo(self.spec.algorithm)

    def build(self, groups: Sequence[Group], *, num_rejected: int = 0) -> Batch:
        tools = make_tools(self.spec, base=self.base, workers=self.workers)
        return self.arm.build(groups, num_rejected=num_rejected, tools=tools)

    def dense(self) -> DenseModel:
        return DenseModel(self.base, self.workers.student.weights())


Make = Callable[..., Setting]


@pytest.fixture
def make(cell_spec: CellSpec, base: Base) -> Make:
    def build(*, training: dict[str, object] | None = None, **algorithm: object) -> Setting:
        spec = make_spec(
            cell_spec,
            algorithm=algorithm,
            optimizer={"max_grad_norm": 1e9},
            training={"temperature": TEMPERATURE, **(training or {})},
        )
        return Setting(spec=spec, workers=plain_workers(spec, folder=base.folder), base=base)

    return build


def mixed(base: Base) -> list[Group]:
    """Demonstrations, feedback, and one rollout (the lone success) without context: 8 rollouts, 7 with context."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 1, 0, 0), lengths=(2, 4, 1, 3)),
    ]


def teacher_row(group: Group, member: int, context: TeacherContext, *, base: Base) -> TokenRow:
    return TokenRow(
        prompt_ids=base.text.prompt_ids(teacher_messages(group.problem, context)),
        response_ids=group.members[member].rollout.response_ids,
    )


def row_loss(
    row: TokenRow, taught: TokenRow, *, student: DenseModel, teacher: DenseModel, k: int, alpha: float
) -> tuple[Tensor, float]:
    """Divergence of each token on the student's best K ids and the tail, from whole distributions; its value by hand.

    The tensor carries the gradient; the float is the sum in plain Python numbers.
    """
    p = student.logps(row, temperature=TEMPERATURE).exp()
    with torch.no_grad():
        q = teacher.logps(taught, temperature=TEMPERATURE).exp()
    ids = p.detach().topk(k, dim=1).indices
    p, q = (torch.cat([m.gather(1, ids), 1 - m.gather(1, ids).sum(dim=1, keepdim=True)], dim=1) for m in (p, q))
    if alpha == 0:
        loss = (q * (q / p).log()).sum(dim=1)
    elif alpha == 1:
        loss = (p * (p / q).log()).sum(dim=1)
    else:
        m = (1 - alpha) * p + alpha * q
        loss = (1 - alpha) * (p * (p / m).log()).sum(dim=1) + alpha * (q * (q / m).log()).sum(dim=1)
    cells = zip(p.tolist(), q.tolist(), strict=True)
    return loss, sum(distributions.divergence(one, other, alpha=alpha) for one, other in cells)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_gradient_is_that_of_the_dense_divergence(make: Make, base: Base, alpha: float, reduction: str) -> None:
    """Full logits, prompts run whole, teacher prompts rebuilt from the notes: value, gradient and metrics agree."""
    setting = make(alpha=alpha, reduction=reduction, top_k=5)
    groups = mixed(base)
    batch = setting.build(groups)
    (rows,) = batch.minibatches
    assert len(rows) == 7
    assert set(batch.notes) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)}
    student, teacher = setting.dense(), setting.dense()
    tokens = sum(len(row.row.response_ids) for row in rows)
    loss, value, total = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for row, ((g, m), note) in zip(rows, batch.notes.items(), strict=True):
        group = groups[g]
        assert row.row.response_ids == group.members[m].rollout.response_ids
        assert note.demonstrator is not None
        context = TeacherContext(demonstration=group.members[note.demonstrator].text.strip())
        taught = teacher_row(group, m, context, base=base)
        assert note.teacher_prompt == base.text.render(teacher_messages(group.problem, context))
        parts, by_hand = row_loss(row.row, taught, student=student, teacher=teacher, k=5, alpha=alpha)
        share = 1 / tokens if reduction == "token_mean" else 1 / (7 * len(parts))
        loss, value, total = loss + share * parts.sum(), value + share * by_hand, total + by_hand
    stats = setting.workers.student.update(rows, batch.objective, learning_rate=1e-3)
    assert stats.loss == pytest.approx(value, rel=1e-4)
    assert stats.sums["divergence"] == pytest.approx(total, rel=1e-4)
    assert stats.sums["tokens"] == tokens
    student.assert_gradient(loss, workers=setting.workers)


def test_teacher_prompts_end_like_student_prompts(make: Make, base: Base) -> None:
    """Contracts 2 and 4: one generation header, and the very ids of the response after it."""
    setting = make()
    seen: list[TokenRow] = []

    class Listening(FakeTeacher):
        def tables(self, rows: Sequence[TokenRow], support_ids: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            seen.extend(rows)
            return super().tables(rows, support_ids)

    groups = mixed(base)
    batch = with_teacher(setting, Listening()).build(groups)
    (rows,) = batch.minibatches
    for row, taught in zip(rows, seen, strict=True):
        assert taught.response_ids == row.row.response_ids
        assert taught.prompt_ids[-11:] == row.row.prompt_ids[-11:]
        assert len(taught.prompt_ids) > len(row.row.prompt_ids) + 60


def test_support_is_the_students_before_the_step(make: Make, base: Base) -> None:
    setting = make(top_k=3)
    (rows,) = setting.build(mixed(base)).minibatches
    student = setting.dense()
    for row in rows:
        assert row.support_ids is not None
        with torch.no_grad():
            expected = student.logps(row.row).topk(3, dim=1).indices
        assert row.support_ids.tolist() == expected.tolist()


def test_later_minibatches_carry_importance_weights(make: Make, base: Base) -> None:
    """The second optimizer step weighs each token by min(p / p_old, cap), a constant, on the first step's support."""
    setting = make(minibatches=2, importance_clip=1.05, top_k=5)
    batch = setting.build(mixed(base))
    assert [len(rows) for rows in batch.minibatches] == [4, 3]
    start = setting.dense()
    setting.workers.student.update(batch.minibatches[0], batch.objective, learning_rate=2e-3)
    moved, rows = setting.dense(), batch.minibatches[1]
    tokens, loss = sum(len(row.row.response_ids) for row in rows), torch.zeros((), dtype=torch.float64)
    weights = []
    for row in rows:
        assert row.old_logps is not None
        assert row.support_ids is not None
        assert row.teacher_logps is not None
        ids = torch.tensor(row.support_ids)
        kept = moved.logps(row.row, temperature=TEMPERATURE).exp().gather(1, ids)
        p = torch.cat([kept, 1 - kept.sum(dim=1, keepdim=True)], dim=1)
        q = torch.tensor(row.teacher_logps).double().exp()
        m = (p + q) / 2
        divergence = ((p * (p / m).log()).sum(dim=1) + (q * (q / m).log()).sum(dim=1)) / 2
        with torch.no_grad():
            now, before = (model.own_logps(row.row, temperature=TEMPERATURE) for model in (moved, start))
        weight = (now - before).exp().clamp(max=1.05)
        weights += weight.tolist()
        loss = loss + (weight * divergence).sum() / tokens
    assert min(weights) < 1.03
    assert 0 < weights.count(1.05) < len(weights)
    stats = setting.workers.student.update(rows, batch.objective, learning_rate=1e-3)
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    moved.assert_gradient(loss, workers=setting.workers)


def test_dropped_rows_change_neither_numerator_nor_denominator(make: Make, base: Base) -> None:
    """Contract 18: loss and weights equal those of the step without the groups that have no context."""
    silent = make_group(base, position=2, scores=(0, 0, 0), feedback="")
    first, second = make(), make()
    whole, without = first.build([*mixed(base), silent]), second.build(mixed(base))
    stats = [
        one.workers.student.update(batch.minibatches[0], batch.objective, learning_rate=1e-2)
        for one, batch in ((first, whole), (second, without))
    ]
    assert stats[0] == stats[1]
    assert first.workers.checksums() == second.workers.checksums()
    assert whole.metrics["feedback/effective_fraction"] == pytest.approx(7 / 11)
    assert whole.metrics["feedback/no_context_fraction"] == pytest.approx(4 / 11)
    assert whole.metrics["feedback/from_demo_fraction"] == pytest.approx(7 / 11)
    assert whole.metrics["feedback/skipped_prompts"] == 1
    assert without.metrics["feedback/skipped_prompts"] == 0
    assert whole.metrics["cost/teacher_forwards"] == 7


def test_feedback_counts_as_context_but_not_as_demonstration(make: Make, base: Base) -> None:
    batch = make().build([make_group(base, position=0, scores=(0, 0, 1))], num_rejected=3)
    assert batch.metrics["feedback/effective_fraction"] == pytest.approx(2 / 3)
    assert batch.metrics["feedback/from_demo_fraction"] == pytest.approx(2 / 3)
    assert batch.metrics["feedback/skipped_prompts"] == 3
    alone = make().build([make_group(base, position=0, scores=(0, 0, 0))])
    assert alone.metrics["feedback/from_demo_fraction"] == 0
    assert alone.metrics["feedback/effective_fraction"] == 1
    assert [note.demonstrator for note in alone.notes.values()] == [None] * 3


def test_demonstrations_have_streams_by_seed_step_problem_and_rollout(make: Make, base: Base) -> None:
    """Six groups of four successes each: the choices repeat under the same words and change with each of them."""
    setting = make()
    groups = [make_group(base, position=position, scores=(1, 1, 1, 1)) for position in range(6)]

    def choices(*, seed: int = 1, step: int = 1) -> list[list[int | None]]:
        spec = setting.spec.model_copy(update={"seed": seed})
        tools = make_tools(spec, base=base, workers=setting.workers, step=step)
        notes = setting.arm.build(groups, num_rejected=0, tools=tools).notes
        return [[notes[g, m].demonstrator for m in range(4)] for g in range(6)]

    first = choices()
    assert first == choices()
    assert first not in (choices(seed=2), choices(step=2))
    assert len({tuple(group) for group in first}) > 1


def test_error_policy_names_the_problem(make: Make, base: Base) -> None:
    with pytest.raises(CellError, match=r"sibling nor feedback for rollout 1 of train-1, expected a teacher context"):
        make(no_context="error").build(mixed(base))
    make(no_context="error").build([mixed(base)[0]])


def test_too_long_teacher_prompt_is_no_context(make: Make, base: Base) -> None:
    """Never cut: dropped and counted, refused under `error`, sent back under `poll`."""
    training = {"max_teacher_prompt_tokens": 90}
    groups = mixed(base)
    batch = make(training=training).build(groups)
    assert batch.minibatches == ((),)
    assert batch.metrics["feedback/effective_fraction"] == 0
    assert batch.metrics["feedback/skipped_prompts"] == 2
    with pytest.raises(CellError, match=r"a teacher prompt of \d+ > 90 tokens for rollout 0 of train-0"):
        make(training=training, no_context="error").build(groups)
    setting = make(training=training, no_context="poll")
    tools = make_tools(setting.spec, base=base, workers=setting.workers)
    assert setting.arm.accepts(groups[0], tools=tools) is False


@pytest.mark.parametrize(
    ("policy", "silent", "accepted"), [("poll", True, False), ("poll", False, True), ("drop", True, True)]
)
def test_accepts_sends_back_only_under_poll(make: Make, base: Base, policy: str, silent: bool, accepted: bool) -> None:
    setting = make(no_context=policy)
    group = make_group(base, position=0, scores=(0, 0), feedback="" if silent else "odd")
    assert setting.arm.accepts(group, tools=make_tools(setting.spec, base=base, workers=setting.workers)) is accepted


class FakeTeacher:
    """A teacher at the far end of a wire; `spoil` damages the first table."""

    def __init__(self, spoil: Callable[[np.ndarray], np.ndarray] = lambda table: table) -> None:
        self._spoil = spoil

    def tables(self, rows: Sequence[TokenRow], support_ids: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        tables = [np.log(np.full((len(ids), ids.shape[1] + 1), 1 / (ids.shape[1] + 1))) for ids in support_ids]
        assert len(rows) == len(tables)
        return (self._spoil(tables[0]), *tables[1:])

    def follow(self, student: HasWeights) -> bool:
        return False

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def facts(self) -> WorkerFacts:
        return WorkerFacts(pid=1, weights_sha256="", memory_kind="resident")

    def peak_memory_bytes(self) -> int:
        return 1


def with_teacher(setting: Setting, teacher: Teacher | None) -> Setting:
    return replace(setting, workers=replace(setting.workers, teacher=teacher))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda table: np.where(np.arange(table.shape[1]) == 1, np.nan, table), "got NaN in the teacher's table"),
        (lambda table: table[:-1], r"shape \(2, 6\) for 3 tokens"),
        (lambda table: np.concatenate([table, table[:1]]), r"shape \(4, 6\) for 3 tokens"),
        (lambda table: table[:, :-1], r"shape \(3, 5\) for 3 tokens and k = 5"),
    ],
)
def test_damaged_teacher_payload_is_refused(
    make: Make, base: Base, spoil: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        with_teacher(make(), FakeTeacher(spoil)).build(mixed(base))


def test_renormalised_teacher_payload_stops_the_update(make: Make, base: Base) -> None:
    """A table without whole mass has the right shape and is still no distribution."""
    setting = with_teacher(make(), FakeTeacher(lambda table: table - 0.1))
    batch = setting.build(mixed(base))
    before = setting.workers.student.facts().weights_sha256
    with pytest.raises(DataError, match=r"got mass 0\.90.* in teacher row"):
        setting.workers.student.update(batch.minibatches[0], batch.objective, learning_rate=1e-3)
    assert setting.workers.student.facts().weights_sha256 == before


def test_missing_table_is_refused(make: Make, base: Base) -> None:
    class Silent(FakeTeacher):
        def tables(self, rows: Sequence[TokenRow], support_ids: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            return super().tables(rows, support_ids)[:-1]

    with pytest.raises(DataError, match="got 6 tables for 7 rows"):
        with_teacher(make(), Silent()).build(mixed(base))


def test_missing_teacher_is_refused(make: Make, base: Base) -> None:
    with pytest.raises(DataError, match="got no teacher"):
        with_teacher(make(), None).build(mixed(base))


def test_step_without_context_trains_and_commits_nothing(make: Make, base: Base) -> None:
    """Contract 21: no row, no optimizer step, no commit; the means of the step are null, its counts 0."""
    setting = make()
    silent = make_group(base, position=2, scores=(0, 0, 0), feedback="")
    batch = setting.build([silent])
    assert batch.minibatches == ((),)
    tools = make_tools(setting.spec, base=base, workers=setting.workers)
    assert setting.workers.teacher is not None
    before = setting.workers.teacher.facts().weights_sha256
    metrics = setting.arm.after_update([], tools=tools)
    assert metrics["distill/tokens"] == 0
    assert metrics["distill/divergence"] is None
    assert metrics["distill/tail_share"] is None
    assert metrics["cost/ema_updates"] == 0
    assert setting.workers.teacher.facts().weights_sha256 == before


def test_metrics_are_sums_over_tokens_not_means_of_means(make: Make, base: Base) -> None:
    """Contract 20: two optimizer steps of unlike sizes add up token by token."""
    setting = make()
    tools = make_tools(setting.spec, base=base, workers=setting.workers)
    sums = {"tokens": 1.0, "cells": 2.0, "tail": 0.5}
    names = ("divergence", "kl_reverse", "kl_forward", "student_coverage", "teacher_coverage")
    updates = [
        UpdateStats(loss=0.0, grad_norm=1.0, sums=sums | dict.fromkeys(names, 4.0)),
        UpdateStats(loss=0.0, grad_norm=1.0, sums={**sums, "tokens": 3.0} | dict.fromkeys(names, 2.0)),
    ]
    metrics = setting.arm.after_update(updates, tools=tools)
    assert metrics["distill/tokens"] == 4
    assert metrics["distill/divergence"] == 1.5
    assert metrics["distill/teacher_coverage"] == 1.5
    assert metrics["distill/tail_share"] == 0.25
    assert metrics["cost/ema_updates"] == 1


def test_objective_measures_both_directions_whatever_it_trains(make: Make, base: Base) -> None:
    """Sums over tokens by the oracle, from the tables the rows carry."""
    setting = make(alpha=0.25, top_k=4)
    batch = setting.build(mixed(base))
    student = setting.dense()
    expected = dict.fromkeys(("kl_forward", "kl_reverse", "divergence", "student_coverage", "teacher_coverage"), 0.0)
    for row in batch.minibatches[0]:
        for p, q in zip(tables(row, student), np.exp(np.float64(row.teacher_logps)).tolist(), strict=True):
            expected["kl_forward"] += distributions.kl(q, p)
            expected["kl_reverse"] += distributions.kl(p, q)
            expected["divergence"] += distributions.divergence(p, q, alpha=0.25)
            expected["student_coverage"] += 1 - p[-1]
            expected["teacher_coverage"] += 1 - q[-1]
    stats = setting.workers.student.update(batch.minibatches[0], batch.objective, learning_rate=1e-3)
    for name, value in expected.items():
        assert stats.sums[name] == pytest.approx(value, rel=1e-4), name
    assert 0 < stats.sums["tail"] < stats.sums["cells"]


def tables(row: TrainRow, student: DenseModel) -> list[list[float]]:
    """The student's masses on the row's support and tail."""
    assert row.support_ids is not None
    with torch.no_grad():
        masses = student.logps(row.row, temperature=TEMPERATURE).exp()
    kept = masses.gather(1, torch.tensor(row.support_ids))
    whole: list[list[float]] = torch.cat([kept, 1 - kept.sum(dim=1, keepdim=True)], dim=1).tolist()
    return whole
