"""SAPO: the sigmoid gate against its formula, its temperature by the sign of the task's advantage."""

from typing import Any

import pytest

from sdpo_core.algorithm_specs import SapoSpec
from sdpo_core.backends.base import TrainRow
from sdpo_core.specs import CellSpec
from tests.oracles import policy
from tests.sdpo_core.algorithms.groups import (
    assert_policy_step,
    by_response,
    make_setting,
    scores_of,
    sequence_mean,
    three_groups,
)
from tests.sdpo_core.micro import ARMS, Base


@pytest.mark.parametrize("coefficient", [0.0, 4.0])
def test_gradient_is_that_of_the_gate(cell_spec: CellSpec, base: Base, coefficient: float) -> None:
    """Contract 17: a distillation term that turns a token's advantage round leaves it at the task's temperature."""
    opd: dict[str, Any] = (
        {"opd": {**ARMS["opd"]["opd"], "only": False, "coefficient": coefficient}} if coefficient else {}
    )
    temperatures: dict[str, Any] = {"temperature_positive": 1.5, "temperature_negative": 4.0}
    setting = make_setting(cell_spec, base, arm="sapo", minibatches=2, is_moved=True, **temperatures, **opd)
    assert isinstance(setting.spec.algorithm, SapoSpec)
    groups, start, teacher = three_groups(base), setting.dense(), setting.start()
    values = [value for row in scores_of(groups) for value in policy.advantages(row, normalise_std=True)]
    task = by_response(groups, values)
    batch = setting.build(groups)
    turned, signs = 0, set()

    def truth(row: TrainRow, now: list[float]) -> tuple[list[float], list[float]]:
        nonlocal turned
        before, other = start.own(row.row), teacher.own(row.row)
        gain = task[row.row.response_ids]
        own = [gain - coefficient * (old - there) for old, there in zip(before, other, strict=True)]
        turned += sum(value * gain < 0 for value in own)
        signs.add(gain > 0)
        temperature = 1.5 if gain > 0 else 4.0
        triples = list(zip(now, before, own, strict=True))
        return (
            [policy.soft_gate(new, old, value, temperature=temperature) for new, old, value in triples],
            [policy.soft_gate_slope(new, old, value, temperature=temperature) for new, old, value in triples],
        )

    # The value is not 0 at u = 1: -A (4 / tau) / 2.
    for minibatch, rows in enumerate(batch.minibatches):
        assert_policy_step(setting, batch, truth, weights=sequence_mean(rows), minibatch=minibatch, learning_rate=3e-3)
    assert signs == {True, False}
    assert (turned > 3) == bool(coefficient)


def test_distillation_alone_has_no_task_sign(cell_spec: CellSpec, base: Base) -> None:
    """`only`: the gate's temperature does not tell right responses from wrong ones either."""
    setting = make_setting(cell_spec, base, arm="sapo", is_moved=True, opd={**ARMS["opd"]["opd"], "only": True})
    (rows,) = setting.build(three_groups(base)).minibatches
    assert {row.task_advantage for row in rows} == {0.0}
