"""The choice of the support, and the mass it holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.support import coverage, top_ids
from tests.oracles import distributions
from tests.sdpo_core.objectives.tensors import table_of_logits

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


def test_coverage_is_the_mass_of_the_support_without_gradient() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    mass = coverage(table_of_logits(logits, torch.tensor([[0, 1, 2]]), temperature=1.0))
    # .557275 + .205010 + .124345
    assert mass.item() == pytest.approx(0.886630, abs=1e-6)
    assert not mass.requires_grad
    assert coverage(table_of_logits(logits, torch.arange(6)[None], temperature=1.0)).item() == 1.0
