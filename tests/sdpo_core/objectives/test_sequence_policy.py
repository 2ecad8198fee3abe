"""Policy loss by the sequence's ratio: oracle, worked sequences, token credit, extremes."""

import math
import random
from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.policy_loss import clipped_policy_loss
from sdpo_core.objectives.sequence_policy import held_ratio_policy_loss, sequence_log_ratio, sequence_policy_loss
from tests.oracles import policy
from tests.sdpo_core.objectives.tensors import depends, double, gradient, relative_error

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}

# log p, log p_old and A of each token.
Token = tuple[float, float, float]
tokens = st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.floats(-3, 3))
sequences = st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=4)


def columns(rows: Sequence[Sequence[Token]], *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """`logp` (a leaf), `old_logp`, `advantage` and `sequence` of the rows."""
    numbers = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    sequence = torch.tensor([place for place, row in enumerate(rows) for _ in row])
    return numbers[:, 0].clone().requires_grad_(), numbers[:, 1], numbers[:, 2], sequence


def oracle(rows: Sequence[Sequence[Token]]) -> tuple[list[float], list[float]]:
    """Losses and slopes of all tokens."""
    parts = [policy.sequence_surrogate(*zip(*row, strict=True), low=0.2, high=0.28) for row in rows]
    return list(chain.from_iterable(loss for loss, _ in parts)), list(chain.from_iterable(slope for _, slope in parts))


def is_at_an_edge(rows: Sequence[Sequence[Token]]) -> bool:
    """Whether a sequence's ratio meets a clip, where the slope is one-sided."""
    gaps = [math.fsum(new - old for new, old, _ in row) / len(row) for row in rows]
    return any(abs(gap - math.log(edge)) < 1e-9 for gap in gaps for edge in (0.8, 1.28))


def test_sequence_policy_loss_of_hand_worked_sequences() -> None:
    """Two tokens of ratios 1/2 and 9/2: s = sqrt(9/4) = 3/2, above 1.28. One of ratio 5/4: s = 5/4, free.

    A = 2: held at -2 x 1.28, slope 0. A = -1: max(3/2, 1.28) = 3/2, slope 3/2. Alone, A = 2: -5/2, slope -5/2.
    """
    logp, old_logp, advantage, sequence = columns(
        [[(math.log(0.5) - 2, -2.0, 2.0), (math.log(4.5) - 3, -3.0, -1.0)], [(math.log(1.25) - 1, -1.0, 2.0)]]
    )
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    assert loss.tolist() == pytest.approx([-2.56, 1.5, -2.5], abs=1e-14)
    assert gradient(loss, at=logp).tolist() == pytest.approx([0.0, 1.5, -2.5], abs=1e-14)


@given(sequences)
@settings(max_examples=100, deadline=None)
def test_sequence_policy_loss_is_the_oracles_in_value_and_gradient(rows: list[list[Token]]) -> None:
    assume(not is_at_an_edge(rows))
    logp, old_logp, advantage, sequence = columns(rows)
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    losses, slopes = oracle(rows)
    assert loss.tolist() == pytest.approx(losses, rel=1e-13)
    assert gradient(loss, at=logp).tolist() == pytest.approx(slopes, rel=1e-13)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_sequence_policy_loss_gives_each_token_its_own_advantage(advantage: list[float]) -> None:
    """On policy the slope is -A of the token; through the sequence's ratio it would be minus the mean of A."""
    logp = double([-1.0] * len(advantage), requires_grad=True)
    sequence = torch.zeros(len(advantage), dtype=torch.int64)
    loss = sequence_policy_loss(logp, logp, double(advantage), sequence, **CLIPS)
    # Exact but for numbers of 1e-320, which have no half.
    assert torch.allclose(gradient(loss, at=logp), -double(advantage), rtol=0, atol=1e-300)
    ratio = (logp - logp.detach()).mean().exp()
    averaged = gradient((-double(advantage) * ratio).sum()[None], at=logp)
    assert averaged.tolist() == pytest.approx([-math.fsum(advantage) / len(advantage)] * len(advantage), abs=1e-14)


def test_sequence_policy_loss_of_one_advantage_has_the_gradient_of_the_sequences_ratio() -> None:
    """Weighed by 1/n, the token form is GSPO: -A exp(mean of log u) differentiated."""
    rows = [[(-1.0, -1.1, 0.7), (-2.0, -1.95, 0.7), (-0.5, -0.52, 0.7)]]
    logp, old_logp, advantage, sequence = columns(rows)
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    whole = -0.7 * (logp - old_logp).mean().exp()
    assert (loss / 3).sum().item() == pytest.approx(whole.item(), rel=1e-14)
    assert torch.allclose(gradient(loss / 3, at=logp), gradient(whole[None], at=logp), rtol=1e-14, atol=0)


@given(st.lists(tokens, min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_sequence_policy_loss_of_sequences_of_one_token_is_the_clipped_loss(rows: list[Token]) -> None:
    assume(not is_at_an_edge([[row] for row in rows]))
    logp, old_logp, advantage, sequence = columns([[row] for row in rows])
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    expected = clipped_policy_loss(logp, old_logp, advantage, **CLIPS, dual_clip=None)
    assert loss.tolist() == pytest.approx(expected.tolist(), rel=1e-13)
    assert gradient(loss, at=logp).tolist() == pytest.approx(gradient(expected, at=logp).tolist(), rel=1e-13)


@given(sequences, st.randoms())
@settings(max_examples=40, deadline=None)
def test_sequence_policy_loss_ignores_order_and_the_other_sequences(
    rows: list[list[Token]], order: random.Random
) -> None:
    logp, old_logp, advantage, sequence = columns(rows)
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    places = order.sample(range(len(logp)), len(logp))
    permuted = sequence_policy_loss(logp[places], old_logp[places], advantage[places], sequence[places], **CLIPS)
    # A sum in another order.
    assert permuted.tolist() == pytest.approx(loss[places].tolist(), rel=1e-13)
    first = sequence == 0
    alone = sequence_policy_loss(logp[first], old_logp[first], advantage[first], sequence[first], **CLIPS)
    assert torch.equal(alone, loss[first])


def test_sequence_policy_loss_takes_numbers_that_no_token_has() -> None:
    """A sequence of no tokens between two others."""
    logp, old_logp, advantage = double([-1.0, -2.0]), double([-1.1, -2.1]), double([1.0, 1.0])
    loss = sequence_policy_loss(logp, old_logp, advantage, torch.tensor([0, 2]), **CLIPS)
    assert loss.tolist() == pytest.approx([-math.exp(0.1)] * 2, rel=1e-14)


def test_sequence_policy_loss_in_parts_has_the_gradient_of_the_whole() -> None:
    """The log-ratio from all tokens, the loss of those that are here."""
    rows = [[(-1.0, -1.1, 0.7), (-2.0, -1.95, -0.4), (-0.5, -0.52, 0.2)], [(-1.5, -1.4, 1.0)]]
    logp, old_logp, advantage, sequence = columns(rows)
    whole = gradient(sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS), at=logp)
    gaps = sequence_log_ratio(logp.detach(), old_logp, sequence)
    parts = torch.zeros_like(whole)
    for part in (torch.tensor([0, 3]), torch.tensor([1, 2])):
        parts += gradient(held_ratio_policy_loss(logp[part], gaps[part], advantage[part], **CLIPS), at=logp)
    assert torch.equal(parts, whole)


def test_sequence_policy_loss_of_log_ratios_of_1e4_is_finite() -> None:
    """s is e^20 or e^-20: A = 1 is held at -1.28 above, A = -1 at 0.8 below; the other sides are free."""
    logp, old_logp, advantage, sequence = columns([[(0.0, -1e4, 1.0), (0.0, -1e4, -1.0)], [(-1e4, 0.0, -1.0)]])
    loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
    assert loss.tolist() == pytest.approx([-1.28, math.exp(20), 0.8], rel=1e-12)
    assert gradient(loss, at=logp).tolist() == pytest.approx([0.0, math.exp(20), 0.0], rel=1e-12)


def test_sequence_policy_loss_spares_old_log_probabilities_and_advantages() -> None:
    old_logp, advantage = double([-1.0], requires_grad=True), double([1.0], requires_grad=True)
    loss = sequence_policy_loss(double([-1.1], requires_grad=True), old_logp, advantage, torch.tensor([0]), **CLIPS)
    assert not depends(loss, on=old_logp)
    assert not depends(loss, on=advantage)
    assert not sequence_log_ratio(double([-1.1], requires_grad=True), old_logp, torch.tensor([0])).requires_grad


def test_sequence_policy_loss_of_no_token_is_empty() -> None:
    nothing = torch.zeros(0)
    assert sequence_policy_loss(nothing, nothing, nothing, nothing.long(), **CLIPS).shape == (0,)


@pytest.mark.parametrize("name", ["logp", "old_logp", "advantage"])
def test_sequence_policy_loss_refuses_what_is_not_finite(name: str) -> None:
    values = {part: torch.tensor([-1.0, math.nan if part == name else -1.0]) for part in ("logp", "old_logp")}
    advantage = torch.tensor([1.0, math.nan if name == "advantage" else 1.0])
    with pytest.raises(DataError, match=f"got {name} nan at token 1"):
        sequence_policy_loss(values["logp"], values["old_logp"], advantage, torch.tensor([0, 0]), **CLIPS)


def test_sequence_policy_loss_refuses_a_negative_number_and_clips_out_of_range() -> None:
    one = torch.zeros(1)
    with pytest.raises(DataError, match="got sequence number -1"):
        sequence_policy_loss(one, one, one, torch.tensor([-1]), **CLIPS)
    for low, high in ((-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)):
        with pytest.raises(SpecError, match="sequence_policy_loss: got clips"):
            sequence_policy_loss(one, one, one, torch.tensor([0]), clip_low=low, clip_high=high)


def test_sequence_policy_loss_is_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """200 random batches of 6 sequences of 1 to 60 tokens; float32 and float64 start from the same numbers."""
    for seed in range(200):
        source = random.Random(seed)
        rows = [
            [(source.uniform(-9, 0), source.uniform(-9, 0), source.gauss(0, 1)) for _ in range(source.randint(1, 60))]
            for _ in range(6)
        ]
        low = columns(rows, dtype=torch.float32)
        tokens_ = list(zip(*(value.tolist() for value in low), strict=True))
        rows = [[(new, old, gain) for new, old, gain, place in tokens_ if place == number] for number in range(6)]
        losses, slopes = oracle(rows)
        high = columns(rows)
        for (logp, old_logp, advantage, sequence), bound in ((high, 1e-10), (low, 2e-5)):
            loss = sequence_policy_loss(logp, old_logp, advantage, sequence, **CLIPS)
            assert relative_error(loss, double(losses)) <= bound
            assert relative_error(gradient(loss, at=logp), double(slopes)) <= bound
