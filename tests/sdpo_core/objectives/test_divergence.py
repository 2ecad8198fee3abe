"""Divergence and tail share: oracle, worked numbers, properties, extremes, poisons."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.divergence import bucket_divergence, tail_share
from sdpo_core.objectives.support import top_ids
from tests.oracles import distributions
from tests.sdpo_core.objectives.tensors import depends, double, gradient, table_of_logits

STUDENT = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0]
TEACHER = [0.5, 2.0, 0.0, 0.5, -1.5, -2.0]
ALPHAS = [0.0, 0.25, 0.5, 0.75, 1.0]

Case = tuple[list[list[float]], list[list[float]], int]

alphas = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 0.99))


@st.composite
def logit_pairs(draw: st.DrawFn) -> Case:
    """Student rows, teacher rows and a k that fits."""
    vocab, tokens = draw(st.integers(2, 10)), draw(st.integers(1, 3))
    row = st.lists(st.floats(-8, 8), min_size=vocab, max_size=vocab)
    rows = st.lists(row, min_size=tokens, max_size=tokens)
    return draw(rows), draw(rows), draw(st.integers(1, vocab))


def divergence_of_logits(student: Tensor, teacher: Tensor, *, k: int, alpha: float, temperature: float = 1.0) -> Tensor:
    """The objective as an algorithm composes it: student's support, both tables, divergence."""
    ids = top_ids(student, k=k)
    return bucket_divergence(
        table_of_logits(student, ids, temperature=temperature),
        table_of_logits(teacher, ids, temperature=temperature),
        alpha=alpha,
    )


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (6, [0.521853, 0.095829, 0.128635, 0.099861, 0.573187]),
        (3, [0.510855, 0.093897, 0.126196, 0.098116, 0.564245]),
        (2, [0.492449, 0.090471, 0.121648, 0.094708, 0.546027]),
    ],
)
def test_bucket_divergence_has_the_published_values(k: int, expected: list[float]) -> None:
    """Vocabulary of 6: the whole of it, K = 3 and K = 2 with the tail, at alpha 0, .25, .5, .75, 1."""
    values = [divergence_of_logits(double([STUDENT]), double([TEACHER]), k=k, alpha=alpha).item() for alpha in ALPHAS]
    # 5e-7: the values are printed with six decimals.
    assert values == pytest.approx(expected, abs=5.1e-7)


@pytest.mark.parametrize(
    ("k", "alpha", "expected"),
    [
        (6, 0.5, [0.097519, -0.083516, 0.003618, -0.017547, 0.000807, -0.000881]),
        (6, 1.0, [0.462963, -0.342210, -0.021044, -0.088183, -0.004696, -0.006831]),
        (3, 0.5, [0.098267, -0.083241, 0.003785, -0.012514, -0.004604, -0.001694]),
    ],
)
def test_bucket_divergence_has_the_published_gradients(k: int, alpha: float, expected: list[float]) -> None:
    student = double([STUDENT], requires_grad=True)
    slope = gradient(divergence_of_logits(student, double([TEACHER]), k=k, alpha=alpha), at=student)
    assert slope[0].tolist() == pytest.approx(expected, abs=5.1e-7)


def test_bucket_divergence_of_a_hand_worked_row() -> None:
    """p = (1/2, 1/2), q = (3/4, 1/4).

    KL(q||p) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.304099 - 0.173287 = 0.130812
    KL(p||q) = 1/2 ln(2/3) + 1/2 ln 2 = -0.202733 + 0.346574 = 0.143841
    alpha 1/2, m = (5/8, 3/8): KL(p||m) = 1/2 ln(4/5) + 1/2 ln(4/3) = -0.111572 + 0.143841 = 0.032269
                               KL(q||m) = 3/4 ln(6/5) + 1/4 ln(2/3) = 0.136741 - 0.101366 = 0.035375
                               half of the sum: 0.033822
    """
    student, teacher = double([[0.5, 0.5]]).log(), double([[0.75, 0.25]]).log()
    assert bucket_divergence(student, teacher, alpha=0.0).item() == pytest.approx(0.130812, abs=1e-6)
    assert bucket_divergence(student, teacher, alpha=1.0).item() == pytest.approx(0.143841, abs=1e-6)
    assert bucket_divergence(student, teacher, alpha=0.5).item() == pytest.approx(0.033822, abs=1e-6)


@given(logit_pairs(), alphas, st.sampled_from([0.5, 1.0, 1.3]))
@settings(max_examples=80, deadline=None)
def test_bucket_divergence_is_the_oracles_in_value_and_gradient(case: Case, alpha: float, temperature: float) -> None:
    student_rows, teacher_rows, k = case
    student = double(student_rows, requires_grad=True)
    values = divergence_of_logits(student, double(teacher_rows), k=k, alpha=alpha, temperature=temperature)
    slope = gradient(values, at=student)
    for row, (ours, theirs) in enumerate(zip(student_rows, teacher_rows, strict=True)):
        ids = distributions.ranked_ids(ours, k=k)
        p, q = (
            distributions.cell_masses(distributions.softmax(logits, temperature=temperature), ids)
            for logits in (ours, theirs)
        )
        # Log-ratios reach 32 and carry errors of 1e-14 into each term, whose masses sum to 1; the gradient at
        # alpha 0 is exact to the masses.
        assert values[row].item() == pytest.approx(distributions.divergence(p, q, alpha=alpha), abs=5e-14)
        expected = distributions.divergence_gradient(ours, theirs, ids, alpha=alpha, temperature=temperature)
        assert slope[row].tolist() == pytest.approx(expected, abs=2e-13)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_bucket_divergence_gradient_is_the_slope_of_the_oracles_value(k: int, alpha: float) -> None:
    """Finite differences of the oracle, with the support held: it is chosen without gradient."""
    ids = distributions.ranked_ids(STUDENT, k=k)
    teacher = distributions.cell_masses(distributions.softmax(TEACHER, temperature=1.0), ids)

    def value(logits: list[float]) -> float:
        masses = distributions.cell_masses(distributions.softmax(logits, temperature=1.0), ids)
        return distributions.divergence(masses, teacher, alpha=alpha)

    student = double([STUDENT], requires_grad=True)
    slope = gradient(divergence_of_logits(student, double([TEACHER]), k=k, alpha=alpha), at=student)
    # 1e-9: a step of 1e-5 errs by 1e-10 from curvature and 1e-11 from rounding.
    slopes = distributions.finite_differences(value, STUDENT, step=1e-5)
    assert slope[0].tolist() == pytest.approx(slopes, abs=1e-9)


@given(logit_pairs(), alphas)
@settings(max_examples=80, deadline=None)
def test_bucket_divergence_is_not_negative_and_at_most_the_full_one(case: Case, alpha: float) -> None:
    student_rows, teacher_rows, k = case
    student, teacher = double(student_rows), double(teacher_rows)
    bucketed = divergence_of_logits(student, teacher, k=k, alpha=alpha)
    full = divergence_of_logits(student, teacher, k=student.shape[1], alpha=alpha)
    # 5e-14: rounding of log-ratios up to 32, as above.
    assert (bucketed >= -5e-14).all()
    assert (bucketed <= full + 5e-14).all()


@given(logit_pairs(), alphas)
@settings(max_examples=40, deadline=None)
def test_bucket_divergence_and_its_gradient_are_exactly_0_of_equal_rows(case: Case, alpha: float) -> None:
    student = torch.tensor(case[0], dtype=torch.float32, requires_grad=True)
    table = table_of_logits(student, top_ids(student, k=case[2]), temperature=1.0)
    values = bucket_divergence(table, table, alpha=alpha)
    assert (values == 0).all()
    slope = gradient(values, at=student)
    # alpha 1 and 0 leave p - p in two different roundings.
    assert slope.abs().max() <= 1e-7


@given(st.floats(-3, 3), st.floats(0.02, 3), alphas)
@settings(max_examples=40, deadline=None)
def test_bucket_divergence_of_different_rows_is_positive(level: float, gap: float, alpha: float) -> None:
    values = divergence_of_logits(double([[level, 0.0]]), double([[level + gap, 0.0]]), k=1, alpha=alpha)
    assert values.item() > 0


@given(logit_pairs())
@settings(max_examples=40, deadline=None)
def test_bucket_divergence_is_symmetric_at_one_half(case: Case) -> None:
    student, teacher = double(case[0]), double(case[1])
    ids = top_ids(student, k=case[2])
    first = table_of_logits(student, ids, temperature=1.0)
    second = table_of_logits(teacher, ids, temperature=1.0)
    there, back = bucket_divergence(first, second, alpha=0.5), bucket_divergence(second, first, alpha=0.5)
    assert torch.allclose(there, back, rtol=0, atol=1e-15)
    assert (there <= math.log(2) + 1e-15).all()


@given(logit_pairs(), alphas)
@settings(max_examples=40, deadline=None)
def test_bucket_divergence_gradient_sums_to_0_over_logits_and_spares_the_teacher(case: Case, alpha: float) -> None:
    student, teacher = double(case[0], requires_grad=True), double(case[1], requires_grad=True)
    values = divergence_of_logits(student, teacher, k=case[2], alpha=alpha)
    assert gradient(values, at=student).sum(dim=1).abs().max() <= 2e-13
    assert not depends(values, on=teacher)


@given(logit_pairs(), alphas, st.floats(0.1, 5))
@settings(max_examples=40, deadline=None)
def test_bucket_divergence_of_a_token_ignores_the_other_tokens(case: Case, alpha: float, weight: float) -> None:
    """Split into single rows and weighted, values and gradients add up to those of the whole."""
    student, teacher = double(case[0], requires_grad=True), double(case[1])
    whole = divergence_of_logits(student, teacher, k=case[2], alpha=alpha)
    whole_slope = gradient(whole * weight, at=student)
    parts, slope = [], torch.zeros_like(whole_slope)
    for row in range(len(student)):
        part = divergence_of_logits(student[row : row + 1], teacher[row : row + 1], k=case[2], alpha=alpha)
        slope += gradient(part * weight, at=student)
        parts.append(part.item())
    # A row's numbers may depend on the batch by the vector width of the kernels, not more.
    assert whole.tolist() == pytest.approx(parts, abs=1e-14)
    assert torch.allclose(whole_slope, slope, rtol=0, atol=1e-14)


def test_bucket_divergence_of_a_masked_token_leaves_no_trace() -> None:
    """Rows of NaN and -inf logits that are not selected: the same value, and gradient 0 in their place."""
    student = double([STUDENT, [math.nan] * 6, [-math.inf] * 6, TEACHER], requires_grad=True)
    teacher = double([TEACHER, [math.nan] * 6, STUDENT, STUDENT])
    is_response = torch.tensor([True, False, False, True])
    values = divergence_of_logits(student[is_response], teacher[is_response], k=3, alpha=0.5)
    assert torch.equal(
        values.detach(), divergence_of_logits(double([STUDENT, TEACHER]), double([TEACHER, STUDENT]), k=3, alpha=0.5)
    )
    slope = gradient(values, at=student)
    assert torch.isfinite(slope).all()
    assert (slope[1:3] == 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_bucket_divergence_of_cells_empty_on_both_sides_is_that_without_them(alpha: float) -> None:
    p, q = double([[0.6, 0.4]]).log(), double([[0.3, 0.7]]).log()
    empty = double([[-math.inf]])
    student = torch.cat([p, empty], dim=1).requires_grad_()
    values = bucket_divergence(student, torch.cat([q, empty], dim=1), alpha=alpha)
    assert torch.equal(values.detach(), bucket_divergence(p, q, alpha=alpha))
    slope = gradient(values, at=student)
    assert slope[0, 2] == 0
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_bucket_divergence_between_the_ends_is_finite_of_a_cell_empty_on_one_side(alpha: float) -> None:
    """p = (1, 0), q = (0, 1): both KLs to m are logarithms of the weights, ln 2 at one half."""
    student = double([[0.0, -math.inf]], requires_grad=True)
    values = bucket_divergence(student, double([[-math.inf, 0.0]]), alpha=alpha)
    expected = -(1 - alpha) * math.log(1 - alpha) - alpha * math.log(alpha)
    assert values.item() == pytest.approx(expected, abs=1e-15)
    slope = gradient(values, at=student)
    # (1 - alpha) p log(p/m) = -(1 - alpha) ln(1 - alpha) in the full cell, 0 in the empty one.
    assert slope[0].tolist() == pytest.approx([-(1 - alpha) * math.log(1 - alpha), 0.0], abs=1e-15)


def test_bucket_divergence_at_the_ends_weighs_a_cell_that_only_the_other_side_leaves_empty() -> None:
    """KL(p||q) of p = (1, 0), q = (1/4, 3/4) is ln 4; so is KL(q||p) with the sides exchanged."""
    narrow, wide = double([[0.0, -math.inf]]), double([[0.25, 0.75]]).log()
    student = narrow.clone().requires_grad_()
    values = bucket_divergence(student, wide, alpha=1.0)
    assert values.item() == pytest.approx(math.log(4), abs=1e-15)
    slope = gradient(values, at=student)
    assert torch.isfinite(slope).all()
    assert bucket_divergence(wide, narrow, alpha=0.0).item() == pytest.approx(math.log(4), abs=1e-15)


@pytest.mark.parametrize(("alpha", "empty_side"), [(0.0, "student"), (1.0, "teacher")])
def test_bucket_divergence_refuses_an_infinite_kl(alpha: float, empty_side: str) -> None:
    narrow, wide = double([[0.5, 0.5], [0.0, -math.inf]]), double([[0.5, 0.5], [0.25, 0.75]]).log()
    narrow[0] = wide[0]
    student, teacher = (narrow, wide) if empty_side == "student" else (wide, narrow)
    with pytest.raises(DataError, match=r"infinite KL at alpha .* in row 1, cell 1"):
        bucket_divergence(student, teacher, alpha=alpha)


def test_bucket_divergence_of_the_whole_vocabulary_has_no_tail_term() -> None:
    student = double([STUDENT], requires_grad=True)
    ids = torch.arange(6)[None]
    ours = table_of_logits(student, ids, temperature=1.0)
    theirs = table_of_logits(double([TEACHER]), ids, temperature=1.0)
    for alpha in ALPHAS:
        assert tail_share(ours, theirs, alpha=alpha).tail == 0
        assert torch.isfinite(gradient(bucket_divergence(ours, theirs, alpha=alpha), at=student)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_bucket_divergence_of_logits_of_1e4_is_finite(alpha: float, dtype: torch.dtype) -> None:
    """The student is certain of the token the teacher excludes by 1e4 nats, and the other way round."""
    student = torch.tensor([[1e4, 0.0, -1e4], [0.0, 1e4, 1e4]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[0.0, 1e4, -1e4], [1e4, 0.0, -1e4]], dtype=dtype)
    values = divergence_of_logits(student, teacher, k=2, alpha=alpha)
    # Row 0: disjoint; an end KL is 1e4, between the ends the entropy of (alpha, 1 - alpha).
    expected = 1e4 if alpha in (0.0, 1.0) else -(1 - alpha) * math.log(1 - alpha) - alpha * math.log(alpha)
    assert values[0].item() == pytest.approx(expected, rel=1e-6)
    slope = gradient(values, at=student)
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_bucket_divergence_in_float32_is_close_to_float64_where_rows_nearly_agree(alpha: float) -> None:
    """Divergences of 2e-9: a plain float32 sum of p log(p/q) errs by the rounding of the normalisers, 2e-7."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(64, 200, generator=generator)
    teacher = student + 1e-4 * torch.randn(64, 200, generator=generator)
    low = divergence_of_logits(student, teacher, k=20, alpha=alpha)
    high = divergence_of_logits(student.double(), teacher.double(), k=20, alpha=alpha)
    # Log-ratios of 1e-4 carry the 3e-7 of two float32 logarithms: 0.3 % of a divergence, a few times over.
    assert torch.allclose(low.double(), high, rtol=0.01, atol=0)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_bucket_divergence_refuses_an_alpha_outside_0_to_1(alpha: float) -> None:
    with pytest.raises(SpecError, match="got alpha"):
        bucket_divergence(double([[0.0]]), double([[0.0]]), alpha=alpha)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize(("row", "words"), [([math.nan, 0.0], "mass nan"), ([-1.0, -1.0], "mass 0.7357")])
def test_bucket_divergence_refuses_a_row_that_is_no_distribution(side: str, row: list[float], words: str) -> None:
    good = double([[0.5, 0.5], [0.5, 0.5]]).log()
    bad = good.clone()
    bad[1] = double(row)
    student, teacher = (bad, good) if side == "student" else (good, bad)
    with pytest.raises(DataError, match=f"{words}.* in {side} row 1"):
        bucket_divergence(student, teacher, alpha=0.5)


def test_bucket_divergence_of_no_token_is_empty() -> None:
    nothing = torch.zeros(0, 3)
    assert bucket_divergence(nothing, nothing, alpha=0.5).shape == (0,)
    assert tail_share(nothing, nothing, alpha=0.5).total == 0


@given(logit_pairs(), alphas)
@settings(max_examples=60, deadline=None)
def test_tail_share_is_the_oracles_and_its_total_is_the_divergence(case: Case, alpha: float) -> None:
    student_rows, teacher_rows, k = case
    ids = top_ids(double(student_rows), k=k)
    ours = table_of_logits(double(student_rows), ids, temperature=1.0)
    theirs = table_of_logits(double(teacher_rows), ids, temperature=1.0)
    sums = tail_share(ours, theirs, alpha=alpha)
    rows = []
    for first, second in zip(student_rows, teacher_rows, strict=True):
        kept = distributions.ranked_ids(first, k=k)
        p, q = (distributions.cell_masses(distributions.softmax(z, temperature=1.0), kept) for z in (first, second))
        rows.append(distributions.bregman_terms(p, q, alpha=alpha))
    assert sums.tail.item() == pytest.approx(math.fsum(row[-1] for row in rows), abs=5e-14)
    assert sums.total.item() == pytest.approx(math.fsum(map(math.fsum, rows)), abs=2e-13)
    assert sums.total.item() == pytest.approx(bucket_divergence(ours, theirs, alpha=alpha).sum().item(), abs=2e-13)
    assert 0 <= sums.tail <= sums.total


def test_tail_share_of_a_hand_worked_row() -> None:
    """p = (1/2, 1/2), q = (3/4, 1/4), alpha 1: cells p ln(p/q) - p + q.

    Support: 1/2 ln(2/3) - 1/2 + 3/4 = -0.202733 + 0.25 = 0.047267; tail: 1/2 ln 2 - 1/2 + 1/4 = 0.096574.
    Total 0.143841 = KL(p||q); share 0.096574 / 0.143841 = 0.671392. The plain cells -0.2027 and 0.3466 have no share.
    """
    sums = tail_share(double([[0.5, 0.5]]).log(), double([[0.75, 0.25]]).log(), alpha=1.0)
    assert sums.total.item() == pytest.approx(0.143841, abs=1e-6)
    assert (sums.tail / sums.total).item() == pytest.approx(0.671392, abs=5e-6)


def test_tail_share_of_micro_batches_adds_up_and_has_no_gradient() -> None:
    student = double([STUDENT, TEACHER, STUDENT[::-1]], requires_grad=True)
    ids = torch.tensor([[0, 1]] * 3)
    ours = table_of_logits(student, ids, temperature=1.0)
    theirs = table_of_logits(double([TEACHER, STUDENT, TEACHER]), ids, temperature=1.0)
    whole = tail_share(ours, theirs, alpha=0.5)
    first, rest = tail_share(ours[:1], theirs[:1], alpha=0.5), tail_share(ours[1:], theirs[1:], alpha=0.5)
    assert (first.tail + rest.tail).item() == pytest.approx(whole.tail.item(), abs=1e-15)
    assert (first.total + rest.total).item() == pytest.approx(whole.total.item(), abs=1e-15)
    assert not whole.total.requires_grad


@pytest.mark.parametrize("alpha", ALPHAS)
def test_tail_share_of_equal_rows_has_nothing_to_share(alpha: float) -> None:
    table = double([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    assert tail_share(table, table, alpha=alpha).total == 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_tail_share_of_rows_that_agree_to_rounding_is_a_share(alpha: float) -> None:
    """Cells of 1e-19 whose rounding, 1e-17, has either sign."""
    student = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([[0, 1]] * 30)
    ours = table_of_logits(student, ids, temperature=1.0)
    theirs = table_of_logits(student + 1e-9 * student.flip(0), ids, temperature=1.0)
    for row in range(30):
        sums = tail_share(ours[row : row + 1], theirs[row : row + 1], alpha=alpha)
        assert 0 <= sums.tail <= sums.total
