"""SDPO: gradient against dense distributions under the teacher's prompt, the teacher's mixture, who demonstrates."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sdpo_core.backends.base import TokenRow, TrainRow
from sdpo_core.records import Group
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.context import TeacherContext, teacher_messages
from tests.sdpo_core.algorithms.dense import TEMPERATURE, DenseModel, divergence_terms
from tests.sdpo_core.algorithms.groups import RowLoss, Setting, assert_step, make_group, make_setting
from tests.sdpo_core.micro import Base

FULL = {"support": "full", "top_k": None}


def mixed(base: Base) -> list[Group]:
    """Demonstrations, and one rollout (the lone success) without: 8 rollouts, 7 of them taught."""
    return [
        make_group(base, position=0, scores=(1, 0, 0, 1)),
        make_group(base, position=1, scores=(0, 1, 0, 0), lengths=(2, 4, 1, 3)),
    ]


def taught_rows(setting: Setting, groups: Sequence[Group]) -> dict[tuple[int, ...], TokenRow]:
    """The teacher's row of each response, rebuilt from the notes of the batch and the problem's messages."""
    found = {}
    notes, text = setting.build(groups).notes, setting.base.text
    for (g, m), note in notes.items():
        members = groups[g].members
        assert note.demonstrator is not None
        assert note.demonstrator != m
        context = TeacherContext(demonstration=members[note.demonstrator].text.strip())
        messages = teacher_messages(groups[g].problem, context)
        assert note.teacher_prompt == text.render(messages)
        ids = members[m].rollout.response_ids
        found[ids] = TokenRow(prompt_ids=text.prompt_ids(messages), response_ids=ids)
    return found


def dense_loss(
    taught: Mapping[tuple[int, ...], Sequence[Sequence[float]]], shares: Mapping[tuple[int, ...], float], **spec: Any
) -> RowLoss:
    """Divergence of each token to the teacher's whole distributions, at the student's best ids or all."""
    top_k = spec.pop("top_k")

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        ids = None if top_k is None else dense.best_ids(row.row, k=top_k)
        key = row.row.response_ids
        terms, values = divergence_terms(dense.logps(row.row), taught[key], ids, **spec)
        return shares[key] * terms.sum(), shares[key] * sum(values)

    return row_loss


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_mean_of_all"])
@pytest.mark.parametrize(
    "divergence",
    [
        {"top_k": 5, "alpha": 0.0},
        {"top_k": 5, "alpha": 0.5, "entry_clip": 0.05},
        {"top_k": 5, "alpha": 1.0, "truncation": "bregman"},
        {**FULL, "alpha": 0.5},
    ],
)
def test_gradient_is_that_of_the_dense_divergence(
    cell_spec: CellSpec, base: Base, divergence: Mapping[str, Any], reduction: str
) -> None:
    """Full logits, prompts run whole, teacher prompts rebuilt: value, gradient and the sum over tokens agree."""
    setting = make_setting(cell_spec, base, arm="sdpo-ema", divergence=divergence, reduction=reduction)
    groups = mixed(base)
    batch, rows = setting.build(groups), taught_rows(setting, groups)
    assert set(batch.notes) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3)}
    assert {row.row.response_ids for row in batch.minibatches[0]} == rows.keys()
    teacher = setting.start()
    tokens = sum(map(len, rows))
    number = {"sequence_mean": 7, "sequence_mean_of_all": 8}.get(reduction)
    shares = {ids: 1 / tokens if number is None else 1 / (number * len(ids)) for ids in rows}
    masses = {ids: teacher.masses(row) for ids, row in rows.items()}
    settings = {"alpha": 0.5, "truncation": "tail", "entry_clip": None, **divergence}
    settings.pop("support", None)
    stats = assert_step(setting, batch, dense_loss(masses, shares, **settings))
    dense, everything = setting.start(), dense_loss(masses, dict.fromkeys(rows, 1.0), **settings)
    total = sum(everything(dense, row)[1] for row in batch.minibatches[0])
    assert stats.sums["divergence"] == pytest.approx(total, rel=1e-4)
    assert stats.sums["tokens"] == tokens


@pytest.mark.parametrize("divergence", [{"top_k": 5}, FULL])
def test_trust_region_teacher_mixes_the_logits_of_start_and_student(
    cell_spec: CellSpec, base: Base, divergence: Mapping[str, Any]
) -> None:
    """q ~ q_start^0.75 q_student^0.25 under the teacher's prompt, at the temperature, after a commit of the student."""
    setting = make_setting(cell_spec, base, arm="sdpo-trust-region", divergence=divergence, is_moved=True)
    assert setting.workers.teacher is not None
    assert setting.workers.teacher.follow(setting.workers.student)
    groups = mixed(base)
    batch, rows = setting.build(groups), taught_rows(setting, groups)
    start, student = setting.start(), setting.dense()
    masses = {}
    for ids, row in rows.items():
        with torch.no_grad():
            mixed_logits = 0.75 * start.logits(row) + 0.25 * student.logits(row)
        masses[ids] = (mixed_logits / TEMPERATURE).softmax(dim=1).tolist()
    shares = dict.fromkeys(rows, 1 / sum(map(len, rows)))
    loss = dense_loss(masses, shares, alpha=0.5, top_k=divergence["top_k"])
    assert_step(setting, batch, loss)
    plain = {ids: start.masses(row) for ids, row in rows.items()}
    assert masses != plain


def test_demonstrations_have_streams_by_seed_step_problem_and_rollout(cell_spec: CellSpec, base: Base) -> None:
    """Six groups of four successes each: the choices repeat under the same words and change with each of them."""
    setting = make_setting(cell_spec, base, arm="sdpo-static")
    groups = [make_group(base, position=position, scores=(1, 1, 1, 1)) for position in range(6)]

    def choices(*, seed: int = 1, step: int = 1) -> list[list[int | None]]:
        seeded = Setting(
            spec=setting.spec.model_copy(update={"seed": seed}), workers=setting.workers, base=setting.base
        )
        notes = seeded.arm.build(groups, num_rejected=0, tools=seeded.tools(step=step)).notes
        return [[notes[g, m].demonstrator for m in range(4)] for g in range(6)]

    first = choices()
    assert first == choices()
    assert first not in (choices(seed=2), choices(step=2))
    assert len({tuple(group) for group in first}) > 1


def test_demonstration_settings_reach_the_teachers_prompt(cell_spec: CellSpec, base: Base) -> None:
    """The shortest success stands in every prompt, its own included, where it may."""
    demonstration = {"rule": "shortest", "exclude_self": False}
    setting = make_setting(cell_spec, base, arm="sdpo-static", demonstration=demonstration)
    groups = [make_group(base, position=0, scores=(1, 1, 0, 1))]
    notes = setting.build(groups).notes
    assert sorted(notes) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {note.demonstrator for note in notes.values()} == {1}
