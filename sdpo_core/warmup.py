"""Supervised warm-up: makes the base weights of a profile's own small model.

The examples come in from outside. What matters for SDPO is that a model warmed up with demonstrations in its prompt is
better with one than without: that gap is what the teacher has and the student has not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core import random_streams
from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.hf_model import HfModel, microbatches, weights_sha256
from sdpo_core.base_specs import BaseSpec
from sdpo_core.errors import CellError
from sdpo_core.records import Message, WarmupExample
from sdpo_core.teacher.context import TeacherContext, teacher_messages
from sdpo_core.text import ChatTokenizer, build_tokenizer

_TOKENIZER_EXAMPLES = 4000
_MICROBATCH_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupOutcome:
    """What the warm-up made. `losses`: nats a response token, one entry a step."""

    weights_sha256: str
    parameters: int
    vocab_size: int
    seconds: float
    losses: tuple[float, ...]


def warm_up(
    spec: BaseSpec, *, examples: Callable[[str], Iterator[WarmupExample]], folder: Path, threads: int
) -> WarmupOutcome:
    """Make tokenizer and model of `spec` in `folder` (Hugging Face form).

    `examples(purpose)` gives an endless stream, the same for the same purpose.
    """
    start = time.monotonic()
    torch.set_num_threads(threads)
    text = _tokenizer(spec, examples("tokenizer"))
    folder.mkdir(parents=True, exist_ok=True)
    text.save(folder)
    _initial_model(spec, text=text).save_pretrained(folder)
    model = HfModel(folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=text.vocab_size)
    losses = _train(spec, model=model, text=text, examples=examples("training"))
    model.model.save_pretrained(folder)
    weights = model.weights()
    return WarmupOutcome(
        weights_sha256=weights_sha256(weights),
        parameters=sum(tensor.numel() for tensor in weights.values()),
        vocab_size=text.vocab_size,
        seconds=time.monotonic() - start,
        losses=tuple(losses),
    )


def example_messages(example: WarmupExample) -> tuple[Message, ...]:
    """The prompt of an example: the problem's own, or the teacher's with the example's context."""
    if example.demonstration is None and example.feedback is None:
        return example.problem.prompt
    context = TeacherContext(demonstration=example.demonstration, feedback=example.feedback)
    return teacher_messages(example.problem, context)


def _tokenizer(spec: BaseSpec, examples: Iterator[WarmupExample]) -> ChatTokenizer:
    def texts() -> Iterator[str]:
        for _ in range(_TOKENIZER_EXAMPLES):
            example = next(examples)
            yield from (turn.content for turn in example_messages(example))
            yield example.response

    return build_tokenizer(spec.tokenizer, texts=texts() if spec.tokenizer.kind == "bpe" else ())


def _initial_model(spec: BaseSpec, *, text: ChatTokenizer) -> Qwen3ForCausalLM:
    shape = spec.shape
    torch.manual_seed(random_streams.stream_key(spec.warmup.seed, random_streams.INITIALISATION) % 2**63)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=text.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=text.end_id,
            pad_token_id=text.pad_id,
        )
    )


def _train(spec: BaseSpec, *, model: HfModel, text: ChatTokenizer, examples: Iterator[WarmupExample]) -> list[float]:
    warmup = spec.warmup
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=warmup.learning_rate, betas=(0.9, 0.99))
    losses = []
    for step in range(warmup.steps):
        rows = [_row(next(examples), text=text) for _ in range(warmup.examples_per_step)]
        loss = _accumulate(model, rows)
        norm = torch.nn.utils.clip_grad_norm_(model.model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise CellError(
                f"warm-up {spec.name}: got gradient norm {float(norm)} and loss {loss} at step {step + 1}, expected "
                "finite numbers. Lower its learning rate."
            )
        for group in optimizer.param_groups:
            group["lr"] = warmup.learning_rate * _schedule(step, warmup.steps, warmup.lr_warmup_steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
    return losses


def _row(example: WarmupExample, *, text: ChatTokenizer) -> TokenRow:
    return TokenRow(
        prompt_ids=text.prompt_ids(example_messages(example)), response_ids=text.response_ids(example.response)
    )


def _accumulate(model: HfModel, rows: Sequence[TokenRow]) -> float:
    """Backward of the mean cross-entropy over all response tokens; the mean itself."""
    total = sum(len(row.response_ids) for row in rows)
    loss = 0.0
    for batch in microbatches(rows, max_tokens=_MICROBATCH_TOKENS):
        part = [rows[index] for index in batch]
        targets = torch.tensor([token for row in part for token in row.response_ids], device=model.device)
        value = (
            torch.nn.functional.cross_entropy(model.logits(model.response_states(part)), targets, reduction="sum")
            / total
        )
        value.backward()  # type: ignore[no-untyped-call]
        loss += float(value.detach())
    return loss


def _schedule(step: int, steps: int, warm: int) -> float:
    """Linear rise over `warm` steps, then linear fall to a tenth."""
    return min(1.0, (step + 1) / (warm + 1)) * (1 - 0.9 * step / steps)
