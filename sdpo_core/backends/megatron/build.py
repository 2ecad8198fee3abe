"""A model cut over the processes of a layout, as megatron-core's GPT up to its final hidden states."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from sdpo_core.backends.megatron.groups import Groups, initialise
from sdpo_core.backends.megatron.layers import layer_spec, packed_rows
from sdpo_core.backends.megatron.names import check_names, check_tensor
from sdpo_core.backends.megatron.shape import ModelShape
from sdpo_core.errors import DataError, SpecError
from sdpo_core.layout import LayoutSpec
from sdpo_core.objectives.context_parallel import Zigzag

VALUE_HEAD = "value_head"
DTYPES = (torch.float32, torch.bfloat16)


def build_model(
    shape: ModelShape, layout: LayoutSpec, *, dtype: torch.dtype, device: torch.device, value_head: bool = False
) -> "RowGPT":
    """This process's share of a model, all zeros; the processes of the layout call it together.

    Raises:
        SpecError: the model does not divide over the layout, there are other processes, `dtype` is another, or `device`
            is not where megatron-core allocates.
    """
    if dtype not in DTYPES:
        raise SpecError(f"megatron: got dtype {dtype}, expected one of {', '.join(map(str, DTYPES))}. Choose one.")
    check_tensor(shape, tensor=layout.tensor)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    if device.type != place:
        raise SpecError(
            f"megatron: got device {device}, expected {place!r}: megatron-core allocates there. "
            "To run without CUDA where it is, hide its devices."
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    groups = initialise(layout, device=device)
    model = RowGPT(shape, layout, groups=groups, dtype=dtype, has_value_head=value_head)
    # Kept in training: recomputation happens there alone, and dropout is 0.
    nn.Module.to(model, device).train()
    # Its frequencies move at the first call: now, so that they are no tensor of inference mode.
    model.rotary_pos_emb.get_emb(1)
    return model


class RowGPT(GPTModel):  # type: ignore[misc]
    """megatron-core's GPT without logits: `forward` ends at the final norm, before head and gathering.

    `value_head`: a linear map of hidden states that every tensor parallel process holds whole, zeros at first; or None.
    """

    def __init__(
        self, shape: ModelShape, layout: LayoutSpec, *, groups: Groups, dtype: torch.dtype, has_value_head: bool
    ) -> None:
        config = transformer_config(shape, layout, dtype=dtype)
        super().__init__(
            config,
            layer_spec(config, kernels=layout.kernels),
            vocab_size=shape.padded_vocab(layout.tensor),
            max_sequence_length=shape.max_positions,
            position_embedding_type="rope",
            rotary_base=shape.rope_base,
            share_embeddings_and_output_weights=shape.is_tied,
        )
        self.shape, self.layout, self.groups = shape, layout, groups
        self.value_head: nn.Linear | None = None
        if has_value_head:
            self.value_head = nn.Linear(shape.hidden, 1, dtype=dtype)
            for parameter in self.value_head.parameters():
                nn.init.zeros_(parameter)

    def forward(
        self, ids: Int[Tensor, "row position"], lengths: Sequence[int] | None = None
    ) -> Float[Tensor, "held row hidden"]:
        """Final hidden states of the positions that this process holds.

        Args:
            ids: [row, position] the positions of this context parallel process, padded on the right alone: rotary
                positions count from the start. With `sequence`, `tensor` divides their number.
            lengths: of the whole sequences whose positions here stand one behind another in a single row; None: each
                row is one.

        Returns:
            [held, row, hidden] of all these positions; with `sequence`, of this process's equal share of them.
        """
        size = self.groups.context.size()
        packed = None if lengths is None else packed_rows(lengths, device=ids.device)
        longest = ids.shape[1] * size if lengths is None else max(lengths)
        rotary = self.rotary_pos_emb.get_emb(longest)
        if size > 1 and packed is None:
            held = Zigzag(padded_length=longest, size=size).positions(self.groups.context.rank())
            rotary = rotary.index_select(0, held.to(rotary.device))
        states: Tensor = self.decoder(
            hidden_states=self.embedding(input_ids=ids, position_ids=None),
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=packed,
        )
        return states

    def head_weight(self) -> nn.Parameter:
        """This process's rows of the output projection, padding included."""
        weight: nn.Parameter = (
            self.shared_embedding_or_output_weight() if self.shape.is_tied else self.output_layer.weight
        )
        return weight

    def shard_parameters(self) -> dict[str, nn.Parameter]:
        """This process's share of the weights by the names of `to_shard`; the value head is none of them."""
        return {name: parameter for name, parameter in self.named_parameters() if not name.startswith(f"{VALUE_HEAD}.")}

    @torch.no_grad()
    def load_shard(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a share of `to_shard` into the parameters.

        Raises:
            DataError: a parameter is missing, left over or of another shape.
        """
        own = self.shard_parameters()
        check_names(set(weights), set(own), where="load_shard")
        wrong = [name for name, parameter in own.items() if parameter.shape != weights[name].shape]
        if wrong:
            raise DataError(f"load_shard: got other shapes of {wrong}, expected a share of this layout. Cut it anew.")
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def transformer_config(shape: ModelShape, layout: LayoutSpec, *, dtype: torch.dtype) -> TransformerConfig:
    """megatron-core's settings for a model on a layout."""
    is_recomputed = layout.recompute
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.padded_heads(layout.tensor),
        num_query_groups=shape.padded_groups(layout.tensor),
        kv_channels=shape.head_dim,
        qk_layernorm=shape.has_qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        sequence_parallel=layout.sequence,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are loaded, but building must not leave out initialisation: it is what marks a parameter as a share,
        # and without the mark the gradient norm counts one process's share alone.
        use_cpu_initialization=True,
        perform_initialization=True,
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
        # Gradients are summed over processes: the objective's weights hold the denominators.
        calculate_per_token_loss=True,
        recompute_granularity="full" if is_recomputed else None,
        recompute_method="uniform" if is_recomputed else None,
        recompute_num_layers=1 if is_recomputed else None,
        # Fusions want CUDA or Apex.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
