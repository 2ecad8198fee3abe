"""Fused head at its limits: memory and products, dtypes, extremes, poison, frozen parts, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdpo_core.errors import DataError
from sdpo_core.objectives import chunk_reader, chunks
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, TeacherStates
from tests.sdpo_core.objectives.fused_cases import Case
from tests.sdpo_core.objectives.tensors import double, gradient

FULL = FullDivergence(alpha=0.5)
TABLES = Case(top_k=3, has_teacher=True, has_entropy=True, tokens=60, vocab=500, padded=512, width=7)
WHOLE = replace(TABLES, full=FULL)
GIVEN = replace(TABLES, top_k=0, support=[[3, 1, 400]] * 60)


class Watch(TorchDispatchMode):
    """The largest tensor that comes out of an operation, and the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        if "mm" in str(func):
            first, second = [value for value in args if isinstance(value, Tensor)][-2:]
            self.products += first.shape[0] * first.shape[1] * second.shape[1]
        return result


def run_tables(case: Case, head: Head, hidden: Tensor) -> None:
    case.loss(tables(hidden, head, case.request(dtype=hidden.dtype)), slice(None)).backward()


def run_fused(case: Case, head: Head, hidden: Tensor) -> None:
    gradient = torch.zeros_like(head.weight) if head.weight.requires_grad else None
    loss_and_gradient(hidden, head, case.request(dtype=hidden.dtype), case.loss, weight_gradient=gradient)


def run_score(case: Case, head: Head, hidden: Tensor) -> None:
    score_tables(hidden, head, case.request(dtype=hidden.dtype))


@pytest.mark.parametrize(
    ("run", "case", "is_frozen", "student", "teacher"),
    [
        (run_score, TABLES, False, 1, 1),
        (run_fused, TABLES, False, 3, 1),
        (run_fused, TABLES, True, 2, 1),
        (run_fused, GIVEN, False, 3, 1),
        (run_fused, WHOLE, False, 3, 1),
        (run_tables, TABLES, False, 4, 1),
        (run_tables, TABLES, True, 3, 1),
        (run_tables, GIVEN, False, 4, 1),
        (run_tables, WHOLE, False, 4, 2),
    ],
)
def test_products_are_as_few_as_promised_and_no_tensor_has_all_tokens_and_ids(
    run: Callable[[Case, Head, Tensor], None],
    case: Case,
    is_frozen: bool,
    student: int,
    teacher: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of [tokens, width] with the head, counted in multiplications; the largest tensor is a chunk of eight."""
    monkeypatch.setattr(chunk_reader, "CHUNK_NUMBERS", 8 * chunks.spare_width(512))
    monkeypatch.setattr(chunk_reader, "TILE_COLUMNS", 64)
    monkeypatch.setattr(chunk_reader, "TILE_ROWS", 16)
    filled = case.filled()
    head, hidden = filled.head(), filled.tensor("hidden").requires_grad_()
    head.weight.requires_grad_(not is_frozen)
    with Watch() as watch:
        run(filled, head, hidden)
    # The teacher's hidden states are one wider.
    assert watch.products == 60 * 500 * (student * 7 + teacher * 8)
    assert watch.largest <= 8 * chunks.spare_width(512)


def test_float32_is_within_2e_5_of_float64() -> None:
    """Values in nats, gradients relative to their largest; 20,000 ids, logits of up to 40."""
    errors = {}
    for form in (run_tables, run_fused):
        results = {}
        for dtype in (torch.float32, torch.float64):
            case = Case(
                tokens=48, vocab=20_000, padded=20_032, width=32, top_k=20, has_entropy=True, full=FULL, spread=1.5
            ).filled()
            for name in ("hidden", "weight", "teacher_hidden", "teacher_weight"):
                case.numbers[name] = case.numbers[name].astype("float32").astype("float64")
            hidden, head = case.tensor("hidden", dtype=dtype).requires_grad_(), case.head(dtype=dtype)
            small = score_tables(hidden, head, case.request(dtype=dtype))
            if form is run_tables:
                run_tables(case, head, hidden)
            else:
                head.weight.grad = torch.zeros_like(head.weight)
                hidden.grad = loss_and_gradient(
                    hidden, head, case.request(dtype=dtype), case.loss, weight_gradient=head.weight.grad
                ).hidden_gradient
            results[dtype] = (small, hidden.grad, head.weight.grad)
        (low, *low_slopes), (high, *high_slopes) = results[torch.float32], results[torch.float64]
        for name in ("logp", "support_logp", "teacher_logp", "entropy", "divergence"):
            value = getattr(low, name)
            assert value.dtype == torch.float32
            errors[name] = float((value.double() - getattr(high, name)).abs().max())
        for name, ours, theirs in zip(("hidden", "weight"), low_slopes, high_slopes, strict=True):
            assert ours is not None
            assert theirs is not None
            errors[f"{form.__name__} {name}"] = float((ours.double() - theirs).abs().max() / theirs.abs().max())
    assert max(errors.values()) < 2e-5, errors


def test_bfloat16_states_and_head_are_projected_and_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are those of the same numbers in float64; gradients are rounded once, at the end."""
    monkeypatch.setattr(chunk_reader, "CHUNK_NUMBERS", 2 * chunks.spare_width(512))
    monkeypatch.setattr(chunk_reader, "TILE_ROWS", 2)
    case = Case(tokens=300, vocab=500, padded=512, width=16, top_k=20, has_teacher=True).filled()
    for name in ("hidden", "weight", "teacher_hidden", "teacher_weight"):
        case.numbers[name] = torch.from_numpy(case.numbers[name]).bfloat16().double().numpy()
    exact_hidden, exact_head = case.tensor("hidden").requires_grad_(), case.head()
    exact = tables(exact_hidden, exact_head, case.request())
    case.loss(exact, slice(None)).backward()
    hidden, head = case.tensor("hidden", dtype=torch.bfloat16).requires_grad_(), case.head(dtype=torch.bfloat16)
    request = case.request(dtype=torch.bfloat16)
    found = tables(hidden, head, request)
    assert found.support_logp is not None
    assert exact.support_logp is not None
    assert found.support_logp.dtype == torch.float32
    assert (found.support_logp - exact.support_logp).abs().max() < 2e-5
    case.loss(found, slice(None)).backward()
    weight_gradient = torch.zeros_like(head.weight)
    fused = loss_and_gradient(hidden, head, request, case.loss, weight_gradient=weight_gradient)
    for ours, theirs in (
        (hidden.grad, exact_hidden.grad),
        (head.weight.grad, exact_head.weight.grad),
        (fused.hidden_gradient, exact_hidden.grad),
        (weight_gradient, exact_head.weight.grad),
    ):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == torch.bfloat16
        # Half an ulp of bfloat16 is up to 2^-8 of the number; the rest is float32's.
        assert ((ours.double() - theirs).abs() <= 2**-8 * theirs.abs() + 1e-4).all()


def table_of(logits: list[list[float]], ids: list[list[int]], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tables where the logits are the head and the hidden state a one, so that they are exact."""
    rows = []
    for row, kept in zip(logits, ids, strict=True):
        head = Head(weight=torch.tensor(row, dtype=dtype)[:, None], temperature=1.0, vocab=len(row))
        request = TableRequest(own_ids=torch.tensor([0]), support_ids=torch.tensor([kept]))
        found = score_tables(torch.ones(1, 1, dtype=dtype), head, request).support_logp
        assert found is not None
        rows.append(found)
    return torch.cat(rows)


def test_logits_of_1e4_are_exact() -> None:
    found = table_of([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]], [[0], [1]])
    assert found[0].tolist() == [0.0, -1e4]
    assert found[1].tolist() == pytest.approx([-math.log(3), math.log(2 / 3)], abs=1e-6)


def test_a_common_offset_of_1e4_costs_nothing() -> None:
    """The normaliser of logits at 1e4 has an ulp of 1e-3 in float32; what is left after it is taken off must not."""
    # Multiples of 2^-10 below 2^14, so that the logits themselves are exact in float32.
    weight = torch.tensor([[1.0], [0.5], [0.25], [-1.0]])
    found = []
    for offset in (0.0, 1e4):
        bias = torch.full((4,), offset)
        head = Head(weight=weight, bias=bias, temperature=1.0, vocab=4)
        teacher = TeacherStates(hidden=torch.full((1, 1), 2.0), head=head)
        request = TableRequest(
            own_ids=torch.tensor([3]), support_ids=torch.tensor([[0]]), entropy=True, teacher=teacher, full=FULL
        )
        hidden = torch.ones(1, 1, requires_grad=True)
        small = tables(hidden, head, request)
        parts = [small.logp, small.support_logp, small.entropy, small.divergence]
        values = torch.cat([part.flatten() for part in parts if part is not None])
        found.append(values)
        found.append(torch.cat([gradient(value, at=hidden)[0] for value in values]))
    # 1e-6: a few ulps of numbers of size 4.
    assert torch.allclose(found[0], found[2], rtol=0.0, atol=1e-6)
    assert torch.allclose(found[1], found[3], rtol=0.0, atol=1e-6)


def test_a_tail_far_below_float32_resolution_is_kept_with_its_gradient() -> None:
    """Tail of 8e-18: 1 - mass is 0 in float32, so a tail of log(1 - mass) would be -inf or a clamp."""
    weight = torch.tensor([[0.0], [-40.0], [-40.0]], requires_grad=True)
    request = TableRequest(own_ids=torch.tensor([0]), support_ids=torch.tensor([[0]]))
    head = Head(weight=weight, temperature=1.0, vocab=3)
    found = tables(torch.ones(1, 1), head, request).support_logp
    assert found is not None
    # 4e-6: the ulp of float32 at 40.
    assert found[0, 1].item() == pytest.approx(math.log(2) - 40, abs=4e-6)
    assert gradient(found[0, 1], at=weight)[:, 0].tolist() == pytest.approx([-1.0, 0.5, 0.5], rel=4e-6)


def test_excluded_columns_leave_an_empty_tail_and_finite_gradients() -> None:
    """A bias of -inf takes an id out: with the two others in the support nothing is left."""
    bias = double([0.0, 0.0, -math.inf, -math.inf])
    weight = double([[1.0], [0.0], [3.0], [4.0]], requires_grad=True)
    request = TableRequest(own_ids=torch.tensor([1]), support_ids=torch.tensor([[0, 1]]), entropy=True)
    found = tables(double([[1.0]]), Head(weight=weight, bias=bias, temperature=1.0, vocab=4), request)
    assert found.support_logp is not None
    assert found.entropy is not None
    assert found.support_logp[0, -1] == -torch.inf
    # 1 / (1 + e) = 0.26894: the first slope is 1 - p_0, the second -p_1; the entropy's is p_0 p_1 (z_1 - z_0).
    assert gradient(found.support_logp[0, 0], at=weight)[:, 0].tolist() == pytest.approx(
        [0.2689414213699951, -0.2689414213699951, 0.0, 0.0], abs=1e-15
    )
    slope = 0.2689414213699951 * (1 - 0.2689414213699951)
    assert gradient(found.entropy, at=weight)[:, 0].tolist() == pytest.approx([-slope, slope, 0.0, 0.0], abs=1e-15)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_a_row_stays_in_that_row_but_for_the_heads_gradient(poison: float) -> None:
    case = replace(GIVEN, full=FULL).filled()
    clean = score_tables(case.tensor("hidden"), case.head(), case.request())
    case.numbers["hidden"][7, 2] = poison
    hidden, head = case.tensor("hidden").requires_grad_(), case.head()
    found = tables(hidden, head, case.request())
    others = torch.arange(60) != 7
    for name in ("logp", "support_logp", "teacher_logp", "entropy", "divergence"):
        assert torch.equal(getattr(found, name)[others], getattr(clean, name)[others])
    assert found.logp[7].isnan()
    case.loss(found, slice(None)).backward()
    assert hidden.grad is not None
    assert hidden.grad[others].isfinite().all()
    assert hidden.grad[7].isnan().all()
    assert head.weight.grad is not None
    assert head.weight.grad[:500].isnan().all()


def test_a_nan_among_logits_that_are_ranked_is_refused() -> None:
    head = Head(weight=torch.tensor([[1.0], [torch.nan]]), temperature=1.0, vocab=2)
    with pytest.raises(DataError, match="top_k: got a NaN logit"):
        score_tables(torch.ones(1, 1), head, TableRequest(own_ids=torch.tensor([0]), top_k=1))


@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_weight_changed_before_the_backward_pass_is_noticed(whose: str) -> None:
    case = WHOLE.filled()
    head, request = case.head(), case.request()
    assert request.teacher is not None
    loss = case.loss(tables(case.tensor("hidden").requires_grad_(), head, request), slice(None))
    with torch.no_grad():
        (head if whose == "student" else request.teacher.head).weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_token_gives_empty_tables_and_no_gradient() -> None:
    case = Case(tokens=0, top_k=3, has_entropy=True, full=FULL).filled()
    head = case.head()
    found = tables(case.tensor("hidden").requires_grad_(), head, case.request())
    assert found.support_logp is not None
    assert found.support_logp.shape == (0, 4)
    case.loss(found, slice(None)).backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()
    fused = loss_and_gradient(case.tensor("hidden"), head, case.request(), case.loss, weight_gradient=None)
    assert fused.loss.item() == 0.0
    assert fused.hidden_gradient.shape == (0, 3)
