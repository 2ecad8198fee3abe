"""REINFORCE++: discounted, whitened returns with and without a baseline, against the formula by cases."""

from typing import Any

import pytest

from sdpo_core.backends.base import TrainRow
from sdpo_core.specs import CellSpec
from tests.oracles import policy, returns
from tests.sdpo_core.algorithms.dense import clipped
from tests.sdpo_core.algorithms.groups import (
    assert_policy_step,
    by_response,
    make_setting,
    responses,
    scores_of,
    three_groups,
    token_mean,
)
from tests.sdpo_core.micro import Base


@pytest.mark.parametrize(
    ("arm", "discount"), [("reinforce-pp", 1.0), ("reinforce-pp", 0.7), ("reinforce-pp-baseline", None)]
)
def test_gradient_is_that_of_the_whitened_returns(
    cell_spec: CellSpec, base: Base, arm: str, discount: float | None
) -> None:
    """Whitened over the tokens of the whole step, both mini-batches together; each token has its own advantage."""
    settings: dict[str, Any] = {} if discount is None else {"discount": discount}
    setting = make_setting(cell_spec, base, arm=arm, minibatches=2, **settings)
    groups, start = three_groups(base), setting.dense()
    lengths = [len(response) for response in responses(groups)]
    if discount is None:
        scores = [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=False)]
        raw = [score for score, length in zip(scores, lengths, strict=True) for _ in range(length)]
    else:
        scores = [value for row in scores_of(groups) for value in row]
        ends = [[0.0] * (length - 1) + [score] for score, length in zip(scores, lengths, strict=True)]
        raw = [value for rewards in ends for value in returns.returns(rewards, discount=discount)]
    advantages = by_response(groups, returns.split(returns.whitened(raw, shift_mean=True), lengths))
    batch = setting.build(groups)
    held, spread = 0, 0.0

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        nonlocal held, spread
        own = advantages[row.row.response_ids]
        losses, slopes = clipped(now, start.own(row.row), own)
        held += slopes.count(0.0)
        spread = max(spread, max(own) - min(own))
        assert row.task_advantage == pytest.approx(own[0], abs=1e-6)
        return losses, slopes

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=token_mean(rows), minibatch=minibatch, learning_rate=4e-3)
    assert held > 0
    assert (spread > 0.1) == (discount == 0.7)
