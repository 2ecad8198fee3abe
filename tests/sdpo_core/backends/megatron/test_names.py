"""Weights there and back: bit by bit, with as much padding as a layout needs and no more, and refused in words."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from sdpo_core.backends.megatron.names import EMBEDDING, HEAD, entries, hf_shapes, to_hf, to_shard
from sdpo_core.backends.megatron.shape import ModelShape, model_shape
from sdpo_core.errors import DataError, SpecError
from tests.sdpo_core.backends.megatron.tiny import llama_config, qwen3_config, tiny_model, tiny_shape

CONFIGS = {
    "qwen3 tied": qwen3_config(),
    "qwen3 untied": qwen3_config(tie_word_embeddings=False),
    "llama 9 heads in 3 groups": llama_config(),
    "llama untied": llama_config(tie_word_embeddings=False, vocab_size=251),
}


def parameters(config: PretrainedConfig) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in tiny_model(config).named_parameters()}


def numbered(shape: ModelShape) -> dict[str, Tensor]:
    """Weights in which every number occurs once, so that a wrong place shows as a wrong number."""
    weights, start = {}, 1
    for name, size in hf_shapes(shape).items():
        count = int(torch.tensor(size).prod())
        weights[name] = torch.arange(start, start + count, dtype=torch.float64).reshape(size)
        start += count
    return weights


def shards(weights: Mapping[str, Tensor], shape: ModelShape, *, tensor: int) -> list[dict[str, Tensor]]:
    return [to_shard(weights, shape, tensor=tensor, rank=rank) for rank in range(tensor)]


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_weights_come_back_bit_by_bit(config: PretrainedConfig, tensor: int) -> None:
    weights = parameters(config)
    shape = model_shape(config)
    back = to_hf(shards(weights, shape, tensor=tensor), shape)
    assert set(back) == set(weights)
    assert [name for name, weight in weights.items() if not torch.equal(back[name], weight)] == []


@pytest.mark.parametrize("kernels", ["torch", "transformer_engine"])
def test_weights_come_back_with_the_names_of_either_kernels(kernels: Any) -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    parts = [to_shard(weights, shape, tensor=2, rank=rank, kernels=kernels) for rank in (0, 1)]
    back = to_hf(parts, shape, kernels=kernels)
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_shapes_are_those_of_the_model() -> None:
    for config in CONFIGS.values():
        expected = {name: tuple(weight.shape) for name, weight in parameters(config).items()}
        assert hf_shapes(model_shape(config)) == expected


def test_shares_are_copies() -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    shard = to_shard(weights, shape, tensor=1, rank=0)
    for weight in shard.values():
        weight.zero_()
    assert all(weight.all() for weight in weights.values())


def test_qkv_of_a_process_is_its_groups_one_behind_another() -> None:
    """Of 4 heads in 2 groups, process 1 holds heads 2 and 3, then key 1, then value 1; heads are 32 rows."""
    shape = tiny_shape()
    weights = numbered(shape)
    held = to_shard(weights, shape, tensor=2, rank=1)["decoder.layers.1.self_attention.linear_qkv.weight"]
    queries, keys, values = (weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    assert torch.equal(held, torch.cat([queries[64:], keys[32:], values[32:]]))


def test_gate_and_up_are_cut_each_by_itself() -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    held = to_shard(weights, shape, tensor=2, rank=1)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert torch.equal(held, torch.cat([gate[64:], up[64:]]))


def test_output_and_down_projection_are_cut_by_columns() -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    held = to_shard(weights, shape, tensor=2, rank=0)
    output = held["decoder.layers.2.self_attention.linear_proj.weight"]
    assert torch.equal(output, weights["model.layers.2.self_attn.o_proj.weight"][:, :64])
    assert torch.equal(
        held["decoder.layers.2.mlp.linear_fc2.weight"], weights["model.layers.2.mlp.down_proj.weight"][:, :64]
    )


def test_groups_that_tensor_does_not_divide_get_heads_of_zeros() -> None:
    """3 groups of 3 heads become 4 of 3: process 1 holds group 2 and one that puts out nothing. Heads are 8 rows."""
    shape = model_shape(llama_config())
    held = to_shard(numbered(shape), shape, tensor=2, rank=1)
    qkv = held["decoder.layers.0.self_attention.linear_qkv.weight"]
    output = held["decoder.layers.0.self_attention.linear_proj.weight"]
    assert (shape.padded_groups(2), shape.padded_heads(2)) == (4, 12)
    assert (qkv.shape, output.shape) == ((2 * 5 * 8, 72), (72, 2 * 3 * 8))
    assert qkv[:40].all()
    assert not qkv[40:].any()
    assert output[:, :24].all()
    assert not output[:, 24:].any()


def test_vocabulary_is_padded_to_the_next_multiple_of_tensor_and_no_further() -> None:
    shape = tiny_shape(vocab_size=250)
    held = to_shard(numbered(shape), shape, tensor=4, rank=3)["embedding.word_embeddings.weight"]
    assert held.shape == (63, 64)
    assert held[:61].all()
    assert not held[61:].any()


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_vocabulary_of_qwen3_is_not_padded(tensor: int) -> None:
    """Its ids beyond the tokenizer's are ids of its softmax; more rows would be ids of no softmax but ours."""
    shape = tiny_shape(vocab_size=151936)
    assert shape.padded_vocab(tensor) == 151936
    weights = {name: torch.zeros(1).expand(size) for name, size in hf_shapes(shape).items()}
    held = to_shard(weights, shape, tensor=tensor, rank=0)["embedding.word_embeddings.weight"]
    assert len(held) * tensor == 151936


def test_projection_of_a_tied_model_may_be_there_if_it_is_the_embedding() -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    assert set(to_shard(weights | {HEAD: weights[EMBEDDING]}, shape, tensor=1, rank=0)) == {
        entry.name for entry in entries(shape)
    }
    with pytest.raises(DataError, match=r"lm_head.weight other than model.embed_tokens.weight.*tie_word_embeddings"):
        to_shard(weights | {HEAD: weights[EMBEDDING] + 1}, shape, tensor=1, rank=0)


def test_missing_and_left_over_weights_are_refused_by_name() -> None:
    shape = tiny_shape()
    weights = numbered(shape)
    del weights["model.norm.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    with pytest.raises(DataError, match=r"without \['model.norm.weight'\].*q_proj.bias.*biases"):
        to_shard(weights, shape, tensor=1, rank=0)
    held = to_shard(numbered(shape), shape, tensor=1, rank=0)
    held["other"] = held.pop("decoder.final_layernorm.weight")
    with pytest.raises(
        DataError, match=r"share 0: got weights without \['decoder.final_layernorm.weight'\].*\['other'\]"
    ):
        to_hf([held], shape)


def test_projection_of_an_untied_model_must_be_there() -> None:
    shape = tiny_shape(tie_word_embeddings=False)
    weights = numbered(shape)
    del weights[HEAD]
    with pytest.raises(DataError, match=r"without \['lm_head.weight'\]"):
        to_shard(weights, shape, tensor=1, rank=0)


def test_weights_of_another_size_are_refused() -> None:
    weights = numbered(tiny_shape())
    with pytest.raises(DataError, match=r"model.embed_tokens.weight \(250, 64\) for \(260, 64\)"):
        to_shard(weights, tiny_shape(vocab_size=260), tensor=2, rank=0)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("embedding.word_embeddings.weight", (-1, 0)),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (-1, 0)),
        ("decoder.layers.0.self_attention.linear_proj.weight", (0, -1)),
    ],
)
def test_padding_that_training_has_used_is_refused(name: str, place: tuple[int, int]) -> None:
    shape = model_shape(llama_config(vocab_size=251))
    parts = shards(numbered(shape), shape, tensor=2)
    parts[1][name][place] = 1e-30
    with pytest.raises(DataError, match=r"to_hf: got padding of the \w+ that is not 0"):
        to_hf(parts, shape)


def test_feed_forward_layer_must_divide() -> None:
    shape = tiny_shape(intermediate_size=129)
    with pytest.raises(SpecError, match="tensor 2 for a feed-forward layer of 129"):
        to_shard(numbered(shape), shape, tensor=2, rank=0)


def test_shape_is_read_off_the_configuration() -> None:
    assert model_shape(llama_config()) == ModelShape(
        architecture="llama",
        layers=3,
        hidden=72,
        heads=9,
        groups=3,
        head_dim=8,
        ffn=128,
        vocab=250,
        is_tied=True,
        has_qk_norm=False,
        rope_base=100000.0,
        norm_eps=1e-5,
        max_positions=512,
    )
    shape = tiny_shape(tie_word_embeddings=False)
    assert (shape.has_qk_norm, shape.head_dim, shape.is_tied, shape.rope_base) == (True, 32, False, 20000.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(), "type 'qwen2', expected one of qwen3, llama"),
        (qwen3_config(attention_bias=True), "attention_bias true"),
        (llama_config(mlp_bias=True), "mlp_bias true"),
        (qwen3_config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (qwen3_config(use_sliding_window=True, sliding_window=64, max_window_layers=1), "layers of sliding_attention"),
        (llama_config(num_key_value_heads=2, num_attention_heads=9), "9 heads for 2 groups"),
        *(
            (qwen3_config(rope_parameters={"rope_theta": 1e4, **scaling}), f"scaled as '{scaling['rope_type']}'")
            for scaling in (
                {"rope_type": "linear", "factor": 2.0},
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
                {"rope_type": "dynamic", "factor": 2.0},
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            )
        ),
        (
            llama_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary_factor 0.5",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_layers_do_not_compute_is_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        model_shape(config)


def test_all_faults_of_a_configuration_are_named_at_once() -> None:
    with pytest.raises(SpecError, match=r"hidden_act 'gelu'.*attention_bias true.*Use the backend 'hf'"):
        model_shape(qwen3_config(hidden_act="gelu", attention_bias=True))


def test_defaults_of_both_architectures_are_accepted() -> None:
    """What a configuration file leaves out is filled in by its class."""
    assert model_shape(Qwen3Config()).head_dim == 128
    assert model_shape(LlamaConfig()).head_dim == 128
