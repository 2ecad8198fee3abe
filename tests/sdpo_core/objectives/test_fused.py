"""Fused head in one process: tables and gradients of both forms, padding, ties, precision, refusals."""

import pytest
import torch

from sdpo_core.objectives import chunk_reader, chunks
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from tests.sdpo_core.objectives.fused_cases import Case, agree, agree_all

SUPPORT = [[3, 0, 7], [1, -1, -1], [-1, -1, -1], [10, 9, 8], [0, 1, -1], [5, 6, 2], [4, 3, 1]]
EVERYTHING = [list(range(11))] * 7
CASES = {
    "own ids alone": Case(),
    "given support": Case(support=[[3, 0], [1, 9], [2, 4], [10, 5], [6, 7], [0, 1], [8, 3]]),
    "ragged support": Case(support=SUPPORT, has_teacher=True, has_entropy=True),
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
