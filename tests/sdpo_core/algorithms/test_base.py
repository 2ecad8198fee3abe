"""Denominators and mini-batches, with the weights worked by hand."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from sdpo_core.algorithm_specs import GrpoSpec
from sdpo_core.algorithms.base import deal, minibatches, row_weights
from sdpo_core.backends.base import TokenRow, TrainRow
from sdpo_core.specs import CellSpec
from tests.sdpo_core.algorithms.dense import assert_gradients
from tests.sdpo_core.algorithms.groups import make_setting, three_groups
from tests.sdpo_core.micro import Base

# Five rollouts dealt to two mini-batches: 0, 2, 4 and 1, 3. The third carries no term.
LENGTHS = (4, 1, 2, 3, 5)
ACTIVE = (True, True, False, True, True)
BY_HAND = {
    # 4 + 5 tokens in the first mini-batch, 1 + 3 in the second; 13 in the step.
    ("token_mean", "minibatch"): ("1/9", "1/4", "0", "1/4", "1/9"),
    ("token_mean", "step"): ("1/13", "1/13", "0", "1/13", "1/13"),
    # Two active rollouts in each mini-batch, four in the step.
    ("sequence_mean", "minibatch"): ("1/8", "1/2", "0", "1/6", "1/10"),
    ("sequence_mean", "step"): ("1/16", "1/4", "0", "1/12", "1/20"),
    # The one without a term stays in the denominator: three and two, five in the step.
    ("sequence_mean_of_all", "minibatch"): ("1/12", "1/2", "0", "1/6", "1/15"),
    ("sequence_mean_of_all", "step"): ("1/20", "1/5", "0", "1/15", "1/25"),
}


def test_deal_spreads_neighbours_over_the_hands() -> None:
    assert deal(7, 3) == ((0, 3, 6), (1, 4), (2, 5))
    assert deal(2, 3) == ((0,), (1,), ())


@pytest.mark.parametrize(("reduction", "scope"), BY_HAND)
def test_row_weights_count_the_minibatch_or_the_step(reduction: str, scope: str) -> None:
    """Contract 18: what carries no term leaves the denominator of the others, unless it is declared to stay."""
    spec = GrpoSpec.model_validate({"reduction": reduction, "scope": scope, "minibatches": 2})
    found = row_weights(LENGTHS, ACTIVE, spec=spec)
    assert found == pytest.approx([float(Fraction(weight)) for weight in BY_HAND[reduction, scope]])


def test_minibatches_leave_rows_without_a_term_out() -> None:
    rows = [
        TrainRow(row=TokenRow(prompt_ids=(1, 2), response_ids=(index,)), weight=weight, distill_weight=distill)
        for index, (weight, distill) in enumerate([(0.5, 0.0), (0.0, 0.0), (0.0, 0.5), (0.0, 0.0), (0.5, 0.5)])
    ]
    found = minibatches(rows, spec=GrpoSpec(minibatches=2))
    assert [[row.row.response_ids[0] for row in part] for part in found] == [[0, 2, 4], []]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_mean_of_all"])
@pytest.mark.parametrize("scope", ["minibatch", "step"])
def test_rows_of_a_batch_have_the_weights_of_their_spec(
    cell_spec: CellSpec, base: Base, reduction: str, scope: str
) -> None:
    """Over all tokens the weights of a mini-batch sum to 1, those of a step over all its mini-batches."""
    setting = make_setting(cell_spec, base, arm="rloo", reduction=reduction, scope=scope, minibatches=5)
    batch = setting.build(three_groups(base))
    assert [len(rows) for rows in batch.minibatches] == [3, 3, 2, 2, 2]
    totals = [sum(row.weight * len(row.row.response_ids) for row in rows) for rows in batch.minibatches]
    assert sum(totals) == pytest.approx(1.0 if scope == "step" else 5.0)
    if scope == "minibatch":
        assert totals == pytest.approx([1.0] * 5)
    else:
        counts = [sum(len(row.row.response_ids) for row in rows) for rows in batch.minibatches]
        shares = counts if reduction == "token_mean" else [3, 3, 2, 2, 2]
        assert totals == pytest.approx([share / sum(shares) for share in shares])


def test_step_scope_makes_minibatches_add_up_to_the_steps_gradient(cell_spec: CellSpec, base: Base) -> None:
    """Contract 19: at the weights before the step, two halves give the gradient of the whole."""
    groups = three_groups(base)

    def gradient(parts: int) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for part in range(parts):
            setting = make_setting(cell_spec, base, arm="rloo", scope="step", minibatches=parts)
            setting.update(setting.build(groups), minibatch=part)
            found = setting.gradient()
            total = {name: total.get(name, torch.zeros(())) + value for name, value in found.items()}
        return total

    assert_gradients(gradient(2), gradient(1))
