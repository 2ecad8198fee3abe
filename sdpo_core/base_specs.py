"""Frozen declarations of base weights: made by a warm-up, or placed in the store by the user. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from sdpo_core.spec_base import Fraction, Spec

# A folder of the user's own below `models` in the store; a digest as `sdpo doctor --weights FOLDER` prints it.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TokenizerSpec(Spec):
    """Vocabulary of a model the project makes itself: bytes, or a BPE learned from the warm-up prompts.

    `phrases`: texts that are one token each. The sentences that frame every prompt carry no information between
    prompts; as single tokens they leave a small model's few positions to what differs.
    """

    kind: Literal["byte", "bpe"]
    vocab_size: PositiveInt | None = None
    phrases: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _bpe_has_a_size(self) -> "TokenizerSpec":
        if (self.kind == "bpe") != (self.vocab_size is not None):
            raise ValueError("vocab_size belongs to kind 'bpe' and to no other")
        return self

    @property
    def largest_size(self) -> int:
        """Ids the vocabulary has at most: 256 bytes, three special tokens and the phrases, or what BPE may learn."""
        return (259 if self.vocab_size is None else self.vocab_size) + len(self.phrases)


class ShapeSpec(Spec):
    """Size of a Qwen3-shaped model."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_positions: PositiveInt


class WarmupSpec(Spec):
    """Supervised warm-up that makes a base model.

    The two shares are of examples with the plain prompt and with a demonstration; the rest shows feedback.
    """

    steps: PositiveInt
    examples_per_step: PositiveInt
    learning_rate: PositiveFloat
    lr_warmup_steps: int = Field(ge=0)
    plain_share: Fraction
    demonstration_share: Fraction
    seed: int

    @model_validator(mode="after")
    def _shares_fit(self) -> "WarmupSpec":
        if self.plain_share + self.demonstration_share > 1 + 1e-9:
            raise ValueError("plain_share and demonstration_share add up to more than 1")
        return self


class BaseSpec(Spec):
    """Base weights that a warm-up makes. `datasets`: whose prompts the tokenizer and the warm-up see."""

    kind: Literal["warmed_up"] = "warmed_up"
    name: str
    datasets: tuple[str, ...]
    tokenizer: TokenizerSpec
    shape: ShapeSpec
    warmup: WarmupSpec

    @property
    def largest_vocab(self) -> int:
        """Ids the vocabulary has at most."""
        return self.tokenizer.largest_size


class PlacedBaseSpec(Spec):
    """Base weights of a Hugging Face folder that the user places in the store under `models/<folder>`.

    `shape` and `vocab_size` (rows of the embedding) are what its config must say. `sha256`: what its weights must be;
    None takes those that are there, and cells are known by their digest all the same.
    """

    kind: Literal["placed"] = "placed"
    name: str
    folder: ModelName
    sha256: Sha256 | None = None
    shape: ShapeSpec
    vocab_size: PositiveInt

    @property
    def datasets(self) -> tuple[str, ...]:
        """Data sets that the weights are made from: none."""
        return ()

    @property
    def largest_vocab(self) -> int:
        """Ids the vocabulary has at most."""
        return self.vocab_size


def _kind(value: Any) -> str:
    """Records of before there were placed bases name no kind."""
    return str(value.get("kind", "warmed_up") if isinstance(value, dict) else value.kind)


AnyBaseSpec = Annotated[
    Annotated[BaseSpec, Tag("warmed_up")] | Annotated[PlacedBaseSpec, Tag("placed")], Discriminator(_kind)
]
