"""Support and table: ids, cells, tail, padding, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.support import bucket_logps, bucket_logps_of_logits, coverage, top_ids
from tests.oracles import distributions
from tests.sdpo_core.objectives.tensors import double, gradient

STUDENT = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0]


Case = tuple[list[list[float]], int]


@st.composite
def logit_rows(draw: st.DrawFn) -> Case:
    """Rows of logits on a coarse grid, so that ties occur, and a k that fits."""
    vocab = draw(st.integers(2, 12))
    row = st.lists(st.integers(-6, 6).map(lambda level: level / 2), min_size=vocab, max_size=vocab)
    rows = draw(st.lists(row, min_size=1, max_size=4))
    return rows, draw(st.integers(1, vocab))


@given(logit_rows())
@settings(max_examples=60, deadline=None)
def test_top_ids_are_the_oracles_with_ties_to_the_lowest_id(case: Case) -> None:
    rows, k = case
    expected = [distributions.ranked_ids(row, k=k) for row in rows]
    assert top_ids(torch.tensor(rows, dtype=torch.float64), k=k).tolist() == expected


def test_top_ids_of_equal_bfloat16_logits_are_the_first_ids() -> None:
    logits = torch.zeros(2, 5000, dtype=torch.bfloat16)
    logits[1, 4000] = 1.0
    assert top_ids(logits, k=3).tolist() == [[0, 1, 2], [4000, 0, 1]]


def test_top_ids_keeps_excluded_columns_for_last() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0]])
    assert top_ids(logits, k=4).tolist() == [[3, 1, 0, 2]]


def test_top_ids_of_no_token_is_empty() -> None:
    assert top_ids(torch.zeros(0, 4), k=2).shape == (0, 2)


@pytest.mark.parametrize("k", [0, 5])
def test_top_ids_refuses_a_k_outside_the_vocabulary(k: int) -> None:
    with pytest.raises(SpecError, match=f"got k {k}, expected 1 to 4"):
        top_ids(torch.zeros(1, 4), k=k)


def test_top_ids_refuses_nan() -> None:
    with pytest.raises(DataError, match="NaN"):
        top_ids(torch.tensor([[0.0, torch.nan]]), k=1)


def test_bucket_logps_of_a_hand_worked_row() -> None:
    """Logits ln 4, ln 3, ln 2, ln 1 at T = 1: masses 4, 3, 2, 1 tenths; ids (0, 2) keep 0.4 and 0.2, the tail 0.4.

    At T = 1/2 the weights are squared: 16, 9, 4, 1 thirtieths, so 16/30, 4/30 and 10/30.
    """
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64).log()
    ids = torch.tensor([[0, 2]])
    table = bucket_logps_of_logits(logits, ids, temperature=1.0)
    assert torch.allclose(table.exp(), torch.tensor([[0.4, 0.2, 0.4]], dtype=torch.float64), atol=1e-15)
    table = bucket_logps_of_logits(logits, ids, temperature=0.5)
    assert torch.allclose(table.exp() * 30, torch.tensor([[16.0, 4.0, 10.0]], dtype=torch.float64), atol=1e-14)


@given(logit_rows(), st.sampled_from([0.25, 0.7, 1.0, 1.5]))
@settings(max_examples=60, deadline=None)
def test_bucket_logps_are_the_oracles_in_value_and_gradient(case: Case, temperature: float) -> None:
    """Each cell's log-probability and its slope (is v in the cell - p_v) / T, in float64."""
    rows, k = case
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    ids = top_ids(logits, k=k)
    table = bucket_logps_of_logits(logits, ids, temperature=temperature)
    for row, values in enumerate(rows):
        p = distributions.softmax(values, temperature=temperature)
        kept = ids[row].tolist()
        masses = distributions.cell_masses(p, kept)
        for cell, mass in enumerate(masses):
            if mass == 0:
                assert table[row, cell] == -torch.inf
                continue
            # 2e-14: logarithms down to -50 carry an ulp of 7e-15.
            assert table[row, cell].item() == pytest.approx(math.log(mass), abs=2e-14)
            slope = gradient(table[row, cell], at=logits)
            members = {kept[cell]} if cell < k else set(range(len(p))) - set(kept)
            expected = [((p[v] / mass if v in members else 0.0) - p[v]) / temperature for v in range(len(p))]
            assert slope[row].tolist() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bucket_logps_with_the_whole_vocabulary_has_an_empty_tail_and_finite_gradient(dtype: torch.dtype) -> None:
    logits = torch.tensor([STUDENT], dtype=dtype, requires_grad=True)
    table = bucket_logps_of_logits(logits, torch.arange(6)[None], temperature=1.0)
    assert table[0, -1] == -torch.inf
    assert torch.allclose(table[:, :-1], logits.log_softmax(dim=1))
    assert coverage(table).item() == 1.0
    slope = gradient(table[0, :-1], at=logits)
    expected = 1 - 6 * logits.detach().softmax(dim=1)
    assert torch.allclose(slope, expected, atol=1e-6)


def test_bucket_logps_is_finite_where_all_other_columns_are_excluded() -> None:
    logits = torch.tensor([[1.0, 0.0, -torch.inf, -torch.inf]], dtype=torch.float64, requires_grad=True)
    table = bucket_logps_of_logits(logits, torch.tensor([[0, 1]]), temperature=1.0)
    assert table[0, -1] == -torch.inf
    slope = gradient(table[0, 0], at=logits)
    # 1 / (1 + e) = 0.26894: the first slope is 1 - p_0, the second -p_1.
    assert slope.tolist()[0] == pytest.approx([0.2689414213699951, -0.2689414213699951, 0.0, 0.0], abs=1e-15)


def test_bucket_logps_of_logits_of_1e4_is_exact() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, -1e4]], dtype=torch.float32, requires_grad=True)
    table = bucket_logps_of_logits(logits, torch.tensor([[0], [1]]), temperature=1.0)
    assert table[0].tolist() == [0.0, -1e4]
    assert table[1].tolist() == pytest.approx([-math.log(3), math.log(2 / 3)], abs=1e-6)
    slope = gradient(table, at=logits)
    assert torch.isfinite(slope).all()


def test_bucket_logps_keeps_a_tail_far_below_float32_resolution() -> None:
    """Tail of 8e-18: 1 - mass is 0 in float32, so a tail of log(1 - mass) would be -inf or a clamp."""
    logits = torch.tensor([[0.0, -40.0, -40.0]], requires_grad=True)
    table = bucket_logps_of_logits(logits, torch.tensor([[0]]), temperature=1.0)
    assert table[0, 1].item() == pytest.approx(math.log(2) - 40, abs=4e-6)
    slope = gradient(table[0, 1], at=logits)
    # 4e-6: the ulp of float32 at 40, as above.
    assert slope[0].tolist() == pytest.approx([-1.0, 0.5, 0.5], rel=4e-6)


def test_bucket_logps_of_bfloat16_inputs_keeps_a_tail_of_6e_4() -> None:
    """The projection of bfloat16 inputs is that of the same numbers in float64; in bfloat16 it would be off by 6 %."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(16, 32, generator=generator).to(torch.bfloat16)
    head = torch.randn(300, 32, generator=generator).to(torch.bfloat16)
    exact = hidden.double() @ head.double().T
    ids = top_ids(exact, k=20)
    # The temperature that gives the first row a tail of 6e-4.
    low, high = 0.05, 20.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        p = distributions.softmax(exact[0].tolist(), temperature=middle)
        low, high = (middle, high) if distributions.cell_masses(p, ids[0].tolist())[-1] < 6e-4 else (low, middle)
    table = bucket_logps(hidden, head, ids, temperature=low)
    assert table.dtype == torch.float32
    assert table[0, -1].exp().item() == pytest.approx(6e-4, rel=1e-5)
    for row in range(16):
        p = distributions.softmax(exact[row].tolist(), temperature=low)
        expected = [math.log(mass) for mass in distributions.cell_masses(p, ids[row].tolist())]
        # 2e-5: float32 logits of size 20, divided by the temperature, carry an ulp of 2e-6 each.
        assert table[row].tolist() == pytest.approx(expected, abs=2e-5)
    rounded = bucket_logps_of_logits(hidden @ head.T, ids, temperature=low)
    assert (rounded - table).abs().max() > 1e-2, "bfloat16 logits should be visibly worse"


def test_bucket_logps_gradients_reach_hidden_and_head_in_their_dtype() -> None:
    """Against finite differences of the oracle, for one row of the hidden states and for the head."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    ids, weights = [3, 1], [0.3, -1.2, 0.7]

    def weighted(numbers: list[float]) -> float:
        state, rows = numbers[:3], [numbers[3 + 3 * v : 6 + 3 * v] for v in range(5)]
        logits = [math.fsum(a * b for a, b in zip(state, row, strict=True)) for row in rows]
        masses = distributions.cell_masses(distributions.softmax(logits, temperature=0.8), ids)
        return math.fsum(weight * math.log(mass) for weight, mass in zip(weights, masses, strict=True))

    table = bucket_logps(hidden, head, torch.tensor([ids]), temperature=0.8)
    value = table[0] * double(weights)
    hidden_slope, head_slope = gradient(value, at=hidden), gradient(value, at=head)
    at = hidden.flatten().tolist() + head.flatten().tolist()
    # 1e-8: central differences at step 1e-5 err by about 1e-10 from curvature and 1e-11 from rounding.
    expected = distributions.finite_differences(weighted, at, step=1e-5)
    assert [*hidden_slope.flatten().tolist(), *head_slope.flatten().tolist()] == pytest.approx(expected, abs=1e-8)
    half = hidden.detach().to(torch.bfloat16).requires_grad_()
    table = bucket_logps(half, head.detach().to(torch.bfloat16), torch.tensor([ids]), temperature=1.0)
    assert gradient(table, at=half).dtype == torch.bfloat16


def test_bucket_logps_ignores_padding_rows_whatever_they_hold() -> None:
    head = torch.tensor([[1.0], [0.5], [-1.0], [torch.nan], [torch.inf]], requires_grad=True)
    hidden = torch.tensor([[2.0], [-1.0]], requires_grad=True)
    ids = torch.tensor([[0, 2], [1, 0]])
    table = bucket_logps(hidden, head, ids, temperature=1.0, valid_vocab=3)
    assert torch.equal(table, bucket_logps(hidden, head[:3], ids, temperature=1.0))
    logits = torch.cat([hidden @ head[:3].T, torch.full((2, 2), 1e4)], dim=1)
    assert torch.equal(table, bucket_logps_of_logits(logits, ids, temperature=1.0, valid_vocab=3))
    hidden_slope, head_slope = gradient(table[:, 0], at=hidden), gradient(table[:, 0], at=head)
    assert torch.isfinite(hidden_slope).all()
    assert head_slope[3:].tolist() == [[0.0], [0.0]]
    assert torch.isfinite(head_slope).all()


def test_bucket_logps_of_selected_rows_is_untouched_by_poison_in_the_others() -> None:
    """Masked slots may hold NaN or -inf: rows selected beforehand give them gradient 0 and the head a finite one."""
    hidden = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [-torch.inf, 0.0], [0.5, -1.0]], requires_grad=True)
    head = torch.randn(5, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
    is_response = torch.tensor([True, False, False, True])
    table = bucket_logps(hidden[is_response], head, torch.tensor([[0, 1], [4, 2]]), temperature=1.0)
    hidden_slope, head_slope = gradient(table[:, 0], at=hidden), gradient(table[:, 0], at=head)
    assert hidden_slope[1:3].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert torch.isfinite(hidden_slope).all()
    assert torch.isfinite(head_slope).all()


def test_bucket_logps_of_one_id_is_the_tokens_log_probability() -> None:
    logits = torch.tensor([STUDENT, STUDENT[::-1]])
    table = bucket_logps_of_logits(logits, torch.tensor([[4], [4]]), temperature=1.0)
    assert torch.allclose(table[:, 0], logits.log_softmax(dim=1)[:, 4], atol=1e-6)


def test_bucket_logps_of_no_token_is_an_empty_table() -> None:
    table = bucket_logps(torch.zeros(0, 3), torch.zeros(7, 3), torch.zeros(0, 2, dtype=torch.int64), temperature=1.0)
    assert table.shape == (0, 3)
    assert coverage(table).shape == (0,)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_bucket_logps_refuses_a_temperature_that_is_not_positive(temperature: float) -> None:
    with pytest.raises(SpecError, match="got temperature"):
        bucket_logps_of_logits(torch.zeros(1, 3), torch.tensor([[0]]), temperature=temperature)


@pytest.mark.parametrize(
    ("ids", "words"), [([[0, 3]], "got ids from 0 to 3"), ([[-1, 0]], "got ids from -1"), ([[1, 1]], "an id twice")]
)
def test_bucket_logps_refuses_ids_outside_the_valid_vocabulary_or_repeated(ids: list[list[int]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        bucket_logps_of_logits(torch.zeros(1, 5), torch.tensor(ids), temperature=1.0, valid_vocab=3)


def test_bucket_logps_refuses_a_valid_vocabulary_larger_than_the_head() -> None:
    with pytest.raises(SpecError, match="got valid_vocab 6, expected 1 to 5"):
        bucket_logps_of_logits(torch.zeros(1, 5), torch.tensor([[0]]), temperature=1.0, valid_vocab=6)


def test_coverage_is_the_mass_of_the_support_without_gradient() -> None:
    logits = torch.tensor([STUDENT], dtype=torch.float64, requires_grad=True)
    mass = coverage(bucket_logps_of_logits(logits, torch.tensor([[0, 1, 2]]), temperature=1.0))
    # .557275 + .205010 + .124345
    assert mass.item() == pytest.approx(0.886630, abs=1e-6)
    assert not mass.requires_grad
