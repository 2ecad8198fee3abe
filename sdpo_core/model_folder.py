"""A Hugging Face folder seen from outside: is it one, which model, which vocabulary, which weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sdpo_core.backends.hf_model import HfModel, weights_sha256
from sdpo_core.base_specs import PlacedBaseSpec
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import digest
from sdpo_core.journal import read_json
from sdpo_core.text import ChatTokenizer

# Field of `ShapeSpec` to that of a config.
_SHAPE = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What two models must share for ids to travel between them.

    `tokens`: digest of every token with its id; `added_tokens`: of those beside the learned ones, and which are
    special; `end_id`, `header_ids`: how a turn ends, and how the chat template opens the assistant's.
    """

    tokens: str
    added_tokens: str
    end_id: int
    header_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What is known of a folder's model without loading it. `vocab_size`: ids of its tokenizer."""

    weights_sha256: str
    parameters: int
    vocab_size: int


def require_model(folder: Path, *, advice: str) -> None:
    """Raise DataError with `advice` unless `folder` holds config, tokenizer and safetensors."""
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("safetensors")
    if missing:
        raise DataError(
            f"model {folder}: got no {', no '.join(missing)}, expected a Hugging Face folder with all of it. {advice}"
        )


def architecture(folder: Path) -> str:
    """What the model in `folder` calls its kind."""
    return str(read_json(folder / "config.json").get("model_type"))


def vocabulary(folder: Path, *, thinking: bool) -> Vocabulary:
    """The vocabulary of a folder; `thinking` as in `TrainingSpec`."""
    text = ChatTokenizer.load(folder, thinking=thinking)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    added = {str(key): (token.content, token.special) for key, token in tokenizer.added_tokens_decoder.items()}
    return Vocabulary(
        tokens=digest(tokenizer.get_vocab()), added_tokens=digest(added), end_id=text.end_id, header_ids=text.header_ids
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights as a worker in float32 holds them, tied ones once: see `weights_sha256`."""
    require_model(folder, advice="Name another folder.")
    parameters, files = _parameter_sizes(folder), _tensor_files(folder)
    if parameters.keys() <= files.keys():
        return weights_sha256(_TensorsOfFiles({name: files[name] for name in parameters}))
    # The files name the weights in another way than the model does: only loading it brings them together.
    valid_vocab = ChatTokenizer.load(folder).vocab_size
    model = HfModel(folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=valid_vocab)
    return model.facts().weights_sha256


def placed_model(folder: Path, spec: PlacedBaseSpec) -> ModelFacts:
    """The model that the user placed, found as declared.

    Raises:
        DataError: it is not there, or is another one; with everything that is different.
    """
    require_model(folder, advice=f"Place {spec.name} there, as its hub has it.")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    declared = {_SHAPE[name]: value for name, value in spec.shape.model_dump().items()}
    declared["vocab_size"] = spec.vocab_size
    found = {name: getattr(config, name, None) for name in declared}
    faults = [f"{name} {found[name]} for {declared[name]}" for name in declared if found[name] != declared[name]]
    vocab_size = ChatTokenizer.load(folder).vocab_size
    if vocab_size > spec.vocab_size:
        faults.append(f"a tokenizer of {vocab_size} ids for {spec.vocab_size} rows of the embedding")
    if not faults:
        sha256 = weights_digest(folder)
        if spec.sha256 in (None, sha256):
            sizes = _parameter_sizes(folder)
            return ModelFacts(weights_sha256=sha256, parameters=sum(sizes.values()), vocab_size=vocab_size)
        faults.append(f"weights {sha256} for {spec.sha256}")
    raise DataError(
        f"model {folder}: got {', '.join(faults)}, expected {spec.name} as the profile declares it. "
        "Place the declared model there, or declare this one under a name of its own."
    )


class _TensorsOfFiles(Mapping[str, Tensor]):
    """Tensors by name, each read from its file when it is asked for: a large model is never in memory as a whole."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor to the file that holds it: one file, or those of an index."""
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if not whole.is_file() and index.is_file():
        return {name: folder / part for name, part in read_json(index)["weight_map"].items()}
    with safe_open(whole, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), whole)


def _parameter_sizes(folder: Path) -> dict[str, int]:
    """Name of each parameter of the model to its number of values; tied ones once. Nothing is allocated."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
