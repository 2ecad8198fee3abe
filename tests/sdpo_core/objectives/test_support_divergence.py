"""Divergence by truncation with its clips, and the overlap: oracle, worked rows, properties, poisons, precision."""

import math
import random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.algorithm_specs import Truncation
from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.divergence import bucket_divergence, support_divergence, token_clip_weight, topk_overlap
from tests.oracles import distributions
from tests.sdpo_core.objectives.tensors import depends, double, gradient, relative_error

TRUNCATIONS: tuple[Truncation, ...] = get_args(Truncation)
ALPHAS = [0.0, 0.25, 0.5, 0.9, 1.0]

alphas = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.01, 0.99))
truncations = st.sampled_from(TRUNCATIONS)
clips = st.one_of(st.none(), st.floats(1e-3, 1))

Pair = tuple[list[float], list[float]]


@st.composite
def mass_pairs(draw: st.DrawFn) -> Pair:
    """Masses of a student's and a teacher's row: ids, then tail."""
    cells = draw(st.integers(2, 8))
    row = st.lists(st.floats(-8, 8), min_size=cells, max_size=cells)
    student, teacher = (distributions.softmax(draw(row), temperature=1.0) for _ in range(2))
    return student, teacher


def rows(*masses: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """The table of some rows of masses, a leaf that takes a gradient."""
    return torch.tensor(masses, dtype=dtype).log().requires_grad_()


def test_support_divergence_of_a_hand_worked_row() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), the last the tail.

    Renormalised: p = (2/3, 1/3), q = (1/2, 1/2); KL(p||q) = 2/3 ln(4/3) + 1/3 ln(2/3) = 0.191788 - 0.135155 = 0.056633.
    Bregman, alpha 1: 1/2 ln 2 - 1/2 + 1/4 = 0.096574, and 0 for the equal second id; alpha 0: 1/4 ln(1/2) + 1/2 - 1/4
    = 0.076713.
    Bregman, alpha 1/2, m = 3/8: 1/4 ln(4/3) + 1/8 ln(2/3) = 0.071921 - 0.050683 = 0.021237.
    Tail, alpha 1: 1/2 ln 2 + 1/4 ln(1/2) = 0.173287.
    """
    student, teacher = rows([0.5, 0.25, 0.25]), rows([0.25, 0.25, 0.5])

    def value(alpha: float, truncation: Truncation) -> float:
        return support_divergence(student, teacher, alpha=alpha, truncation=truncation).item()

    assert value(1.0, "renormalised") == pytest.approx(0.056633, abs=1e-6)
    assert value(1.0, "bregman") == pytest.approx(0.096574, abs=1e-6)
    assert value(0.0, "bregman") == pytest.approx(0.076713, abs=1e-6)
    assert value(0.5, "bregman") == pytest.approx(0.021237, abs=1e-6)
    assert value(1.0, "tail") == pytest.approx(0.173287, abs=1e-6)


def test_support_divergence_renormalised_has_the_published_values() -> None:
    """Vocabulary of 6, K = 3, at alpha 0, .25, .5, .75, 1."""
    student, teacher = (
        distributions.softmax(logits, temperature=1.0)
        for logits in ([2.0, 1.0, 0.5, 0.0, -1.0, -2.0], [0.5, 2.0, 0.0, 0.5, -1.5, -2.0])
    )
    tables = [rows(distributions.cell_masses(masses, [0, 1, 2])) for masses in (student, teacher)]
    values = [
        support_divergence(*tables, alpha=alpha, truncation="renormalised").item() for alpha in (0, 0.25, 0.5, 0.75, 1)
    ]
    # 5e-7: printed with six decimals.
    assert values == pytest.approx([0.597949, 0.108183, 0.143504, 0.110147, 0.623683], abs=5.1e-7)


@given(mass_pairs(), alphas, truncations, clips)
@settings(max_examples=150, deadline=None)
def test_support_divergence_is_the_oracles_in_value_and_gradient(
    pair: Pair, alpha: float, truncation: Truncation, clip: float | None
) -> None:
    student, teacher = rows(pair[0]), rows(pair[1])
    values = support_divergence(student, teacher, alpha=alpha, truncation=truncation, entry_clip=clip)
    expected = distributions.support_divergence(*pair, alpha=alpha, truncation=truncation, entry_clip=clip)
    # 5e-14: log-ratios reach 16 and carry errors of 1e-14 into terms whose masses sum to at most 1.
    assert values.item() == pytest.approx(expected, abs=5e-14)
    slopes = distributions.support_divergence_gradient(*pair, alpha=alpha, truncation=truncation, entry_clip=clip)
    assert gradient(values, at=student)[0].tolist() == pytest.approx(slopes, abs=5e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_support_divergence_gradient_is_the_slope_of_the_oracles_value(
    alpha: float, truncation: Truncation, clip: float | None
) -> None:
    """The cells' log-masses as free variables, each moved on its own."""
    at, teacher = [math.log(mass) for mass in (0.5, 0.2, 0.2, 0.1)], [0.1, 0.25, 0.05, 0.6]

    def value(logs: list[float]) -> float:
        masses = [math.exp(log) for log in logs]
        return distributions.support_divergence(masses, teacher, alpha=alpha, truncation=truncation, entry_clip=clip)

    student = double([at], requires_grad=True)
    values = support_divergence(student, rows(teacher), alpha=alpha, truncation=truncation, entry_clip=clip)
    # 1e-9: a step of 1e-5 errs by 1e-10 from curvature and 1e-11 from rounding.
    slopes = distributions.finite_differences(value, at, step=1e-5)
    assert gradient(values, at=student)[0].tolist() == pytest.approx(slopes, abs=1e-9)


@given(mass_pairs(), alphas)
@settings(max_examples=60, deadline=None)
def test_support_divergence_with_the_tail_is_the_plain_divergence(pair: Pair, alpha: float) -> None:
    whole = support_divergence(rows(pair[0]), rows(pair[1]), alpha=alpha, truncation="tail")
    assert whole.item() == pytest.approx(distributions.divergence(*pair, alpha=alpha), abs=5e-14)
    assert torch.equal(whole, bucket_divergence(rows(pair[0]), rows(pair[1]), alpha=alpha))


@given(mass_pairs(), alphas)
@settings(max_examples=60, deadline=None)
def test_support_divergence_renormalised_is_the_plain_divergence_within_the_ids(pair: Pair, alpha: float) -> None:
    p, q = (distributions.kept_masses(masses, truncation="renormalised") for masses in pair)
    values = support_divergence(rows(pair[0]), rows(pair[1]), alpha=alpha, truncation="renormalised")
    assert values.item() == pytest.approx(distributions.divergence(p, q, alpha=alpha), abs=5e-14)


@given(mass_pairs(), alphas)
@settings(max_examples=80, deadline=None)
def test_support_divergence_is_ordered_by_what_it_sees(pair: Pair, alpha: float) -> None:
    """0 <= Bregman <= tail <= the divergence of the tail's tokens one by one, here two equal halves and 1 : 3."""
    student, teacher = rows(pair[0]), rows(pair[1])
    cut = support_divergence(student, teacher, alpha=alpha, truncation="bregman").item()
    whole = support_divergence(student, teacher, alpha=alpha, truncation="tail").item()
    p, q = (
        [*masses[:-1], share * masses[-1], (1 - share) * masses[-1]]
        for masses, share in zip(pair, (0.5, 0.25), strict=True)
    )
    full = bucket_divergence(rows(p), rows(q), alpha=alpha).item()
    # 5e-14: rounding, as against the oracle.
    assert -5e-14 <= cut <= whole + 5e-14
    assert whole <= full + 5e-14
    assert support_divergence(student, teacher, alpha=alpha, truncation="renormalised").item() >= -5e-14


@given(mass_pairs(), alphas, truncations, st.floats(1e-3, 1))
@settings(max_examples=80, deadline=None)
def test_support_divergence_clipped_is_bounded_and_a_high_clip_changes_nothing(
    pair: Pair, alpha: float, truncation: Truncation, clip: float
) -> None:
    student, teacher = rows(pair[0]), rows(pair[1])
    free = support_divergence(student, teacher, alpha=alpha, truncation=truncation).item()
    held = support_divergence(student, teacher, alpha=alpha, truncation=truncation, entry_clip=clip).item()
    assert -5e-14 <= held <= min(free, clip * len(pair[0])) + 5e-14
    assert support_divergence(student, teacher, alpha=alpha, truncation=truncation, entry_clip=20.0).item() == free


def test_support_divergence_with_a_clip_gives_a_clipped_cell_no_gradient() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), alpha 1: terms 0.0966, 0, 0.0767; clip 0.08 binds in the first.

    0.08 + 0.076713 = 0.156713; slopes p ln(p/q): 0 (clipped), 0 (equal), 1/4 ln(1/2) = -0.173287.
    """
    student = rows([0.5, 0.25, 0.25])
    values = support_divergence(student, rows([0.25, 0.25, 0.5]), alpha=1.0, truncation="tail", entry_clip=0.08)
    assert values.item() == pytest.approx(0.156713, abs=1e-6)
    assert gradient(values, at=student)[0].tolist() == pytest.approx([0.0, 0.0, -0.173287], abs=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_support_divergence_in_bregman_form_is_least_where_the_ids_agree(alpha: float) -> None:
    """Descent from another point ends at p = q on the ids; the plain terms p log(p/q) would end at p = q/e."""
    teacher = rows([0.3, 0.2, 0.1, 0.4])
    free = double([math.log(mass) for mass in (0.1, 0.4, 0.2, 0.3)], requires_grad=True)
    # Between the ends the curvature is that of the ends times alpha (1 - alpha).
    rate = 1.0 if alpha in (0.0, 1.0) else 1.0 / (alpha * (1.0 - alpha))
    for _ in range(500):
        slope = gradient(
            support_divergence(free.log_softmax(0)[None], teacher, alpha=alpha, truncation="bregman"), at=free
        )
        with torch.no_grad():
            free -= rate * slope
    assert free.softmax(0).tolist() == pytest.approx([0.3, 0.2, 0.1, 0.4], abs=1e-6)


@given(mass_pairs(), alphas, truncations, clips, st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_support_divergence_ignores_the_padding_of_a_ragged_row(
    pair: Pair, alpha: float, truncation: Truncation, clip: float | None, padding: int
) -> None:
    """Cells of -inf on both sides before the tail, made of NaN: value and gradients are those without them."""

    def padded(masses: list[float]) -> tuple[Tensor, Tensor]:
        raw = rows([*masses[:-1], *[math.nan] * padding, masses[-1]])
        return raw, torch.where(raw.isnan(), -torch.inf, raw)

    (raw, student), (_, teacher) = padded(pair[0]), padded(pair[1])
    values = support_divergence(student, teacher, alpha=alpha, truncation=truncation, entry_clip=clip)
    plain = rows(pair[0])
    expected = support_divergence(plain, rows(pair[1]), alpha=alpha, truncation=truncation, entry_clip=clip)
    # 1e-14: the sum over a longer row, of terms up to 8, may be taken in another order.
    assert values.item() == pytest.approx(expected.item(), abs=1e-14)
    slope = gradient(values, at=raw)[0].tolist()
    ids = len(pair[0]) - 1
    assert slope[ids : ids + padding] == [0.0] * padding
    assert [*slope[:ids], slope[-1]] == pytest.approx(gradient(expected, at=plain)[0].tolist(), abs=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_support_divergence_of_a_row_of_padding_alone_is_0_with_gradient_0(
    alpha: float, truncation: Truncation
) -> None:
    """No id in the support, all mass in the tail, beside an ordinary row."""
    student = double([[-math.inf, -math.inf, 0.0], [-1.0, -1.0, math.log(1 - 2 / math.e)]], requires_grad=True)
    teacher = double([[-math.inf, -math.inf, 0.0], [math.log(0.5), math.log(0.25), math.log(0.25)]])
    values = support_divergence(student, teacher, alpha=alpha, truncation=truncation)
    assert values[0] == 0
    assert values[1] > 0
    slope = gradient(values, at=student)
    assert slope[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_support_divergence_of_logits_of_1e4_is_finite(alpha: float, truncation: Truncation) -> None:
    """Log-masses down to -2e4: below the value that stands for log 0 inside."""
    student = double([[0.0, -1e4, -2e4], [-2e4, -1e4, 0.0]], requires_grad=True)
    teacher = double([[-1e4, 0.0, -2e4], [-1e4, -2e4, 0.0]])
    values = support_divergence(student, teacher, alpha=alpha, truncation=truncation)
    # The first row's sides are disjoint; in the second the ids have no mass that counts until it is renormalised.
    disjoint = 1e4 if alpha in (0.0, 1.0) else -(1 - alpha) * math.log(1 - alpha) - alpha * math.log(alpha)
    expected = [disjoint, disjoint if truncation == "renormalised" else 0.0]
    assert values.tolist() == pytest.approx(expected, rel=1e-4)
    assert torch.isfinite(gradient(values, at=student)).all()


def test_support_divergence_renormalises_masses_of_e_to_minus_20000_beside_padding() -> None:
    """p = (1/4, 3/4) of next to nothing, q = (1/2, 1/2): KL(p||q) = 1/4 ln(1/2) + 3/4 ln(3/2) = 0.130812."""
    student = double([[-2e4, -2e4 + math.log(3), -math.inf, 0.0]], requires_grad=True)
    teacher = double([[math.log(0.25), math.log(0.25), -math.inf, math.log(0.5)]])
    values = support_divergence(student, teacher, alpha=1.0, truncation="renormalised")
    assert values.item() == pytest.approx(0.130812, abs=1e-6)
    # g = p ln(p/q) = (-0.173287, 0.304099), less p times their sum: +- 0.205990.
    assert gradient(values, at=student)[0].tolist() == pytest.approx([-0.205990, 0.205990, 0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("truncation", ["renormalised", "bregman"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_support_divergence_without_the_tail_takes_any_tail(alpha: float, truncation: Truncation) -> None:
    """A tail that is empty on one side is no infinite KL where the tail is left out."""
    student, teacher = double([[0.5, 0.5, 0.0]]).log(), double([[0.25, 0.25, 0.5]]).log()
    values = support_divergence(student, teacher, alpha=alpha, truncation=truncation)
    assert math.isfinite(values.item())


def test_support_divergence_refuses_ids_that_one_side_alone_leaves_without_mass() -> None:
    void, other = double([[0.5, 0.5], [0.0, 1.0]]).log(), double([[0.5, 0.5], [0.5, 0.5]]).log()
    with pytest.raises(DataError, match="no mass on the ids of row 1 from the student"):
        support_divergence(void, other, alpha=0.5, truncation="renormalised")
    with pytest.raises(DataError, match="no mass on the ids of row 1 from the teacher"):
        support_divergence(other, void, alpha=0.5, truncation="renormalised")


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize(("alpha", "empty_side"), [(0.0, "student"), (1.0, "teacher")])
def test_support_divergence_refuses_an_infinite_kl(alpha: float, empty_side: str, truncation: Truncation) -> None:
    narrow, wide = double([[0.5, 0.0, 0.5]]).log(), double([[0.25, 0.25, 0.5]]).log()
    student, teacher = (narrow, wide) if empty_side == "student" else (wide, narrow)
    with pytest.raises(DataError, match=r"infinite KL at alpha .* in row 0, cell 1"):
        support_divergence(student, teacher, alpha=alpha, truncation=truncation)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_support_divergence_refuses_a_clip_that_is_not_positive(clip: float) -> None:
    with pytest.raises(SpecError, match="got entry_clip"):
        support_divergence(double([[0.0]]), double([[0.0]]), alpha=0.5, truncation="tail", entry_clip=clip)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_support_divergence_spares_the_teacher_and_takes_no_token(truncation: Truncation) -> None:
    student, teacher = rows([0.5, 0.5]), rows([0.25, 0.75])
    assert not depends(support_divergence(student, teacher, alpha=0.5, truncation=truncation), on=teacher)
    nothing = torch.zeros(0, 3)
    assert support_divergence(nothing, nothing, alpha=0.5, truncation=truncation).shape == (0,)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("clip", [None, 0.02])
def test_support_divergence_is_exact_to_1e_10_and_in_float32_to_2e_5(
    alpha: float, truncation: Truncation, clip: float | None
) -> None:
    """200 random rows of 2 to 50 cells: relative errors of value and gradient (norm of the row)."""
    generator = random.Random(0)
    for _ in range(200):
        cells = generator.randint(2, 50)
        pair = [
            torch.tensor(
                distributions.softmax([generator.gauss(0, 3) for _ in range(cells)], temperature=1.0),
                dtype=torch.float64,
            ).log()
            for _ in range(2)
        ]
        # The oracle starts from the very float32 numbers that both precisions are given.
        low = [side.float() for side in pair]
        masses = [[math.exp(logp) for logp in side.tolist()] for side in low]
        values, slopes = [], []
        for dtype in (torch.float64, torch.float32):
            student = low[0].to(dtype)[None].requires_grad_()
            values.append(
                support_divergence(student, low[1].to(dtype)[None], alpha=alpha, truncation=truncation, entry_clip=clip)
            )
            slopes.append(gradient(values[-1], at=student))
        value = double([distributions.support_divergence(*masses, alpha=alpha, truncation=truncation, entry_clip=clip)])
        slope = double(
            [distributions.support_divergence_gradient(*masses, alpha=alpha, truncation=truncation, entry_clip=clip)]
        )
        assert relative_error(values[0], value) <= 1e-10
        assert relative_error(slopes[0], slope) <= 1e-10
        assert relative_error(values[1], values[0]) <= 2e-5
        assert relative_error(slopes[1], slopes[0]) <= 2e-5


@given(mass_pairs(), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99)))
@settings(max_examples=80, deadline=None)
def test_bucket_divergence_is_opsds_generalised_jsd_with_its_beta(pair: Pair, beta: float) -> None:
    """OPSD writes b KL(t||M) + (1 - b) KL(s||M) with M = (1 - b) s + b t, sum t log(t/s) at 0, sum s log(s/t) at 1."""
    s, t = pair
    if beta == 0.0:
        expected = math.fsum(b * (math.log(b) - math.log(a)) for a, b in zip(s, t, strict=True))
    elif beta == 1.0:
        expected = math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(s, t, strict=True))
    else:
        mixed = [math.log((1 - beta) * a + beta * b) for a, b in zip(s, t, strict=True)]
        expected = beta * math.fsum(b * (math.log(b) - m) for b, m in zip(t, mixed, strict=True))
        expected += (1 - beta) * math.fsum(a * (math.log(a) - m) for a, m in zip(s, mixed, strict=True))
    assert bucket_divergence(rows(s), rows(t), alpha=beta).item() == pytest.approx(expected, abs=5e-14)


def test_token_clip_weight_of_hand_worked_tokens() -> None:
    """Limit 0.05: 0.2 counts a quarter, 0.05 and less in full; one of four tokens is clipped."""
    divergence = double([0.2, 0.05, 0.01, 0.0], requires_grad=True)
    weight = token_clip_weight(divergence, limit=0.05)
    assert weight.tolist() == [0.25, 1.0, 1.0, 1.0]
    assert (weight < 1).sum() == 1
    assert not weight.requires_grad


@given(mass_pairs(), alphas, st.floats(1e-3, 1))
@settings(max_examples=60, deadline=None)
def test_token_clip_weight_holds_the_loss_and_keeps_the_direction(pair: Pair, alpha: float, limit: float) -> None:
    student = rows(pair[0])
    values = bucket_divergence(student, rows(pair[1]), alpha=alpha)
    weight = token_clip_weight(values, limit=limit)
    assert (weight * values).item() == pytest.approx(min(values.item(), limit), rel=1e-14)
    free, held = gradient(values, at=student), gradient(weight * values, at=student)
    # At alpha 0 a cell gives p - q, of which each part is rounded after the weight.
    assert torch.allclose(held, weight * free, rtol=0, atol=1e-15)
    assert bool((weight < 1).item()) == (values.item() > limit)


def test_token_clip_weight_of_a_divergence_that_rounding_made_negative_is_1() -> None:
    assert token_clip_weight(double([-1e-17]), limit=0.05).tolist() == [1.0]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_token_clip_weight_refuses_a_limit_that_is_not_positive(limit: float) -> None:
    with pytest.raises(SpecError, match="got limit"):
        token_clip_weight(torch.ones(1), limit=limit)


def test_token_clip_weight_refuses_a_divergence_that_is_not_finite() -> None:
    with pytest.raises(DataError, match="got divergence nan at token 1"):
        token_clip_weight(torch.tensor([1.0, math.nan]), limit=1.0)


def test_topk_overlap_of_hand_worked_rows() -> None:
    """Three of four ids in common in another order; none; all."""
    a = torch.tensor([[5, 2, 9, 0], [1, 2, 3, 4], [7, 6, 5, 4]])
    b = torch.tensor([[0, 9, 3, 5], [5, 6, 7, 8], [4, 5, 6, 7]])
    assert topk_overlap(a, b).tolist() == [0.75, 0.0, 1.0]


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(*[st.sets(st.integers(0, 9), min_size=k, max_size=k)] * 2)))
@settings(max_examples=60, deadline=None)
def test_topk_overlap_counts_the_common_ids(sets: tuple[set[int], set[int]]) -> None:
    a, b = (torch.tensor([list(ids)]) for ids in sets)
    assert topk_overlap(a, b).item() == pytest.approx(len(sets[0] & sets[1]) / len(sets[0]), rel=1e-6)
    assert torch.equal(topk_overlap(a, b), topk_overlap(b, a))


@pytest.mark.parametrize("ids", [[[1, 1]], [[-1, 2]], [[]]])
def test_topk_overlap_refuses_what_is_no_row_of_ids(ids: list[list[int]]) -> None:
    bad = torch.tensor(ids, dtype=torch.int64)
    good = torch.arange(bad.shape[1])[None]
    with pytest.raises(DataError, match="topk_overlap: got"):
        topk_overlap(bad, good)
    with pytest.raises(DataError, match="topk_overlap: got"):
        topk_overlap(good, bad)
