"""A Hugging Face folder seen from outside: is it one, which vocabulary has it, which weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from sdpo_core.backends.hf_model import HfModel
from sdpo_core.errors import DataError
from sdpo_core.fingerprint import digest
from sdpo_core.text import ChatTokenizer


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


def require_model(folder: Path, *, advice: str) -> None:
    """Raise DataError with `advice` unless `folder` holds config, tokenizer and safetensors."""
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("safetensors")
    if missing:
        raise DataError(
            f"model {folder}: got no {', no '.join(missing)}, expected a Hugging Face folder with all of it. {advice}"
        )


def vocabulary(folder: Path, *, thinking: bool) -> Vocabulary:
    """The vocabulary of a folder; `thinking` as in `TrainingSpec`."""
    text = ChatTokenizer.load(folder, thinking=thinking)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    added = {str(key): (token.content, token.special) for key, token in tokenizer.added_tokens_decoder.items()}
    return Vocabulary(
        tokens=digest(tokenizer.get_vocab()), added_tokens=digest(added), end_id=text.end_id, header_ids=text.header_ids
    )


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights as a worker of the `hf` backend holds them: float32, tied ones once."""
    require_model(folder, advice="Name another folder.")
    valid_vocab = ChatTokenizer.load(folder).vocab_size
    model = HfModel(folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=valid_vocab)
    return model.facts().weights_sha256
