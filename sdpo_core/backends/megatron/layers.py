"""The layers of a model: megatron-core's own, with torch where it has nothing that runs without TransformerEngine.

Its norm for plain torch refuses sequence parallelism, its attention context parallelism and packed sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sdpo_core.backends.megatron.names import Kernels
from sdpo_core.errors import SpecError
from sdpo_core.objectives.context_parallel import Zigzag


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Sequences one behind another; `lengths` on the host as well, where torch's attention wants them."""

    lengths: tuple[int, ...] = ()


def packed_rows(lengths: Sequence[int], *, device: torch.device) -> PackedRows:
    """What the attention is told of sequences of these lengths."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
    )


def layer_spec(config: TransformerConfig, *, kernels: Kernels = "torch") -> TransformerBlockSubmodules:
    """What the decoder is built of.

    Raises:
        SpecError: TransformerEngine is asked for and not installed.
    """
    if kernels == "transformer_engine":
        return _transformer_engine_spec(config)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = TorchRMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = TorchAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=TorchRMSNorm)


def _transformer_engine_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Not run by any test: it needs CUDA."""
    try:
        from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    except ImportError:
        HAVE_TE = False
    if not HAVE_TE:
        raise SpecError(
            "megatron: got kernels 'transformer_engine', expected TransformerEngine to be installed. "
            "Install it beside CUDA, or set kernels 'torch'."
        )
    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=TENorm)


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMS norm of a share of the positions or heads, whose weight says so: its gradient is then summed over tensor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchAttention(torch.nn.Module):
    """Causal attention of the heads of this process.

    Packed: each sequence attends to itself. Context parallel: keys and values of all its positions are gathered, and
    each of the process's two chunks of queries attends to those up to its own end.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.context = pg_collection.cp

    def forward(
        self,
        query: Float[Tensor, "position *row heads width"],
        key: Float[Tensor, "position *row groups width"],
        value: Float[Tensor, "position *row groups width"],
        attention_mask: None = None,
        *,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> Float[Tensor, "position rows column"]:
        if packed_seq_params is None:
            parts = self._sequence(query, key, value)
        else:
            parts = self._packed(query[:, None], key[:, None], value[:, None], packed_seq_params.lengths)
        return torch.cat(list(parts)).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        cuts = [length // self.context.size() for length in lengths]
        for each in zip(*(torch.split(side, cuts) for side in (query, key, value)), strict=True):
            yield from self._sequence(*each)

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        size, rank = self.context.size(), self.context.rank()
        if size == 1:
            yield self._attend(query, key, value)
            return
        layout = Zigzag(padded_length=len(query) * size, size=size)
        held = torch.cat([layout.positions(other) for other in range(size)])
        in_order = held.argsort().to(query.device)
        # Backward sums each process's gradients over the group and keeps its own positions.
        key, value = (
            gather_from_sequence_parallel_region(side, group=self.context).index_select(0, in_order)
            for side in (key, value)
        )
        for chunk, part in zip((rank, 2 * size - 1 - rank), query.chunk(2), strict=True):
            end = (chunk + 1) * layout.chunk
            yield self._attend(part, key[:end], value[:end])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The last query stands where the last key does."""
        is_square = len(query) == len(key)
        mask = None if is_square else causal_lower_right(len(query), len(key))
        query, key, value = (side.permute(1, 2, 0, 3) for side in (query, key, value))
        states = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_square,
            scale=self.scale,
            enable_gqa=True,
        )
        return states.permute(2, 0, 1, 3)
