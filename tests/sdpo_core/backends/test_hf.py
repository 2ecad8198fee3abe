"""Policy: scores, micro-batch invariance, optimizer steps, saving, refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sdpo_core.algorithms.objective import ClippedSurrogate, PolicyTerm, Term, TermSum, ValueTerm
from sdpo_core.backends.base import TokenBatch, TokenLosses, TokenRow, TrainRow, WholeVocabulary
from sdpo_core.backends.hf import HfOptimizer, hf_policy
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import CellError, DataError
from sdpo_core.specs import OptimizerSpec
from tests.oracles import distributions
from tests.sdpo_core.backends.test_hf_model import plain_logits
from tests.sdpo_core.micro import MAX_POSITIONS, Base, load_model, ragged_rows

TEMPERATURE = 0.7
# Sums over other micro-batches, in float32: share of the largest entry.
ROUNDING = 2e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class WeighedSurprise:
    """-advantage x logp; `poison` replaces the loss of token 0."""

    poison: float | None = None
    needs_whole_sequences: bool = False
    whole_vocabulary: WholeVocabulary | None = None

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        assert batch.advantage is not None
        loss = -batch.advantage * batch.logp * batch.weight
        if self.poison is not None:
            loss = torch.cat([loss[:1] * self.poison, loss[1:]])
        return TokenLosses(loss=loss, sums={"tokens": float(len(loss)), "surprise": -float(batch.logp.detach().sum())})


def make_policy(
    base: Base,
    *,
    max_tokens: int = 10_000,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerSpec | None = None,
    has_value_head: bool = False,
) -> ModelPolicy:
    model = load_model(base.folder, dtype=dtype)
    if has_value_head:
        model.add_value_head()
    spec = optimizer or OptimizerSpec(learning_rate=1e-2)
    return hf_policy(model, spec, temperature=TEMPERATURE, max_tokens=max_tokens)


def train_rows(rows: list[TokenRow] | None = None) -> list[TrainRow]:
    """Rows with a weight and advantages of their own each."""
    return [
        TrainRow(
            row=row,
            weight=0.01 * (index + 1),
            advantages=np.linspace(-1.0, 2.0, len(row.response_ids), dtype=np.float32) + index,
        )
        for index, row in enumerate(rows or ragged_rows())
    ]


def gradient(policy: ModelPolicy) -> dict[str, Tensor]:
    """What the last update left behind, before clipping would have scaled it: the tests' norms are not clipped."""
    assert isinstance(policy.optimizer, HfOptimizer)
    return {name: p.grad.clone() for name, p in policy.optimizer.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("top_k", [0, 4])
def test_scores_are_those_of_plain_forwards(base: Base, top_k: int) -> None:
    """Contract 1: row t holds log p of response token t at temperature T, and its K best ids, whatever the split."""
    rows = ragged_rows()
    whole = make_policy(base).score(rows, top_k=top_k)
    split = make_policy(base, max_tokens=30).score(rows, top_k=top_k)
    model = load_model(base.folder, dtype=torch.float64)
    for row, found, other in zip(rows, whole, split, strict=True):
        with torch.no_grad():
            logps = (plain_logits(model, row) / TEMPERATURE).log_softmax(dim=1)
        own = logps[range(len(logps)), list(row.response_ids)]
        np.testing.assert_allclose(found.logps, own.numpy(), rtol=0, atol=1e-5)
        np.testing.assert_allclose(other.logps, found.logps, rtol=0, atol=1e-5)
        assert found.values is None
        if not top_k:
            assert found.support_ids is found.table is None
            continue
        assert found.support_ids is not None
        assert found.table is not None
        ids = [distributions.ranked_ids(token.tolist(), k=top_k) for token in logps]
        assert found.support_ids.tolist() == ids
        np.testing.assert_array_equal(other.support_ids, found.support_ids)
        cells = [distributions.cell_masses(token.exp().tolist(), best) for token, best in zip(logps, ids, strict=True)]
        np.testing.assert_allclose(found.table, np.log(cells), rtol=0, atol=1e-5)


def test_values_are_those_of_the_head_on_the_policys_states(base: Base) -> None:
    policy, rows = make_policy(base, has_value_head=True, max_tokens=40), ragged_rows()
    assert all(score.values is not None and not score.values.any() for score in policy.score(rows, top_k=0))
    head = policy.model.value_head
    assert head is not None
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 32)[None])
        head.bias.fill_(0.5)
    model = load_model(base.folder, dtype=torch.float64)
    for row, score in zip(rows, policy.score(rows, top_k=0), strict=True):
        assert score.values is not None
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        with torch.no_grad():
            states = model.model.model(input_ids=ids).last_hidden_state[0]
        first = len(row.prompt_ids) - 1
        expected = states[first : first + len(row.response_ids)] @ head.weight[0].double() + 0.5
        np.testing.assert_allclose(score.values, expected.detach().numpy(), rtol=0, atol=1e-5)


def test_update_is_one_adamw_step_on_the_weighed_loss(base: Base) -> None:
    """Oracle: torch's AdamW on one plain forward a row, clipped at 1, decay on matrices only, at the step's rate."""
    optimizer = OptimizerSpec(learning_rate=1.0, weight_decay=0.1, max_grad_norm=1.0)
    policy = make_policy(base, optimizer=optimizer)
    rows = train_rows()
    stats = policy.update(rows, WeighedSurprise(), learning_rate=1e-3)

    oracle = load_model(base.folder)
    parameters = dict(oracle.model.named_parameters())
    loss = torch.zeros(())
    for row in rows:
        logps = (plain_logits(oracle, row.row) / TEMPERATURE).log_softmax(dim=1)
        own = logps[range(len(logps)), list(row.row.response_ids)]
        loss = loss - row.weight * (torch.tensor(row.advantages) * own).sum()
    loss.backward()
    norm = torch.sqrt(sum(((p.grad**2).sum() for p in parameters.values() if p.grad is not None), torch.zeros(())))
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert stats.grad_norm > 2  # the clip is in effect
    assert stats.sums["tokens"] == 22
    for name, found in policy.weights().items():
        start = load_weights(base)[name]
        slope = parameters[name].grad
        assert slope is not None
        slope = slope / norm
        # First step of AdamW: both moments corrected to g and g^2.
        decayed = start * (1 - 1e-3 * 0.1) if start.dim() > 1 else start
        expected = decayed - 1e-3 * slope / (slope.abs() + 1e-8)
        # Where |g| is near 1e-8 its sign is rounding.
        clear = slope.abs() > 1e-5
        assert clear.float().mean() > 0.5, name
        torch.testing.assert_close(found[clear], expected[clear], rtol=0, atol=2e-6, msg=name)


def load_weights(base: Base) -> dict[str, Tensor]:
    return load_model(base.folder).weights()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_splitting_into_microbatches_changes_nothing(base: Base, dtype: torch.dtype, whole: bool) -> None:
    """Contract 19: loss and gradient of one micro-batch, of rows one by one, and of the rows in another order."""
    optimizer = OptimizerSpec(learning_rate=1e-2, max_grad_norm=1e6)
    rows, objective = train_rows(), WeighedSurprise(needs_whole_sequences=whole)
    once, single, turned = (make_policy(base, max_tokens=n, dtype=dtype, optimizer=optimizer) for n in (9999, 1, 60))
    one = once.update(rows, objective, learning_rate=1e-3)
    many = single.update(rows, objective, learning_rate=1e-3)
    back = turned.update(rows[::-1], objective, learning_rate=1e-3)
    for other, policy in ((many, single), (back, turned)):
        assert other.loss == pytest.approx(one.loss, rel=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
        assert dict(other.sums) == pytest.approx(dict(one.sums), rel=1e-6)
        assert_alike(gradient(policy), gradient(once))


def assert_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, share: float = ROUNDING) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = share * float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("has_value_head", [False, True])
def test_saved_policy_continues_bit_for_bit(base: Base, tmp_path: Path, has_value_head: bool) -> None:
    """Weights, value head and moments come back: the third step equals that of a policy that never stopped."""
    policy = make_policy(base, has_value_head=has_value_head)
    rows = [replace(row, old_values=row.advantages, returns=row.advantages) for row in train_rows()]
    surrogate = ClippedSurrogate(clip_low=0.2, clip_high=0.2)
    terms: tuple[Term, ...] = (PolicyTerm(surrogate=surrogate, rollout_cap=None),)
    objective = TermSum(terms=(*terms, ValueTerm(coefficient=0.5, clip=None)) if has_value_head else terms)
    for _ in range(2):
        policy.update(rows, objective, learning_rate=1e-2)
    policy.save(tmp_path)
    resumed = make_policy(base, has_value_head=has_value_head)
    resumed.update(rows[:1], objective, learning_rate=1.0)  # whatever it held before is replaced
    resumed.load(tmp_path)
    assert resumed.facts().weights_sha256 == policy.facts().weights_sha256
    stats = [one.update(rows, objective, learning_rate=1e-2) for one in (policy, resumed)]
    assert stats[0] == stats[1]
    assert resumed.facts().weights_sha256 == policy.facts().weights_sha256
    found, expected = ([s.values for s in one.score(ragged_rows(), top_k=0)] for one in (resumed, policy))
    assert (found[0] is not None) == has_value_head
    np.testing.assert_equal(found, expected)
    forgetful = make_policy(base, has_value_head=has_value_head)
    forgetful.load_weights(tmp_path)
    forgetful.update(rows, objective, learning_rate=1e-2)
    assert forgetful.facts().weights_sha256 != policy.facts().weights_sha256


def test_policy_is_saved_before_its_first_step(base: Base, tmp_path: Path) -> None:
    policy, rows = make_policy(base), train_rows()
    policy.save(tmp_path)
    policy.update(rows, WeighedSurprise(), learning_rate=1e-2)
    once = policy.facts().weights_sha256
    policy.load(tmp_path)
    assert weights_sha256(policy.weights()) == weights_sha256(load_weights(base))
    policy.update(rows, WeighedSurprise(), learning_rate=1e-2)
    assert policy.facts().weights_sha256 == once


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_gradient_stops_before_the_step(base: Base, poison: float, whole: bool) -> None:
    policy = make_policy(base)
    policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)
    before = policy.facts().weights_sha256
    with pytest.raises(CellError, match="got gradient norm nan"):
        policy.update(train_rows(), WeighedSurprise(poison=poison, needs_whole_sequences=whole), learning_rate=1e-2)
    assert policy.facts().weights_sha256 == before
    stats = policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)
    assert np.isfinite(stats.grad_norm)


def test_weights_version_counts_updates(base: Base) -> None:
    policy = make_policy(base)
    assert policy.model.weights_version == 0
    for count in (1, 2):
        policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)
        assert policy.model.weights_version == count


def test_too_long_row_is_refused(base: Base) -> None:
    row = TokenRow(prompt_ids=(1,) * MAX_POSITIONS, response_ids=(1,))
    policy = make_policy(base)
    with pytest.raises(DataError, match="expected at most 256"):
        policy.score([row], top_k=0)
    with pytest.raises(DataError, match="expected at most 256"):
        policy.update(train_rows([row]), WeighedSurprise(), learning_rate=1e-2)


def test_train_row_with_a_field_of_another_length_is_refused() -> None:
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3, 4, 5))
    with pytest.raises(DataError, match="teacher_logps: got 2 entries, expected 3"):
        TrainRow(row=row, weight=1.0, teacher_logps=np.zeros((2, 3), dtype=np.float32))


@pytest.mark.parametrize(("prompt", "response"), [((1,), (2,)), ((), (2,)), ((1, 2), ())])
def test_token_row_without_prompt_or_response_is_refused(prompt: tuple[int, ...], response: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="expected at least 2 and 1"):
        TokenRow(prompt_ids=prompt, response_ids=response)
