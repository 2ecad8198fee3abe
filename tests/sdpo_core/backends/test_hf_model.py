"""The model as rows: shared prefixes against plain forwards, alignment, micro-batches, blending."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.hf_model import HfModel, microbatches, weights_sha256
from sdpo_core.errors import DataError
from tests.sdpo_core.micro import MAX_POSITIONS, Base, load_model, ragged_rows


@pytest.fixture(scope="module")
def double(base: Base) -> HfModel:
    return load_model(base.folder, dtype=torch.float64)


def plain_logits(model: HfModel, row: TokenRow, *, vocab: int = 259) -> Tensor:
    """One row, whole, without cache or padding; token t of the response is predicted at position P + t - 1."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logits: Tensor = model.model(input_ids=ids).logits[0, :, :vocab]
    first = len(row.prompt_ids) - 1
    return logits[first : first + len(row.response_ids)]


def response_logits(model: HfModel, rows: list[TokenRow]) -> Tensor:
    """Logits of the valid ids that predict the response tokens of `rows`, prompts run once."""
    return model.logits(model.response_states(rows))


def gradients(model: HfModel, value: Tensor) -> dict[str, Tensor]:
    named = dict(model.model.named_parameters())
    return dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


def in_one_batch(rows: list[TokenRow]) -> list[TokenRow]:
    """`rows` in the order of a micro-batch that holds them all."""
    (order,) = microbatches(rows, max_tokens=10_000)
    return [rows[index] for index in order]


def test_shared_prefixes_give_the_logits_of_plain_forwards(double: HfModel) -> None:
    rows = in_one_batch(ragged_rows())
    found = response_logits(double, rows)
    expected = torch.cat([plain_logits(double, row) for row in rows])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_shared_prefixes_in_float32(base: Base) -> None:
    """Rounding of two kernels: logits of size 10 agree to 1e-5."""
    model = load_model(base.folder)
    rows = in_one_batch(ragged_rows())
    with torch.inference_mode():
        found, expected = response_logits(model, rows), torch.cat([plain_logits(model, row) for row in rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_shared_prefixes_give_the_gradients_of_plain_forwards(double: HfModel) -> None:
    """Of a loss that weighs every logit by its own number, for every parameter.

    The model's norms and rotations run in float32 whatever its weights are, so sums over rows taken before or after
    them differ by rounding: 6e-8 of a gradient's size.
    """
    rows = in_one_batch(ragged_rows())
    count = sum(len(row.response_ids) for row in rows)
    mix = torch.randn(count, 259, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = gradients(double, (response_logits(double, rows).log_softmax(dim=1) * mix).sum())
    plain = torch.cat([plain_logits(double, row) for row in rows])
    expected = gradients(double, (plain.log_softmax(dim=1) * mix).sum())
    for name, value in expected.items():
        size = float(value.abs().max())
        assert size > 1, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-7 * size, msg=name)


def test_a_shared_prompt_runs_once(base: Base) -> None:
    """Three responses of at most 4 tokens to one prompt of 9: 8 prompt tokens once, its last one with each response."""
    model, ran = load_model(base.folder), []
    rows = [TokenRow(prompt_ids=tuple(range(9)), response_ids=(1,) * count) for count in (4, 2, 3)]
    embedding = model.model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, inputs: ran.append(inputs[0].numel()))
    with torch.inference_mode():
        response_logits(model, rows)
    handle.remove()
    assert ran == [8, 3 * 4]


def test_tied_head_gets_both_gradients(double: HfModel) -> None:
    """The embedding is the head: ids only the prompt holds and ids only the softmax sees both get gradient."""
    names = [name for name, _ in double.model.named_parameters()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3,))
    loss = -response_logits(double, [row]).log_softmax(dim=1)[0, 3]
    gradient = gradients(double, loss)["model.embed_tokens.weight"]
    assert gradient[1].abs().sum() > 0
    assert gradient[200].abs().sum() > 0
    assert torch.equal(gradient[259:], torch.zeros(3, 32, dtype=torch.float64))  # padded vocabulary


def test_sampled_padding_token_gets_the_gradient_of_any_other(double: HfModel, base: Base) -> None:
    """Against a finite difference: an embedding layer that knows a padding id leaves that row out."""
    pad = base.text.pad_id
    row = TokenRow(prompt_ids=(1, 2), response_ids=(pad, 5, 6))
    embedding = double.head

    def loss() -> Tensor:
        return -response_logits(double, [row]).log_softmax(dim=1)[1:, [5, 6]].diagonal().sum()

    slope = gradients(double, loss())["model.embed_tokens.weight"][pad]
    with torch.no_grad():
        direction = torch.linspace(-1, 1, len(slope), dtype=torch.float64)
        embedding[pad] += 1e-3 * direction
        above = loss()
        embedding[pad] -= 2e-3 * direction
        below = loss()
        embedding[pad] += 1e-3 * direction
    # The norms of the model compute in float32, whatever it is in. What the head gives the row is in both.
    assert float(slope @ direction) == pytest.approx(float(above - below) / 2e-3, rel=1e-2)


def test_changing_a_token_changes_only_later_logits(double: HfModel) -> None:
    """Row t is predicted from before token t."""
    row = TokenRow(prompt_ids=(9, 8, 7), response_ids=(1, 2, 3, 4))
    changed = replace(row, response_ids=(1, 2, 30, 4))
    with torch.no_grad():
        before, after = response_logits(double, [row]), response_logits(double, [changed])
    assert torch.equal(before[:3], after[:3])
    assert (before[3] - after[3]).abs().max() > 1e-3


def test_prefix_counts_pad_positions_out(double: HfModel) -> None:
    """A short prompt beside a long one is scored as if alone."""
    short = TokenRow(prompt_ids=(4, 5), response_ids=(6,))
    long = TokenRow(prompt_ids=tuple(range(40, 70)), response_ids=(6, 7, 8))
    with torch.no_grad():
        alone, together = response_logits(double, [short]), response_logits(double, [short, long])
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(2, 6), st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=12),
    budget=st.integers(1, 60),
)
def test_microbatches_cover_each_row_once_within_the_budget(shapes: list[tuple[int, int, int]], budget: int) -> None:
    rows = [TokenRow(prompt_ids=(first, *range(2, size + 1)), response_ids=(1,) * n) for size, first, n in shapes]
    batches = list(microbatches(rows, max_tokens=budget))
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        prompts = [rows[index].prompt_ids for index in batch]
        assert prompts == sorted(prompts, key=lambda prompt: (len(prompt), prompt))
        longest = max(len(rows[index].response_ids) for index in batch)
        padded = len(set(prompts)) * len(prompts[-1]) + len(batch) * longest
        assert padded <= budget or len(batch) == 1


def test_too_long_sequence_is_refused(double: HfModel) -> None:
    fits = TokenRow(prompt_ids=(1,) * (MAX_POSITIONS - 2), response_ids=(1, 2))
    with torch.no_grad():
        response_logits(double, [fits])
        with pytest.raises(DataError, match=f"a sequence of {MAX_POSITIONS + 1} tokens, expected at most"):
            response_logits(double, [fits, replace(fits, response_ids=(1, 2, 3))])


def test_tokenizer_larger_than_the_head_is_refused(base: Base) -> None:
    with pytest.raises(DataError, match="263 ids and a head of 262 rows"):
        HfModel(base.folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=263)


def test_logits_are_those_of_the_projection_head(base: Base) -> None:
    """Bias, scale and cap of a model's configuration are in its logits as they are in its head."""
    model = load_model(base.folder, dtype=torch.float64)
    states = torch.randn(4, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    plain = model.head[:259].detach()
    bias = torch.linspace(-1, 1, 262, dtype=torch.float64)
    model.model.get_output_embeddings().bias = torch.nn.Parameter(bias)
    model.model.config.logit_scale = 0.5
    model.model.config.final_logit_softcapping = 3.0
    raw = 0.5 * (states @ plain.T + bias[:259])
    torch.testing.assert_close(model.logits(states), 3.0 * torch.tanh(raw / 3.0), rtol=0, atol=1e-12)
    head = model.projection_head(temperature=0.7)
    assert (head.temperature, head.vocab, head.logit_scale, head.soft_cap) == (0.7, 259, 0.5, 3.0)
    assert head.bias is not None
    assert torch.equal(head.bias.detach(), bias)
    assert len(head.weight) == 262


def test_weights_version_counts_changes(base: Base, tmp_path: Path) -> None:
    """Also those of a file: whoever holds something of the model must notice."""
    model = load_model(base.folder)
    model.save_weights(tmp_path)
    versions = [model.weights_version]
    model.blend(model.weights(), rate=0.5)
    versions.append(model.weights_version)
    model.load_weights(tmp_path)
    assert [*versions, model.weights_version] == [0, 1, 2]


def test_blend_is_the_ema_formula(base: Base) -> None:
    """Three commits of moving weights: t <- 0.9 t + 0.1 s, in float64."""
    model = load_model(base.folder, dtype=torch.float64)
    expected = model.weights()
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        student = {name: torch.randn(value.shape, generator=generator).double() for name, value in expected.items()}
        expected = {name: 0.9 * value + 0.1 * student[name] for name, value in expected.items()}
        model.blend(student, rate=0.1)
    for name, value in model.weights().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-15)
    assert model.weights_version == 3


def test_blend_at_rate_one_copies_bits(base: Base) -> None:
    model = load_model(base.folder)
    student = {name: torch.full_like(value, -0.0) for name, value in model.weights().items()}
    model.blend({name: torch.full_like(value, torch.nan) for name, value in student.items()}, rate=1.0)
    model.blend(student, rate=1.0)
    assert weights_sha256(model.weights()) == weights_sha256(student)


def test_blend_refuses_another_model(base: Base) -> None:
    model = load_model(base.folder)
    before = weights_sha256(model.weights())
    broadcastable = model.weights() | {"model.norm.weight": torch.ones(1)}
    with pytest.raises(DataError, match=r"got other shapes of \['model.norm.weight'\]"):
        model.blend(broadcastable, rate=0.5)
    with pytest.raises(DataError, match=r"model\.norm\.weight"):
        model.blend({name: value for name, value in model.weights().items() if "model.norm" not in name}, rate=0.5)
    assert weights_sha256(model.weights()) == before


def test_weights_sha256_sees_names_and_bits() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    reference = weights_sha256({"a": one, "b": other})
    assert weights_sha256({"b": other, "a": one}) == reference
    assert weights_sha256({"a": other, "b": one}) != reference
    assert weights_sha256({"a": torch.tensor([1.0, -2.0]), "b": other}) != reference


def test_weights_are_copies(base: Base, tmp_path: Path) -> None:
    model = load_model(base.folder)
    before = weights_sha256(model.weights())
    for value in model.weights().values():
        value.zero_()
    assert weights_sha256(model.weights()) == before
    model.save_weights(tmp_path)
    model.blend({name: torch.ones_like(value) for name, value in model.weights().items()}, rate=0.5)
    assert weights_sha256(model.weights()) != before
    model.load_weights(tmp_path)
    assert weights_sha256(model.weights()) == before
