"""Weights by Hugging Face name and as the shares of megatron-core's tensor parallel processes, there and back.

Both ways are copies, bit by bit. Where `tensor` does not divide the vocabulary or the groups, zeros are added at the
end: an added row of the embedding is never looked up nor read by the head, an added head puts out 0, and the gradients
of all of them are 0. Nothing is padded that divides: Qwen3's 151936 rows stay, for they are ids of its softmax.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from sdpo_core.backends.megatron.shape import ModelShape
from sdpo_core.errors import DataError, SpecError

Kernels = Literal["torch", "transformer_engine"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# TransformerEngine runs a norm and the linear map after it as one module.
TRANSFORMER_ENGINE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

Cut = Callable[[Sequence[Tensor], ModelShape, int], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor], ModelShape], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A parameter of megatron-core and the weights it holds: `cut` makes all its shares, `join` undoes that."""

    name: str
    sources: tuple[str, ...]
    cut: Cut
    join: Join


def to_shard(
    weights: Mapping[str, Tensor], shape: ModelShape, *, tensor: int, rank: int, kernels: Kernels = "torch"
) -> dict[str, Tensor]:
    """The share of process `rank` of `tensor` by megatron-core's names, in memory of its own.

    A tied model's output projection may be among the weights, where it is the embedding.

    Raises:
        SpecError: `tensor` does not divide the feed-forward layer.
        DataError: a weight is missing, left over or of another shape; the projection of a tied model differs.
    """
    check_tensor(shape, tensor=tensor)
    _check_weights(weights, shape)
    return {
        entry.name: entry.cut([weights[source].detach() for source in entry.sources], shape, tensor)[rank]
        .contiguous()
        .clone()
        for entry in entries(shape, kernels=kernels)
    }


def to_hf(
    shards: Sequence[Mapping[str, Tensor]], shape: ModelShape, *, kernels: Kernels = "torch"
) -> dict[str, Tensor]:
    """Weights by Hugging Face name from the shares of all tensor parallel processes, in rank order; tied ones once.

    Raises:
        DataError: a parameter is missing or left over; padding is no longer 0, so that training has used it.
    """
    table = entries(shape, kernels=kernels)
    names = {entry.name for entry in table}
    for rank, shard in enumerate(shards):
        check_names(set(shard), names, where=f"to_hf, share {rank}")
    weights: dict[str, Tensor] = {}
    for entry in table:
        parts = [shard[entry.name].detach() for shard in shards]
        joined = entry.join(parts, shape)
        weights |= {name: weight.contiguous().clone() for name, weight in zip(entry.sources, joined, strict=True)}
    return weights


def check_tensor(shape: ModelShape, *, tensor: int) -> None:
    """Raise SpecError where `tensor` processes cannot share the model out."""
    if shape.ffn % tensor:
        raise SpecError(
            f"megatron: got tensor {tensor} for a feed-forward layer of {shape.ffn}, expected a divisor. "
            "Choose another layout."
        )


def entries(shape: ModelShape, *, kernels: Kernels = "torch") -> tuple[Entry, ...]:
    """All parameters of a model, in a fixed order."""
    renamed = TRANSFORMER_ENGINE_NAMES if kernels == "transformer_engine" else {}
    layer = list(_layer_entries(shape))
    table = [Entry(name="embedding.word_embeddings.weight", sources=(EMBEDDING,), cut=_cut_vocab, join=_join_vocab)]
    table += [
        Entry(
            name=f"decoder.layers.{index}.{renamed.get(entry.name, entry.name)}",
            sources=tuple(f"model.layers.{index}.{source}" for source in entry.sources),
            cut=entry.cut,
            join=entry.join,
        )
        for index in range(shape.layers)
        for entry in layer
    ]
    table.append(_whole("decoder.final_layernorm.weight", "model.norm.weight"))
    if not shape.is_tied:
        table.append(Entry(name="output_layer.weight", sources=(HEAD,), cut=_cut_vocab, join=_join_vocab))
    return tuple(table)


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by Hugging Face name; tied ones once."""
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
        "input_layernorm": (shape.hidden,),
        "post_attention_layernorm": (shape.hidden,),
    }
    if shape.has_qk_norm:
        layer |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    for index in range(shape.layers):
        shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return shapes if shape.is_tied else shapes | {HEAD: (shape.vocab, shape.hidden)}


def _layer_entries(shape: ModelShape) -> Iterator[Entry]:
    projections = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    yield Entry(name="self_attention.linear_qkv.weight", sources=projections, cut=_cut_qkv, join=_join_qkv)
    output = ("self_attn.o_proj.weight",)
    yield Entry(name="self_attention.linear_proj.weight", sources=output, cut=_cut_output, join=_join_output)
    if shape.has_qk_norm:
        yield _whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
        yield _whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
    gated = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield Entry(name="mlp.linear_fc1.weight", sources=gated, cut=_cut_gated, join=_join_gated)
    yield Entry(name="mlp.linear_fc2.weight", sources=("mlp.down_proj.weight",), cut=_cut_columns, join=_join_columns)
    yield _whole("input_layernorm.weight", "input_layernorm.weight")
    yield _whole("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")


def _whole(name: str, source: str) -> Entry:
    return Entry(
        name=name,
        sources=(source,),
        cut=lambda sources, _, tensor: list(sources) * tensor,
        join=lambda parts, _: parts[:1],
    )


def _cut_vocab(sources: Sequence[Tensor], shape: ModelShape, tensor: int) -> Sequence[Tensor]:
    return _pad(sources[0], rows=shape.padded_vocab(tensor)).chunk(tensor)


def _join_vocab(parts: Sequence[Tensor], shape: ModelShape) -> Sequence[Tensor]:
    return [_unpad(torch.cat(list(parts)), rows=shape.vocab, what="vocabulary")]


def _cut_qkv(sources: Sequence[Tensor], shape: ModelShape, tensor: int) -> Sequence[Tensor]:
    """Group by group: the queries of its heads, its key, its value."""
    grouped = torch.cat([weight.reshape(shape.groups, -1, shape.hidden) for weight in sources], dim=1)
    return _pad(grouped, rows=shape.padded_groups(tensor)).reshape(-1, shape.hidden).chunk(tensor)


def _join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Sequence[Tensor]:
    sizes = [shape.heads_per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    grouped = _unpad(torch.cat(list(parts)).reshape(-1, sum(sizes), shape.hidden), rows=shape.groups, what="groups")
    return [weight.reshape(-1, shape.hidden) for weight in torch.split(grouped, sizes, dim=1)]


def _cut_output(sources: Sequence[Tensor], shape: ModelShape, tensor: int) -> Sequence[Tensor]:
    padded = _pad(sources[0].T, rows=shape.padded_heads(tensor) * shape.head_dim)
    return [part.T for part in padded.chunk(tensor)]


def _join_output(parts: Sequence[Tensor], shape: ModelShape) -> Sequence[Tensor]:
    joined = torch.cat(list(parts), dim=1).T
    return [_unpad(joined, rows=shape.heads * shape.head_dim, what="heads").T]


def _cut_gated(sources: Sequence[Tensor], _: ModelShape, tensor: int) -> Sequence[Tensor]:
    gate, up = (weight.chunk(tensor) for weight in sources)
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)]


def _join_gated(parts: Sequence[Tensor], _: ModelShape) -> Sequence[Tensor]:
    pairs = [part.chunk(2) for part in parts]
    return [torch.cat([pair[side] for pair in pairs]) for side in (0, 1)]


def _cut_columns(sources: Sequence[Tensor], _: ModelShape, tensor: int) -> Sequence[Tensor]:
    return sources[0].chunk(tensor, dim=1)


def _join_columns(parts: Sequence[Tensor], _: ModelShape) -> Sequence[Tensor]:
    return [torch.cat(list(parts), dim=1)]


def _pad(weight: Shaped[Tensor, "*shape"], *, rows: int) -> Shaped[Tensor, "*padded"]:
    missing = rows - len(weight)
    return weight if missing == 0 else torch.cat([weight, weight.new_zeros(missing, *weight.shape[1:])])


def _unpad(weight: Shaped[Tensor, "*padded"], *, rows: int, what: str) -> Shaped[Tensor, "*shape"]:
    if weight[rows:].any():
        raise DataError(
            f"to_hf: got padding of the {what} that is not 0, expected it untouched by training. "
            "It took part in the model: mask ids beyond the vocabulary."
        )
    return weight[:rows]


def _check_weights(weights: Mapping[str, Tensor], shape: ModelShape) -> None:
    names = set(weights)
    if shape.is_tied and HEAD in names:
        if not torch.equal(weights[HEAD], weights[EMBEDDING]):
            raise DataError(
                f"to_shard: got {HEAD} other than {EMBEDDING}, expected one matrix for both in a tied model. "
                "Set tie_word_embeddings false in its configuration if they are two."
            )
        names.remove(HEAD)
    expected = hf_shapes(shape)
    check_names(names, set(expected), where="to_shard")
    wrong = [name for name, size in expected.items() if tuple(weights[name].shape) != size]
    if wrong:
        listed = ", ".join(f"{name} {tuple(weights[name].shape)} for {expected[name]}" for name in wrong)
        raise DataError(
            f"to_shard: got {listed}, expected the shapes that the configuration declares. Check the folder."
        )


def check_names(names: set[str], expected: set[str], *, where: str) -> None:
    """Raise DataError unless the names are exactly the expected ones."""
    missing, left_over = sorted(expected - names), sorted(names - expected)
    if missing or left_over:
        raise DataError(
            f"{where}: got weights without {missing} and with {left_over} left over, expected exactly those that the "
            "configuration declares. Weights and configuration are not of one model, or it has biases."
        )
