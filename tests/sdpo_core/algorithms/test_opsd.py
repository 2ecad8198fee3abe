"""OPSD: divergence over the whole vocabulary to a frozen teacher that reads the problem's privileged text."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from sdpo_core.backends.base import TokenRow, TrainRow
from sdpo_core.errors import DataError
from sdpo_core.records import Group, Message
from sdpo_core.specs import CellSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.dense import DenseModel, divergence_terms, weighed
from tests.sdpo_core.algorithms.groups import assert_step, batch_bytes, make_setting, three_groups, token_mean
from tests.sdpo_core.micro import Base, make_problem


def privileged_messages(group: Group, *, prompt: str) -> list[Message]:
    """What the teacher reads, in full."""
    (message,) = group.problem.prompt
    words = f"{message.content}\n\nA correct solution:\n\n{group.problem.privileged}"
    if prompt == "reason_first":
        words += "\n\nBefore you answer, reason through this solution step by step in your own words."
    return [Message(role="user", content=f"{words}\n\nNow solve the original problem correctly.")]


@pytest.mark.parametrize("prompt", ["plain", "reason_first"])
@pytest.mark.parametrize("divergence", [{"support": "full", "top_k": None}, {"support": "teacher", "top_k": 6}])
def test_gradient_is_that_of_the_dense_divergence(
    cell_spec: CellSpec, base: Base, prompt: str, divergence: dict[str, Any]
) -> None:
    """Both mini-batches, against whole distributions of the base under the privileged prompt."""
    alpha = 0.3
    setting = make_setting(
        cell_spec,
        base,
        arm="opsd",
        prompt=prompt,
        divergence={**divergence, "alpha": alpha},
        minibatches=2,
        is_moved=True,
    )
    groups, start, teacher = three_groups(base), setting.dense(), setting.start()
    batch = setting.build(groups)
    prompts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for group in groups:
        ids = base.text.prompt_ids(privileged_messages(group, prompt=prompt))
        prompts |= {member.rollout.response_ids: ids for member in group.members}
    assert [note.demonstrator for note in batch.notes.values()] == [None] * 12

    def row_loss(dense: DenseModel, row: TrainRow) -> tuple[Tensor, float]:
        key = row.row.response_ids
        taught = TokenRow(prompt_ids=prompts[key], response_ids=key)
        best = None if divergence["support"] == "full" else teacher.best_ids(taught, k=6)
        terms, values = divergence_terms(dense.logps(row.row), teacher.masses(taught), best, alpha=alpha)
        pairs = zip(dense.own(row.row), start.own(row.row), strict=True)
        shares = [share * min(policy.ratio(*pair), 2.0) for pair in pairs]
        return weighed(shares, terms), sum(s * value for s, value in zip(shares, values, strict=True))

    for minibatch, rows in enumerate(batch.minibatches):
        share = token_mean(rows)(rows[0])
        assert_step(setting, batch, row_loss, minibatch=minibatch)


def test_rewards_and_feedback_play_no_part(cell_spec: CellSpec, base: Base) -> None:
    """The privileged text is of the data: what the rollouts earned changes no byte."""
    setting = make_setting(cell_spec, base, arm="opsd", is_moved=True)
    groups = three_groups(base)
    silent = [
        replace(
            group,
            members=tuple(
                replace(member, verdict=replace(member.verdict, score=0.0, feedback="")) for member in group.members
            ),
        )
        for group in groups
    ]
    assert batch_bytes(setting.build(groups)) == batch_bytes(setting.build(silent))


def test_problems_without_privileged_text_are_left_out(cell_spec: CellSpec, base: Base) -> None:
    """Contract 18: their rollouts leave numerator and denominator, and are counted."""
    setting = make_setting(cell_spec, base, arm="opsd")
    groups = three_groups(base)
    bare = [groups[0], replace(groups[1], problem=replace(groups[1].problem, privileged=" ")), groups[2]]
    batch = setting.build(bare)
    assert batch_bytes(batch) == batch_bytes(setting.build([groups[0], groups[2]]))
    assert batch.metrics["feedback/no_context_fraction"] == pytest.approx(4 / 12)
    assert batch.metrics["feedback/skipped_prompts"] == 1
    assert batch.metrics["feedback/from_demo_fraction"] == 0


def test_data_without_privileged_text_is_refused_before_the_first_step(
    cell_spec: CellSpec, base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    arm = make_setting(cell_spec, base, arm="opsd").arm
    problems = [make_problem(index) for index in range(3)]
    arm.check_problems(problems)
    assert not caplog.messages
    bare = [replace(problem, privileged=None) for problem in problems]
    arm.check_problems([*bare[:2], problems[2]])
    assert "2 of 3 problems have no privileged text" in caplog.text
    with pytest.raises(DataError, match="got no privileged text in any of 3 problems"):
        arm.check_problems(bare)
