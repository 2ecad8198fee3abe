"""Fused head in one process: tables and gradients of both forms against the oracle, and what must hold for any."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.objectives import chunk_reader, chunks
from sdpo_core.objectives.divergence import bucket_divergence
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, TeacherStates
from tests.oracles import distributions
from tests.sdpo_core.objectives.fused_cases import Case, agree, agree_all
from tests.sdpo_core.objectives.tensors import double

SUPPORT = [[3, 0, 7], [1, -1, -1], [-1, -1, -1], [10, 9, 8], [0, 1, -1], [5, 6, 2], [4, 3, 1]]
EVERYTHING = [list(range(11))] * 7
CASES = {
    "own ids alone": Case(),
    "given support": Case(support=[[3, 0], [1, 9], [2, 4], [10, 5], [6, 7], [0, 1], [8, 3]]),
    "ragged support": Case(support=SUPPORT, has_teacher=True, has_entropy=True),
    "given support and best ids": Case(support=SUPPORT, best=4),
    "support of everything": Case(support=EVERYTHING, has_teacher=True, has_entropy=True),
    "top k": Case(top_k=4, has_teacher=True, vocab=150, padded=200, tokens=5),
    "top k of everything": Case(top_k=11, has_entropy=True),
    "entropy": Case(has_entropy=True),
    "forward": Case(full=FullDivergence(alpha=0.0)),
    "reverse": Case(full=FullDivergence(alpha=1.0), padded=13),
    "between": Case(full=FullDivergence(alpha=0.3)),
    "forward, clipped": Case(full=FullDivergence(alpha=0.0, entry_clip=0.02)),
    "reverse, clipped": Case(full=FullDivergence(alpha=1.0, entry_clip=0.02)),
    "between, clipped": Case(full=FullDivergence(alpha=0.7, entry_clip=0.02)),
    "all at once": Case(top_k=3, has_teacher=True, has_entropy=True, full=FullDivergence(alpha=0.5), padded=16),
    "bias and scale": Case(top_k=3, has_entropy=True, bias=True, scale=0.4, full=FullDivergence(alpha=0.2)),
    "cap": Case(support=SUPPORT, has_entropy=True, bias=True, cap=1.5, full=FullDivergence(alpha=0.2), padded=12),
    "one token": Case(tokens=1, top_k=2, has_teacher=True),
    "one id": Case(vocab=1, padded=4, top_k=1, has_entropy=True, full=FullDivergence(alpha=0.5)),
}


@pytest.fixture(params=["one chunk", "small chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once, or two tokens a chunk, three rows a block and teacher tiles of five columns."""
    if request.param == "small chunks":
        monkeypatch.setattr(chunk_reader, "CHUNK_NUMBERS", 2 * chunks.spare_width(16))
        monkeypatch.setattr(chunk_reader, "TILE_COLUMNS", 5)
        monkeypatch.setattr(chunk_reader, "TILE_ROWS", 3)
        monkeypatch.setattr(chunks, "BLOCK_NUMBERS", 3 * 11)


# 1e-12: tables reach 20 nats, sums run over a dozen numbers, and the complex step is exact to a few ulps.
FLOAT64 = 1e-12


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("name", CASES)
def test_both_forms_are_the_oracles_in_value_and_gradient(name: str) -> None:
    case = CASES[name].filled()
    numbers = (case.numbers["hidden"], case.numbers["weight"], case.numbers["bias"])
    expected, slopes = case.oracle_tables(*numbers), case.oracle_gradients()
    value = float(case.oracle_loss(*numbers))
    head, hidden = case.head(), case.tensor("hidden").requires_grad_()

    agree_all(score_tables(hidden, head, case.request()), expected, relative=FLOAT64)

    found = tables(hidden, head, case.request())
    agree_all(found, expected, relative=FLOAT64)
    loss = case.loss(found, slice(None))
    assert loss.item() == pytest.approx(value, rel=FLOAT64, abs=FLOAT64)
    loss.backward()
    agree(hidden.grad, slopes["hidden"], relative=FLOAT64)
    agree(head.weight.grad, slopes["weight"], relative=FLOAT64)

    weight_gradient, bias_gradient = torch.ones_like(head.weight), torch.ones_like(case.tensor("bias"))
    fused = loss_and_gradient(
        hidden, head, case.request(), case.loss, weight_gradient=weight_gradient, bias_gradient=bias_gradient
    )
    assert fused.loss.item() == pytest.approx(value, rel=FLOAT64, abs=FLOAT64)
    agree(fused.hidden_gradient, slopes["hidden"], relative=FLOAT64)
    agree(weight_gradient - 1, slopes["weight"], relative=FLOAT64)
    if head.bias is not None:
        agree(head.bias.grad, slopes["bias"], relative=FLOAT64)
        agree(bias_gradient - 1, slopes["bias"], relative=FLOAT64)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 2), st.data())
@settings(max_examples=40, deadline=None)
def test_random_cases_are_the_oracles(tokens: int, vocab: int, padding: int, data: st.DataObject) -> None:
    """Any support, divergence and head, with logits of up to some 30."""
    case = Case(
        tokens=tokens,
        vocab=vocab,
        padded=vocab + padding,
        top_k=data.draw(st.integers(0, vocab)),
        has_entropy=data.draw(st.booleans()),
        full=data.draw(st.sampled_from([None, FullDivergence(alpha=0.0), FullDivergence(alpha=0.9, entry_clip=0.1)])),
        cap=data.draw(st.sampled_from([None, 4.0])),
        temperature=data.draw(st.sampled_from([0.5, 1.3])),
        spread=data.draw(st.sampled_from([0.1, 5.0])),
        seed=data.draw(st.integers(0, 1000)),
    ).filled()
    numbers = (case.numbers["hidden"], case.numbers["weight"], case.numbers["bias"])
    slopes = case.oracle_gradients()
    head, hidden = case.head(), case.tensor("hidden").requires_grad_()
    found = tables(hidden, head, case.request())
    # A divergence adds up to 30 nats times vocab; 1e-11 leaves its last digits.
    agree_all(found, case.oracle_tables(*numbers), relative=1e-11)
    case.loss(found, slice(None)).backward()
    agree(hidden.grad, slopes["hidden"], relative=1e-11)
    agree(head.weight.grad, slopes["weight"], relative=1e-11)


def test_a_hand_worked_token() -> None:
    """h = 1, W = ln (4, 3, 2, 1), T = 1: masses 4, 3, 2, 1 tenths; ids (0, 2) keep 0.4 and 0.2, the tail 0.4.

    The gradient of the tail's log-probability on z is p_j / 0.4 - p_j in the tail, else -p_j: (-.4, .45, -.2, .15).
    On h that is .45 ln 3 - .4 ln 4 - .2 ln 2 + .15 ln 1, on W the same numbers, h being 1.
    """
    head = Head(weight=double([[math.log(w)] for w in (4, 3, 2, 1)], requires_grad=True), temperature=1.0, vocab=4)
    hidden = double([[1.0]], requires_grad=True)
    request = TableRequest(own_ids=torch.tensor([3]), support_ids=torch.tensor([[0, 2]]), entropy=True)
    found = tables(hidden, head, request)
    assert found.support_logp is not None
    assert found.support_logp.exp()[0].tolist() == pytest.approx([0.4, 0.2, 0.4], abs=1e-15)
    assert found.logp.item() == pytest.approx(math.log(0.1), abs=1e-15)
    entropy = -sum(p * math.log(p) for p in (0.4, 0.3, 0.2, 0.1))
    assert found.entropy is not None
    assert found.entropy.item() == pytest.approx(entropy, abs=1e-15)
    found.support_logp[0, -1].backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    assert hidden.grad.item() == pytest.approx(0.45 * math.log(3) - 0.4 * math.log(4) - 0.2 * math.log(2), abs=1e-15)
    assert head.weight.grad[:, 0].tolist() == pytest.approx([-0.4, 0.45, -0.2, 0.15], abs=1e-15)


@pytest.mark.parametrize("k", [1, 2, 5, 64, 700])
def test_top_k_puts_equal_logits_in_the_order_of_their_ids(k: int) -> None:
    """Logits of a few levels over eleven lanes, all equal, excluded ones, a high one late: as the oracle sorts them."""
    rng = np.random.default_rng(k)
    levels = rng.integers(-1, 2, size=(6, 700)).astype(float)
    levels[1] = 0.0
    levels[2, 70:] = -np.inf
    levels[3] = np.arange(700) // 100
    levels[4] = 0.0
    levels[4, 660] = 1.0
    expected = [distributions.ranked_ids(list(row), k=k) for row in levels]
    # Row i of the hidden states picks logits i; its bias is none, so the weight is the logits.
    picked = torch.from_numpy(np.nan_to_num(levels, neginf=-1e300))
    head = Head(weight=picked.T.contiguous(), temperature=1.0, vocab=700)
    own = torch.zeros(6, dtype=torch.int64)
    found = score_tables(torch.eye(6, dtype=torch.float64), head, TableRequest(own_ids=own, top_k=k))
    assert found.support_ids is not None
    assert found.support_ids.tolist() == expected


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_model_against_itself_has_no_divergence_and_no_gradient(alpha: float) -> None:
    """Exactly 0, in float32 too: both sides are rounded alike."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(300, 8, generator=generator)
    head = Head(weight=weight.requires_grad_(), temperature=0.9, vocab=290)
    teacher = TeacherStates(hidden=hidden, head=head)
    request = TableRequest(own_ids=torch.zeros(9, dtype=torch.int64), teacher=teacher, full=FullDivergence(alpha=alpha))
    found = tables(hidden, head, request)
    assert found.divergence is not None
    assert not found.divergence.any()
    found.divergence.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_whole_divergence_is_at_least_that_of_the_tables(alpha: float) -> None:
    """Merging ids into a tail loses information; a clip loses more, but never below 0."""
    case = Case(vocab=150, padded=150, top_k=5, tokens=40, full=FullDivergence(alpha=alpha)).filled()
    found = score_tables(case.tensor("hidden"), case.head(), case.request())
    assert found.support_logp is not None
    assert found.teacher_logp is not None
    assert found.divergence is not None
    assert (found.divergence >= bucket_divergence(found.support_logp, found.teacher_logp, alpha=alpha) - 1e-12).all()
    clipped = replace(case, full=FullDivergence(alpha=alpha, entry_clip=0.01))
    less = score_tables(case.tensor("hidden"), case.head(), clipped.request()).divergence
    assert less is not None
    assert (less <= found.divergence).all()
    assert less.sum() < found.divergence.sum()
    assert (less > 0).all()


def test_a_gradient_that_comes_in_for_an_empty_cell_goes_nowhere() -> None:
    """The slope of x^2 at -inf is -inf; nothing of it reaches the hidden states."""
    case = Case(support=[[2, -1], [0, 1]], tokens=2).filled()
    head, hidden = case.head(), case.tensor("hidden").requires_grad_()
    found = tables(hidden, head, case.request()).support_logp
    assert found is not None
    squared = found.square().masked_fill(found == -torch.inf, 0.0).sum()
    expected = torch.autograd.grad(squared, hidden, retain_graph=True)[0]
    for loss in (found.square().sum(), (found.square() * torch.tensor([[1.0, torch.nan, 1.0], [1.0, 1.0, 1.0]])).sum()):
        assert torch.equal(torch.autograd.grad(loss, hidden, retain_graph=True)[0], expected)
