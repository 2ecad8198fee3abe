"""Terms of an objective: what they train and what stays constant, what they need, and how they add up."""

from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from sdpo_core.algorithm_specs import DivergenceSpec
from sdpo_core.algorithms.objective import (
    ClippedSurrogate,
    DivergenceTerm,
    PolicyTerm,
    SampledKlTerm,
    SequenceSurrogate,
    SoftGate,
    Term,
    TermSum,
    ValueTerm,
    summed,
)
from sdpo_core.backends.base import TokenBatch, WholeVocabulary
from sdpo_core.errors import DataError

CLIPPED = ClippedSurrogate(clip_low=0.2, clip_high=0.2)
FULL = DivergenceSpec(support="full", top_k=None, alpha=0.25, entry_clip=0.5)
TABLES = ("student_logp", "teacher_logp")
TERMS: Mapping[str, Term] = {
    "clipped": PolicyTerm(surrogate=CLIPPED, rollout_cap=2.0),
    "sequence": PolicyTerm(surrogate=SequenceSurrogate(clip_low=0.2, clip_high=0.2), rollout_cap=2.0),
    "soft gate": PolicyTerm(surrogate=SoftGate(temperature_positive=1.0, temperature_negative=2.0), rollout_cap=2.0),
    "anchor": SampledKlTerm(coefficient=0.5, is_anchor=True, rollout_cap=2.0),
    "sampled": SampledKlTerm(coefficient=0.5, is_anchor=False, rollout_cap=2.0),
    "value": ValueTerm(coefficient=0.5, clip=0.2),
    "divergence": DivergenceTerm(spec=DivergenceSpec(alpha=0.5, token_clip=0.1), importance_clip=2.0, rollout_cap=2.0),
    "full": DivergenceTerm(spec=FULL, importance_clip=2.0, rollout_cap=2.0),
}
# The fields of a batch that each term trains, and those it cannot do without.
TRAINED: Mapping[str, tuple[str, ...]] = {
    "clipped": ("logp",),
    "sequence": ("logp",),
    "soft gate": ("logp",),
    "anchor": ("logp",),
    "sampled": ("logp",),
    "value": ("value",),
    "divergence": ("student_logp",),
    "full": ("divergence",),
}
NEEDED: Mapping[str, tuple[str, ...]] = {
    "clipped": ("advantage", "sampling_logp"),
    "sequence": ("advantage", "sampling_logp"),
    "soft gate": ("advantage", "sampling_logp", "task_advantage"),
    "anchor": ("anchor_logp", "sampling_logp"),
    "sampled": ("teacher_own_logp", "sampling_logp"),
    "value": ("value", "old_value", "returns"),
    "divergence": ("teacher_logp", "student_logp", "sampling_logp"),
    "full": ("divergence", "sampling_logp"),
}


def make_batch(term: str = "", *, requires_grad: bool = False) -> TokenBatch:
    """Four tokens of two sequences with every field; a whole-vocabulary divergence in the place of tables for it."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    columns: dict[str, Tensor] = {field.name: 0.2 * draw(4) for field in fields(TokenBatch)}
    columns |= {name: draw(4, 3).log_softmax(dim=1) for name in TABLES}
    columns |= {name: columns[name].abs() for name in ("weight", "distill_weight", "divergence", "entropy")}
    columns["sequence"] = torch.tensor([0, 0, 1, 1])
    if term == "full":
        columns = {name: column for name, column in columns.items() if name not in TABLES}
    else:
        del columns["divergence"]
    if requires_grad:
        columns = {
            name: column.requires_grad_() if column.is_floating_point() else column for name, column in columns.items()
        }
    return TokenBatch(**columns)


@pytest.mark.parametrize("name", TERMS)
def test_gradient_reaches_what_is_trained_and_no_constant(name: str) -> None:
    """Contract 11: teacher, old policy, engine, anchor, advantage and returns are constants, whatever they bring."""
    batch = make_batch(name, requires_grad=True)
    losses = TERMS[name].losses(batch).loss
    inputs = {
        field.name: getattr(batch, field.name)
        for field in fields(batch)
        if isinstance(getattr(batch, field.name), Tensor) and field.name != "sequence"
    }
    found = torch.autograd.grad(losses.sum(), list(inputs.values()), allow_unused=True)
    reached = {field for field, slope in zip(inputs, found, strict=True) if slope is not None and slope.any()}
    # Weights are numbers of the row, and enter as factors.
    assert reached - {"weight", "distill_weight"} == set(TRAINED[name])


@pytest.mark.parametrize("name", TERMS)
def test_missing_field_is_refused(name: str) -> None:
    """Contract 33: a term that cannot be computed is an error, not a zero."""
    whole = make_batch(name)
    TERMS[name].losses(whole)
    for field in NEEDED[name]:
        with pytest.raises(DataError, match="objective: got no "):
            TERMS[name].losses(replace(whole, **{field: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["anchor", "sampled", "divergence"])
def test_rows_of_another_term_give_nothing(name: str) -> None:
    """Rows without the field are allowed where their weight for the term is 0."""
    weight = "weight" if name == "anchor" else "distill_weight"
    batch = replace(
        make_batch(name),
        **{weight: torch.zeros(4).double(), NEEDED[name][0]: None},  # type: ignore[arg-type]
    )
    found = TERMS[name].losses(batch)
    assert not found.loss.any()
    assert found.sums == {}


@pytest.mark.parametrize("name", TERMS)
def test_token_without_weight_gives_exactly_nothing(name: str) -> None:
    """Contract 14: a weight of 0 leaves value 0 and gradient 0 in its own place and nowhere else."""
    whole = make_batch(name, requires_grad=True)
    before = TERMS[name].losses(whole).loss.detach()
    is_kept = torch.tensor([1.0, 0.0, 1.0, 1.0]).double()
    batch = replace(whole, weight=whole.weight * is_kept, distill_weight=whole.distill_weight * is_kept)
    losses = TERMS[name].losses(batch).loss
    assert torch.equal(losses.detach(), before * is_kept)
    trained = [getattr(batch, field) for field in TRAINED[name]]
    for slope in torch.autograd.grad(losses.sum(), trained):
        assert not slope[1].any()


def test_sum_of_terms_adds_losses_and_collects_sums() -> None:
    batch = make_batch()
    objective = TermSum(terms=(TERMS["clipped"], TERMS["divergence"], TERMS["value"]))
    found, parts = objective.token_losses(batch), [term.losses(batch) for term in objective.terms]
    torch.testing.assert_close(found.loss, parts[0].loss + parts[1].loss + parts[2].loss, rtol=0, atol=1e-15)
    assert {"trained_tokens", "entropy", "value_loss", "divergence", "tokens", "tail", "cells"} <= found.sums.keys()
    assert found.sums["trained_tokens"] == 4
    assert found.sums["entropy"] == pytest.approx(float(batch.entropy.sum()))


@pytest.mark.parametrize("name", TERMS)
def test_sum_needs_what_one_of_its_terms_needs(name: str) -> None:
    objective = TermSum(terms=(TERMS["clipped"], TERMS[name]))
    assert objective.needs_whole_sequences == (name in ("sequence", "value"))
    expected = WholeVocabulary(alpha=0.25, entry_clip=0.5) if name == "full" else None
    assert objective.whole_vocabulary == expected


def test_summed_adds_by_name() -> None:
    assert summed([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 4.0, "b": 2.0}
    assert summed([]) == {}
