"""RLOO: the leave-one-out advantage under the clipped surrogate, against the formula by cases."""

import pytest

from sdpo_core.backends.base import TrainRow
from sdpo_core.specs import CellSpec
from tests.oracles import returns
from tests.sdpo_core.algorithms.dense import clipped
from tests.sdpo_core.algorithms.groups import (
    assert_policy_step,
    by_response,
    make_setting,
    scores_of,
    three_groups,
    token_mean,
)
from tests.sdpo_core.micro import Base


def test_gradient_is_that_of_the_left_out_mean(cell_spec: CellSpec, base: Base) -> None:
    """Two mini-batches, no dual clip."""
    setting = make_setting(cell_spec, base, arm="rloo", minibatches=2)
    groups, start = three_groups(base), setting.dense()
    values = [value for row in scores_of(groups) for value in returns.leave_one_out(row)]
    assert values[:4] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    advantages = by_response(groups, values)
    batch = setting.build(groups)
    held = 0

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        nonlocal held
        gain = advantages[row.row.response_ids]
        losses, slopes = clipped(now, start.own(row.row), [gain] * len(now))
        held += slopes.count(0.0) if gain else 0
        return losses, slopes

    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=token_mean(rows), minibatch=minibatch, learning_rate=4e-3)
    assert held > 0
