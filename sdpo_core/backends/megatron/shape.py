"""What a model is made of, read off its Hugging Face configuration; refuses what the layers here do not compute."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PretrainedConfig

from sdpo_core.errors import SpecError

Architecture = Literal["qwen3", "llama"]
ARCHITECTURES: tuple[Architecture, ...] = ("qwen3", "llama")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder with rotary positions, gated SiLU, RMS norms and no biases.

    `groups`: heads of keys and values. `has_qk_norm`: queries and keys are normalised head by head. `is_tied`: the
    embedding is the output projection too.
    """

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    is_tied: bool
    has_qk_norm: bool
    rope_base: float
    norm_eps: float
    max_positions: int

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.groups

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the embedding that `tensor` processes share out equally; no more than that needs."""
        return _next_multiple(self.vocab, tensor)

    def padded_groups(self, tensor: int) -> int:
        """Groups that `tensor` processes share out equally."""
        return _next_multiple(self.groups, tensor)

    def padded_heads(self, tensor: int) -> int:
        """Query heads of the padded groups."""
        return self.padded_groups(tensor) * self.heads_per_group


def model_shape(config: PretrainedConfig) -> ModelShape:
    """The shape of the model that a configuration declares.

    Raises:
        SpecError: the model computes something that the layers here do not; all reasons at once.
    """
    if config.model_type not in ARCHITECTURES:
        raise SpecError(
            f"megatron: got a model of type {config.model_type!r}, expected one of {', '.join(ARCHITECTURES)}. "
            "Use the backend 'hf'."
        )
    faults = list(_faults(config))
    if faults:
        raise SpecError(f"megatron: got {'; got '.join(faults)}. Use the backend 'hf'.")
    heads = config.num_attention_heads
    return ModelShape(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        groups=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        is_tied=bool(config.tie_word_embeddings),
        has_qk_norm=config.model_type == "qwen3",
        rope_base=float(config.rope_parameters["rope_theta"]),
        norm_eps=float(config.rms_norm_eps),
        max_positions=config.max_position_embeddings,
    )


def _faults(config: PretrainedConfig) -> Iterator[str]:
    if config.hidden_act != "silu":
        yield f"hidden_act {config.hidden_act!r}, expected 'silu'"
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            yield f"{name} true, expected linear maps without bias"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others or getattr(config, "sliding_window", None) is not None:
        yield f"layers of {', '.join(sorted(others)) or 'sliding attention'}, expected full attention in all of them"
    yield from _rope_faults(config.rope_parameters)
    groups = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % groups:
        yield f"{config.num_attention_heads} heads for {groups} groups, expected as many heads in each"


def _rope_faults(rope: dict[str, Any]) -> Iterator[str]:
    """megatron-core's llama3 scaling has fixed bounds, its other kinds differ from Hugging Face's: plain ones only."""
    kind = rope.get("rope_type", "default")
    if kind != "default":
        yield f"rotary positions scaled as {kind!r}, expected plain ones ('default')"
    if "rope_theta" not in rope:
        yield f"rotary positions without rope_theta ({rope}), expected one base for all layers"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {rope['partial_rotary_factor']}, expected 1: all of a head rotates"


def _next_multiple(count: int, divisor: int) -> int:
    return -(-count // divisor) * divisor
