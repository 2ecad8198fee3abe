"""What an estimator of the KL trains, by where it stands: exact expected gradients over all tokens of a vocabulary.

The names are those of notation.md, "Constructions". Every token y is drawn with its probability p(y); the expected
gradient is sum over y of p(y) x (gradient of the loss of y), the probabilities as constants.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.objectives.advantages import discounted_returns, whiten
from sdpo_core.objectives.divergence import bucket_divergence, support_divergence
from sdpo_core.objectives.kl_terms import kl_estimates, score_function_loss
from sdpo_core.objectives.policy_loss import clipped_policy_loss, soft_gate_policy_loss
from sdpo_core.objectives.sequence_policy import sequence_policy_loss
from tests.oracles import distributions
from tests.sdpo_core.objectives.tensors import double, gradient

Pair = tuple[list[float], list[float]]
Loss = Callable[[Tensor, Tensor], Tensor]

pairs = st.integers(2, 16).flatmap(
    lambda vocab: st.tuples(*[st.lists(st.floats(-3, 3), min_size=vocab, max_size=vocab)] * 2)
)

# Sixteen terms of log-ratios up to 12, each with a rounding of 1e-16 at the size of e^6.
EXACT = 1e-13


def clipped(logp: Tensor, advantage: Tensor) -> Tensor:
    """On policy, so that no clip binds."""
    return clipped_policy_loss(logp, logp, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def expected_gradient(student: list[float], teacher: list[float], loss: Loss) -> list[float]:
    """Of `loss(log p(y), log q(y))` at every y, in the student's logits."""
    logits = double(student, requires_grad=True)
    logp, target = logits.log_softmax(0), double(teacher).log_softmax(0)
    return gradient(logp.detach().exp() * loss(logp, target), at=logits).tolist()


def kl_gradient(student: list[float], teacher: list[float], *, alpha: float) -> list[float]:
    """The oracle's, over the whole vocabulary: 1 is the reverse KL(p||q), 0 the forward KL(q||p)."""
    ids = list(range(len(student)))
    return distributions.divergence_gradient(student, teacher, ids, alpha=alpha, temperature=1.0)


@given(pairs)
@settings(max_examples=80, deadline=None)
def test_c1_the_sampled_log_ratio_as_advantage_trains_the_reverse_kl(pair: Pair) -> None:
    """As an advantage of every policy loss, and as the signal of the score function, with its coefficient."""
    expected = [0.7 * slope for slope in kl_gradient(*pair, alpha=1.0)]

    def signal(logp: Tensor, target: Tensor) -> Tensor:
        return 0.7 * kl_estimates(logp, target).k1

    losses: list[Loss] = [
        lambda logp, target: clipped(logp, -signal(logp, target)),
        lambda logp, target: score_function_loss(logp, signal(logp, target)),
        lambda logp, target: sequence_policy_loss(
            logp, logp, -signal(logp, target), torch.arange(len(logp)), clip_low=3e-4, clip_high=4e-4
        ),
        lambda logp, target: soft_gate_policy_loss(
            logp,
            logp,
            -signal(logp, target),
            sign_of=torch.zeros_like(logp),
            temperature_positive=1.0,
            temperature_negative=1.05,
        ),
    ]
    for loss in losses:
        assert expected_gradient(*pair, loss) == pytest.approx(expected, abs=EXACT)


@given(pairs)
@settings(max_examples=40, deadline=None)
def test_k2_as_loss_trains_the_reverse_kl(pair: Pair) -> None:
    found = expected_gradient(*pair, lambda logp, target: (logp - target).square() / 2)
    assert found == pytest.approx(kl_gradient(*pair, alpha=1.0), abs=EXACT)


@given(pairs)
@settings(max_examples=40, deadline=None)
def test_c2_the_differentiated_log_ratio_trains_nothing(pair: Pair) -> None:
    found = expected_gradient(*pair, lambda logp, target: logp - target)
    assert found == pytest.approx([0.0] * len(pair[0]), abs=EXACT)


@given(pairs, st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_c3_a_whole_divergence_as_advantage_trains_nothing(pair: Pair, alpha: float) -> None:
    """Of the whole vocabulary, or of any support: it does not depend on the sampled token."""

    def loss(logp: Tensor, target: Tensor) -> Tensor:
        cut = [torch.cat([row[:1], row[1:].logsumexp(0, keepdim=True)])[None] for row in (logp, target)]
        whole = bucket_divergence(logp[None], target[None], alpha=alpha)
        parts = support_divergence(*cut, alpha=alpha, truncation="tail")
        return clipped(logp, -(whole + parts).expand(len(logp)))

    assert expected_gradient(*pair, loss) == pytest.approx([0.0] * len(pair[0]), abs=EXACT)


@given(pairs, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@settings(max_examples=40, deadline=None)
def test_c4_a_whole_divergence_as_loss_trains_itself(pair: Pair, alpha: float) -> None:
    def loss(logp: Tensor, target: Tensor) -> Tensor:
        return bucket_divergence(logp[None], target[None], alpha=alpha).expand(len(logp))

    assert expected_gradient(*pair, loss) == pytest.approx(kl_gradient(*pair, alpha=alpha), abs=EXACT)


@given(pairs)
@settings(max_examples=40, deadline=None)
def test_k3_as_loss_trains_the_forward_kl(pair: Pair) -> None:
    found = expected_gradient(*pair, lambda logp, target: (target - logp).exp() - 1 + logp - target)
    assert found == pytest.approx(kl_gradient(*pair, alpha=0.0), abs=1e-12)


@given(pairs)
@settings(max_examples=40, deadline=None)
def test_k3_as_advantage_trains_the_reverse_kl_minus_the_forward(pair: Pair) -> None:
    found = expected_gradient(*pair, lambda logp, target: clipped(logp, -kl_estimates(logp, target).k3))
    sides = [kl_gradient(*pair, alpha=alpha) for alpha in (1.0, 0.0)]
    assert found == pytest.approx([reverse - forward for reverse, forward in zip(*sides, strict=True)], abs=1e-12)


def test_k2_as_advantage_trains_something_else() -> None:
    """p = (.62, .23, .15), q = (.17, .74, .09): the gradient leaves the direction of the reverse KL's."""
    pair = ([2.0, 1.0, 0.55], [0.5, 2.0, -0.1])
    found = double(expected_gradient(*pair, lambda logp, target: clipped(logp, -kl_estimates(logp, target).k2)))
    reverse = double(kl_gradient(*pair, alpha=1.0))
    assert torch.cosine_similarity(found, reverse, dim=0) < 0.9


def test_the_coefficient_of_a_term_survives_a_whitened_advantage() -> None:
    """Zero rewards: the whitened task is 0, and twice the coefficient is twice the gradient.

    Whitened together with the term, every coefficient would give one gradient.
    """
    logp = double([-0.5, -1.5, -2.0, -0.1], requires_grad=True)
    gap = kl_estimates(logp, double([-1.0, -0.5, -2.5, -0.3])).k1
    task = torch.zeros(4, dtype=torch.float64)

    def slope(coefficient: float) -> Tensor:
        return gradient(clipped(logp, whiten(task) - coefficient * gap), at=logp)

    assert torch.equal(slope(2.0), 2 * slope(1.0))
    assert torch.equal(slope(1.0), gap)
    once, twice = (gradient(clipped(logp, whiten(task - factor * gap)), at=logp) for factor in (1.0, 2.0))
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=8), st.floats(0.1, 4))
@settings(max_examples=40, deadline=None)
def test_a_term_adds_its_gradient_to_that_of_a_whitened_task(rewards: list[float], coefficient: float) -> None:
    assume(max(rewards) > min(rewards))
    logp = double([-1.0 - 0.1 * place for place in range(len(rewards))], requires_grad=True)
    gap = kl_estimates(logp, logp.detach().flip(0) - 0.3).k1
    task = whiten(double(rewards))
    both = gradient(clipped(logp, task - coefficient * gap), at=logp)
    apart = gradient(clipped(logp, task) + score_function_loss(logp, coefficient * gap), at=logp)
    assert torch.allclose(both, apart, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("discount", "is_exact"), [(1.0, True), (0.0, False)])
def test_a_return_to_go_of_log_ratios_trains_the_kl_of_the_whole_sequence(discount: float, is_exact: bool) -> None:
    """Two tokens, the second's distributions depending on the first: all 9 sequences, each with its probability.

    The gradient of E[sum of k1] credits the first token with the second's log-ratio as well; its own alone is another.
    """
    generator = torch.Generator().manual_seed(0)
    first, second, *other = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3), (3,), (3, 3))
    )
    first.requires_grad_()
    second.requires_grad_()
    targets = other[0].log_softmax(0), other[1].log_softmax(1)
    # [first token, second token, which of the two]
    logp, target = (
        torch.stack([rows[0][:, None].expand(3, 3), rows[1]], dim=2)
        for rows in ((first.log_softmax(0), second.log_softmax(1)), targets)
    )
    chance = logp.sum(dim=2).exp()
    exact = torch.autograd.grad((chance * (logp - target).sum(dim=2)).sum(), (first, second), retain_graph=True)
    signal = discounted_returns((logp - target).flatten(), [2] * 9, discount=discount)
    terms = score_function_loss(logp.flatten(), signal).reshape(3, 3, 2)
    found = torch.autograd.grad((chance.detach()[:, :, None] * terms).sum(), (first, second))
    assert torch.allclose(found[1], exact[1], rtol=0, atol=1e-15)
    assert torch.allclose(found[0], exact[0], rtol=0, atol=1e-15 if is_exact else 1e-2) == is_exact
