"""A scoring model: tables at each support, a mixture of two models in their logits, its projection, refusals."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import TeacherQuestion, TokenRow
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.scorer import ModelScorer, Part, union_ids
from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.fused import score_tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest
from tests.oracles import distributions
from tests.sdpo_core.backends.test_hf_model import plain_logits
from tests.sdpo_core.micro import Base, load_model, ragged_rows

TEMPERATURE = 0.7
K = 4


def noisy(base: Base) -> dict[str, Tensor]:
    """Other weights of the same model."""
    generator = torch.Generator().manual_seed(8)
    weights = load_model(base.folder).weights()
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def make_scorer(base: Base, *shares: float, max_tokens: int = 40) -> ModelScorer:
    """One copy of the base a share; the last one has other weights."""
    parts = [Part(model=load_model(base.folder), share=share) for share in shares or (1.0,)]
    scorer = ModelScorer(parts, temperature=TEMPERATURE, max_tokens=max_tokens)
    if len(parts) > 1:
        scorer.blend(noisy(base), rate=1.0)
    return scorer


@cache
def double_models(base: Base, count: int) -> list[HfModel]:
    """The parts of `make_scorer` in float64."""
    models = [load_model(base.folder, dtype=torch.float64) for _ in range(count)]
    if count > 1:
        models[-1].blend(noisy(base), rate=1.0)
    return models


def masses(base: Base, row: TokenRow, *, shares: tuple[float, ...] = (1.0,)) -> list[list[float]]:
    """Whole distributions of the mixture, by plain forwards in float64."""
    models = double_models(base, len(shares))
    with torch.no_grad():
        logits = sum(
            (share * plain_logits(model, row) for share, model in zip(shares, models, strict=True)), torch.zeros(())
        )
    found: list[list[float]] = (logits / TEMPERATURE).softmax(dim=1).tolist()
    return found


def plain_questions() -> list[TeacherQuestion]:
    return [TeacherQuestion(row=row) for row in ragged_rows()]


def questions_with_ids(base: Base) -> list[TeacherQuestion]:
    """The ids of a student that shares the base's two best ids at each token, and has two of its own."""
    found = []
    for row in ragged_rows():
        best = [distributions.ranked_ids(whole, k=2) for whole in masses(base, row)]
        free = [[id_ for id_ in (t, t + 50, 258, 100) if id_ not in ids][:2] for t, ids in enumerate(best)]
        ids = np.array([[*own, *ids] for own, ids in zip(free, best, strict=True)])
        found.append(TeacherQuestion(row=row, student_ids=ids))
    return found


def cells_by_hand(support: Support, whole: list[float], student: list[int]) -> list[int]:
    best = distributions.ranked_ids(whole, k=K)
    return {"student": student, "teacher": best, "union": sorted({*student, *best})}[support]


@pytest.mark.parametrize("shares", [(1.0,), (0.75, 0.25)])
@pytest.mark.parametrize("support", ["student", "teacher", "union"])
def test_tables_are_the_masses_of_plain_forwards(base: Base, support: Support, shares: tuple[float, ...]) -> None:
    """Contracts 6 and 8: answers in the order of the questions, the tail last, at the sampling temperature."""
    asked = plain_questions() if support == "teacher" else questions_with_ids(base)
    answers = make_scorer(base, *shares).score(asked, support=support, top_k=K)
    assert len(answers) == len(asked)
    padded = 0
    for question, answer in zip(asked, answers, strict=True):
        assert answer.support_ids is not None
        assert answer.table is not None
        assert answer.states is None
        own = question.student_ids
        for t, whole in enumerate(masses(base, question.row, shares=shares)):
            student = [] if own is None else own[t].tolist()
            ids = cells_by_hand(support, whole, student)
            width = 2 * K if support == "union" else K
            assert answer.support_ids[t].tolist() == ids + [-1] * (width - len(ids))
            padded += width - len(ids)
            expected = np.log(distributions.cell_masses(whole, ids))
            np.testing.assert_allclose(answer.table[t, [*range(len(ids)), -1]], expected, rtol=0, atol=2e-5)
            assert (answer.table[t, len(ids) : -1] == -np.inf).all()
            if own is not None:
                assert answer.overlap is not None
                best = distributions.ranked_ids(whole, k=K)
                assert answer.overlap[t] == pytest.approx(len({*student} & {*best}) / K)
    assert (padded > 0) == (support == "union")


@pytest.mark.parametrize("shares", [(1.0,), (0.75, 0.25)])
@pytest.mark.parametrize("support", [None, "full"])
def test_sampled_tokens_and_entropies_are_those_of_plain_forwards(
    base: Base, support: Support | None, shares: tuple[float, ...]
) -> None:
    asked = plain_questions()
    for question, answer in zip(asked, make_scorer(base, *shares).score(asked, support=support, top_k=0), strict=True):
        whole = masses(base, question.row, shares=shares)
        own = [np.log(token[own_id]) for token, own_id in zip(whole, question.row.response_ids, strict=True)]
        np.testing.assert_allclose(answer.logps, own, rtol=0, atol=2e-5)
        entropies = [-sum(mass * np.log(mass) for mass in token) for token in whole]
        np.testing.assert_allclose(answer.entropies, entropies, rtol=0, atol=2e-5)
        assert answer.support_ids is answer.table is answer.overlap is None
        assert (answer.states is None) == (support is None)


@pytest.mark.parametrize("shares", [(1.0,), (0.75, 0.25)])
def test_states_and_projection_say_what_the_model_says(base: Base, shares: tuple[float, ...]) -> None:
    """What travels for a divergence over the whole vocabulary gives the model's own distributions elsewhere."""
    scorer, asked = make_scorer(base, *shares), plain_questions()
    projection = scorer.projection()
    assert projection.weight.shape == (262, 32 * len(shares))
    assert not projection.weight.requires_grad
    head = Head(weight=projection.weight, temperature=TEMPERATURE, vocab=projection.vocab)
    for question, answer in zip(asked, scorer.score(asked, support="full", top_k=0), strict=True):
        assert answer.states is not None
        every_id = torch.arange(259).expand(len(answer.states), -1)
        own = torch.tensor(question.row.response_ids)
        found = score_tables(torch.from_numpy(answer.states), head, TableRequest(own_ids=own, support_ids=every_id))
        assert found.support_logp is not None
        expected = np.log(masses(base, question.row, shares=shares))
        np.testing.assert_allclose(found.support_logp[:, :-1].numpy(), expected, rtol=0, atol=5e-5)


def test_projection_has_a_version_that_moves_with_the_weights(base: Base, tmp_path: Path) -> None:
    scorer = make_scorer(base)
    scorer.save(tmp_path)
    seen = [scorer.projection_version()]
    scorer.score(plain_questions(), support=None, top_k=0)
    assert scorer.projection().version == seen[0] == scorer.projection_version()
    before = scorer.projection().weight.clone()
    scorer.blend(noisy(base), rate=0.5)
    seen.append(scorer.projection_version())
    assert not torch.equal(scorer.projection().weight, before)
    scorer.load(tmp_path)
    seen.append(scorer.projection_version())
    assert torch.equal(scorer.projection().weight, before)
    assert len(set(seen)) == 3
    assert scorer.projection().version == seen[-1]


def test_mixture_follows_with_its_last_part_alone(base: Base, tmp_path: Path) -> None:
    """The first part is the start for good: what is saved, named and moved is the second."""
    scorer = make_scorer(base, 0.75, 0.25)
    first = scorer._parts[0].model.facts()
    assert scorer.facts().weights_sha256 != first.weights_sha256 == load_model(base.folder).facts().weights_sha256
    scorer.save(tmp_path)
    again = ModelScorer(
        [Part(model=load_model(base.folder), share=share) for share in (0.75, 0.25)],
        temperature=TEMPERATURE,
        max_tokens=40,
    )
    again.load(tmp_path)
    assert again.facts().weights_sha256 == scorer.facts().weights_sha256
    for name, value in again.weights().items():
        assert torch.equal(value, noisy(base)[name])
    asked = plain_questions()
    pairs = zip(*(one.score(asked, support=None, top_k=0) for one in (scorer, again)), strict=True)
    for found, expected in pairs:
        np.testing.assert_array_equal(found.logps, expected.logps)


def test_mixture_takes_bias_and_scale_along(base: Base) -> None:
    """z = scale (h W + b): a mixture weighs the biases as it weighs the states."""
    scorer = make_scorer(base, 0.75, 0.25)
    (question, *_) = plain_questions()
    logits = torch.zeros(())
    for number, part in enumerate(scorer._parts):
        # A model's own forward knows its bias, and no scale.
        assert isinstance(part.model, HfModel)
        part.model.model.get_output_embeddings().bias = torch.nn.Parameter(torch.linspace(number, -1, 262))
        part.model.model.config.logit_scale = 0.5
        with torch.no_grad():
            logits = logits + part.share * 0.5 * plain_logits(part.model, question.row).double()
    (answer,) = scorer.score([question], support=None, top_k=0)
    logps = (logits / TEMPERATURE).log_softmax(dim=1)
    own = logps[range(len(logps)), list(question.row.response_ids)]
    np.testing.assert_allclose(answer.logps, own.numpy(), rtol=0, atol=2e-5)


def test_mixture_in_half_precision_weighs_without_rounding(base: Base) -> None:
    """A model mixed with itself is that model; a share that is no power of two would round states to 8 bits again."""
    model = load_model(base.folder, dtype=torch.bfloat16)
    scorers = [
        ModelScorer([Part(model=model, share=share) for share in shares], temperature=TEMPERATURE, max_tokens=40)
        for shares in ((1.0,), (0.7, 0.3))
    ]
    pairs = zip(*(one.score(plain_questions(), support=None, top_k=0) for one in scorers), strict=True)
    for whole, mixed in pairs:
        np.testing.assert_allclose(mixed.logps, whole.logps, rtol=0, atol=2e-5)


def test_mixture_of_capped_logits_is_refused(base: Base) -> None:
    """A cap is no linear map: a sum of capped logits is no projection."""
    models = [load_model(base.folder) for _ in range(2)]
    for model in models:
        model.model.config.final_logit_softcapping = 30.0
    parts = [Part(model=model, share=0.5) for model in models]
    with pytest.raises(SpecError, match=r"logits are capped at 30\.0"):
        ModelScorer(parts, temperature=TEMPERATURE, max_tokens=40)
    ModelScorer([Part(model=models[0], share=1.0)], temperature=TEMPERATURE, max_tokens=40)


@pytest.mark.parametrize("support", ["student", "union"])
def test_question_without_the_students_ids_is_refused(base: Base, support: Support) -> None:
    asked = [*questions_with_ids(base)[1:], *plain_questions()[:1]]
    with pytest.raises(SpecError, match="got 1 questions without the student's ids"):
        make_scorer(base, max_tokens=9999).score(asked, support=support, top_k=K)


@pytest.mark.parametrize("ids", [[[1, 259]], [[-1, 2]], [[3, 3]]])
def test_ids_of_another_vocabulary_are_refused(base: Base, ids: list[list[int]]) -> None:
    """Contract 5: padded columns are no ids, and none stands twice."""
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3,))
    question = TeacherQuestion(row=row, student_ids=np.array(ids))
    with pytest.raises(DataError):
        make_scorer(base).score([question], support="student", top_k=2)


def test_question_with_ids_of_other_tokens_is_refused() -> None:
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3, 4))
    with pytest.raises(DataError, match="student_ids: got 1 entries, expected 2"):
        TeacherQuestion(row=row, student_ids=np.array([[1, 2]]))


def test_no_question_has_no_answer(base: Base) -> None:
    supports: tuple[Any, ...] = (None, "student", "full")
    assert [make_scorer(base).score([], support=support, top_k=K) for support in supports] == [()] * 3


@given(rows=st.lists(st.tuples(*[st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True)] * 2), min_size=1))
def test_union_holds_every_id_of_both_sides_once(rows: list[tuple[list[int], list[int]]]) -> None:
    """Contract 14: ascending, and behind the last id nothing but -1."""
    found = union_ids(*(torch.tensor([row[side] for row in rows]) for side in (0, 1))).tolist()
    expected = [sorted({*a, *b}) for a, b in rows]
    assert found == [ids + [-1] * (6 - len(ids)) for ids in expected]
