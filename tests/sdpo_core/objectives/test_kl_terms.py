"""Score function and sampled estimates of the KL: oracle, worked tokens, means by enumeration, extremes."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.errors import DataError
from sdpo_core.objectives.kl_terms import kl_estimates, score_function_loss
from tests.oracles import distributions, policy
from tests.sdpo_core.objectives.tensors import depends, double, gradient, relative_error

logps = st.floats(-30, 0)
row_pairs = st.integers(2, 8).flatmap(
    lambda size: st.tuples(*[st.lists(st.floats(-3, 3), min_size=size, max_size=size)] * 2)
)


@given(st.lists(st.tuples(logps, st.floats(-5, 5)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_score_function_loss_has_the_signal_as_its_gradient(tokens: list[tuple[float, float]]) -> None:
    columns = list(zip(*tokens, strict=True))
    logp, signal = double(columns[0], requires_grad=True), double(columns[1], requires_grad=True)
    loss = score_function_loss(logp, signal)
    assert loss.tolist() == [a * b for a, b in tokens]
    assert gradient(loss, at=logp).tolist() == list(columns[1])
    assert not depends(loss, on=signal)


def test_score_function_loss_with_the_log_ratio_has_the_gradient_of_half_its_square() -> None:
    logp, reference = double([-1.0, -2.0, -0.5], requires_grad=True), double([-1.5, -1.0, -0.5])
    ours = gradient(score_function_loss(logp, logp - reference), at=logp)
    assert torch.equal(ours, gradient((logp - reference).square() / 2, at=logp))


def test_kl_estimates_of_hand_worked_tokens() -> None:
    """p / reference = 2: ln 2, (ln 2)^2 / 2 = 0.240227, 1/2 - 1 + ln 2 = 0.193147; of 1/2: 2 - 1 - ln 2 = 0.306853."""
    found = kl_estimates(double([math.log(0.5), math.log(0.25), -1.0]), double([math.log(0.25), math.log(0.5), -1.0]))
    assert found.k1.tolist() == pytest.approx([math.log(2), -math.log(2), 0.0], abs=1e-15)
    assert found.k2.tolist() == pytest.approx([0.240227, 0.240227, 0.0], abs=1e-6)
    assert found.k3.tolist() == pytest.approx([0.193147, 0.306853, 0.0], abs=1e-6)


@given(st.lists(st.tuples(logps, logps), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_kl_estimates_are_the_oracles(tokens: list[tuple[float, float]]) -> None:
    logp, reference = (double(column) for column in zip(*tokens, strict=True))
    found = kl_estimates(logp, reference)
    expected = [policy.kl_estimates(*token) for token in tokens]
    for name, column in zip(("k1", "k2", "k3"), zip(*expected, strict=True), strict=True):
        assert getattr(found, name).tolist() == pytest.approx(list(column), rel=1e-13, abs=1e-14)
    assert (found.k3 >= 0).all()


@given(row_pairs)
@settings(max_examples=60, deadline=None)
def test_kl_estimates_k1_and_k3_have_the_kl_as_their_mean(case: tuple[list[float], list[float]]) -> None:
    """The mean over all tokens, each with its probability."""
    p, q = (distributions.softmax(row, temperature=1.0) for row in case)
    found = kl_estimates(double(p).log(), double(q).log())
    kl = distributions.kl(p, q)
    assert (double(p) * found.k1).sum().item() == pytest.approx(kl, abs=1e-14)
    # e^6 at most, times the rounding.
    assert (double(p) * found.k3).sum().item() == pytest.approx(kl, abs=1e-12)


def test_kl_estimates_of_nearly_equal_log_probabilities_are_not_negative() -> None:
    """In float32, where e^-r - 1 + r of 1e-4 would be the rounding of 1, 6e-8, instead of 5e-9."""
    logp = torch.linspace(-9, 0, 1000)
    found = kl_estimates(logp, logp + 1e-4)
    assert (found.k3 >= 0).all()
    gap = (logp.double() - (logp + 1e-4).double()).abs()
    assert torch.allclose(found.k3.double(), gap.square() / 2, rtol=1e-3, atol=0)


def test_kl_estimates_of_log_ratios_of_1e4_are_finite_and_only_k3s_exponent_is_held() -> None:
    found = kl_estimates(double([-1e4, 0.0]), double([0.0, -1e4]))
    assert found.k1.tolist() == [-1e4, 1e4]
    assert found.k2.tolist() == [5e7, 5e7]
    assert found.k3.tolist() == pytest.approx([math.exp(20) - 1 - 1e4, 1e4 - 1], rel=1e-14)


def test_kl_terms_take_no_token_and_refuse_what_is_not_finite() -> None:
    nothing, one, bad = torch.zeros(0), torch.zeros(1), torch.tensor([-math.inf])
    assert score_function_loss(nothing, nothing).shape == (0,)
    assert kl_estimates(nothing, nothing).k3.shape == (0,)
    with pytest.raises(DataError, match="score_function_loss: got signal -inf at token 0"):
        score_function_loss(one, bad)
    with pytest.raises(DataError, match="kl_estimates: got reference_logp -inf at token 0"):
        kl_estimates(one, bad)


def test_kl_estimates_carry_no_gradient() -> None:
    found = kl_estimates(double([-1.0], requires_grad=True), double([-2.0], requires_grad=True))
    assert not any(value.requires_grad for value in (found.k1, found.k2, found.k3))


def test_kl_terms_are_exact_to_1e_10_and_in_float32_to_2e_5() -> None:
    """10,000 random tokens; both precisions and the oracle start from the same float32 numbers."""
    source = random.Random(0)
    low = torch.tensor([[source.uniform(-9, 0), source.uniform(-9, 0)] for _ in range(10_000)])
    expected = double([policy.kl_estimates(*row) for row in low.tolist()])
    for numbers, bound in ((low.double(), 1e-10), (low, 2e-5)):
        found = kl_estimates(numbers[:, 0], numbers[:, 1])
        for place, name in enumerate(("k1", "k2", "k3")):
            assert relative_error(getattr(found, name), expected[:, place]) <= bound, name
        loss = score_function_loss(numbers[:, 0], found.k1)
        assert relative_error(loss, low.double()[:, 0] * expected[:, 0]) <= bound
