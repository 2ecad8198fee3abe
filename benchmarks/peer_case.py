"""What the two sides of `benchmarks/peer_trl.py` share: sizes, model folder, prompts, reward, numbers."""

import itertools
import json
import string
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.records import Message, Problem
from sdpo_core.text import ChatTokenizer, build_tokenizer

WORDS = ("sun", "river", "window", "candle", "forest", "marble", "thunder", "pocket")
ALPHA, TOP_K, EMA_RATE, LEARNING_RATE = 0.5, 20, 0.05, 1e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of one side."""

    arm: str
    folder: str
    steps: int
    warmup: int
    problems: int
    rollouts: int
    response_tokens: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """CPU seconds of each step that counts and those of its sampling, tokens of each, the process's peak memory."""

    seconds: list[float]
    sampling: list[float]
    tokens: list[float]
    peak_bytes: int


def make_folder(folder: Path, *, hidden: int, layers: int, vocab: int) -> None:
    """A random model; its tokenizer reads bytes, and each further id writes three letters."""
    build_tokenizer(TokenizerSpec(kind="byte"), texts=()).save(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    letters = itertools.product(string.ascii_letters + string.digits, repeat=3)
    ids |= {"".join(name): index for index, name in zip(range(len(ids), vocab), letters, strict=False)}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    text = ChatTokenizer.load(folder)
    assert text.vocab_size == vocab, text.vocab_size
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(8, hidden // 4),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=text.end_id,
        pad_token_id=text.pad_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def questions() -> list[str]:
    """64 prompts of similar length."""
    return [f"Spell this word backward: {first}{second}" for first in WORDS for second in WORDS]


def problem(index: int, question: str) -> Problem:
    """The question as a row without anything else."""
    return Problem(
        id=str(index),
        prompt=(Message(role="user", content=question),),
        label="",
        dataset="bench",
        task="bench",
        domain="",
        split="train",
        group_key=str(index),
        reference={},
        source={},
        details={},
    )


def reward(response: str) -> float:
    """1 for about half of all texts."""
    return float(zlib.crc32(response.encode()) % 2 == 0)


def answer(run: Callable[[Case], Run]) -> None:
    """Run the case that the command line holds, and write what was found as the last line."""
    found = run(Case(**json.loads(sys.argv[1])))
    sys.stdout.write("\n" + json.dumps(asdict(found)) + "\n")
