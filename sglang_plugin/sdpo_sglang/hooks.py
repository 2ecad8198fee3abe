"""Where SGLang calls this package: hooks around functions of its own, through its facility for plugins.

- A request with `custom_params["score"]` (see `question`) gets, in place of the top log-probabilities of its input, the
  columns of `answer`. Its number of top log-probabilities becomes an int that carries the question: it travels where
  the number does.
- Ids that the tokenizer does not have (padding of the vocabulary, from SDPO_SGLANG_VALID_VOCAB on) get no probability:
  logits -inf, in sampling and in every log-probability.
- A server whose memory is released takes no request (see `asleep`).
- The store through which the scheduler's processes find each other listens on the loopback interface alone. It does not
  ask who connects, and torch lets it listen on all.

Written for SGLang 0.5.23. Whoever asks must check the ids of the answer: a server without this package answers with its
own best ids.
"""

import inspect
import os
import pkgutil
import socket
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sdpo_sglang.answer import score_rows
from sdpo_sglang.asleep import fall_asleep, is_asleep, wake_up
from sdpo_sglang.question import Question, parse

VOCAB_VARIABLE = "SDPO_SGLANG_VALID_VOCAB"
POSITIONS_VARIABLE = "SDPO_SGLANG_POSITIONS"
# What SGLang takes for a request that does not say.
_SGLANG_NEW_TOKENS = 128


class Asked(int):
    """A number of top log-probabilities that carries what to answer instead, from row `first` of the question on."""

    question: Question
    first: int
    vocab: int


def check_request(
    original: Callable[..., Any],
    manager: Any,
    request: Any,
    input_text: Any,
    input_ids: list[int] | None,
    *arguments: Any,
    **named: Any,
) -> Any:
    """Refuse what the scheduler could not serve: a ValueError here is HTTP 400, an exception there ends the server."""
    if is_asleep(manager):
        raise ValueError("got a request, expected none: the server sleeps. Wake it and send it weights first.")
    parameters = getattr(request, "sampling_params", None)
    if input_ids and isinstance(parameters, dict):
        vocab = valid_vocab(manager.model_config.vocab_size)
        if not (min(input_ids) >= 0 and max(input_ids) < vocab):
            raise ValueError(f"input_ids: got ids {min(input_ids)} to {max(input_ids)}, expected 0 to {vocab - 1}.")
        _check_length(len(input_ids), parameters)
        score = _score_of(parameters.get("custom_params"))
        if score is not None:
            _check_score(request, score, input_ids=input_ids, vocab=vocab)
    return original(manager, request, input_text, input_ids, *arguments, **named)


def _check_length(num_inputs: int, parameters: dict[str, Any]) -> None:
    """The server's context is a few tokens longer than the model, so that an input may fill the model's positions."""
    positions = os.environ.get(POSITIONS_VARIABLE)
    new = parameters.get("max_new_tokens", _SGLANG_NEW_TOKENS)
    if positions is not None and (new is None or num_inputs + new > int(positions)):
        raise ValueError(f"max_new_tokens: got {new} after {num_inputs} tokens, expected {positions} at most in all.")


def _check_score(request: Any, score: Any, *, input_ids: list[int], vocab: int) -> None:
    if not isinstance(score, dict):
        raise ValueError(f"score: got {type(score).__name__}, expected an object.")
    question = parse(score, input_ids=input_ids, vocab=vocab)
    wanted = {
        "return_logprob": True,
        "logprob_start_len": score["start"],
        "top_logprobs_num": question.num_columns,
    }
    found = {name: getattr(request, name) for name in wanted}
    if found != wanted or request.sampling_params.get("max_new_tokens") != 0:
        raise ValueError(f"score: got {found}, expected {wanted} and max_new_tokens 0.")


def attach_questions(_result: Any, batch: Any) -> None:
    """After a batch is prepared: put each request's question where its number of top log-probabilities stands."""
    if not batch.return_logprob:
        return
    for index, request in enumerate(batch.reqs):
        score = _score_of(request.sampling_params.custom_params)
        if score is None:
            continue
        asked = Asked(batch.top_logprobs_nums[index])
        asked.vocab = valid_vocab(batch.model_config.vocab_size)
        asked.question = parse(score, input_ids=request.origin_input_ids, vocab=asked.vocab)
        asked.first = batch.prefix_lens[index] + batch.extend_logprob_start_lens[index] - score["start"]
        batch.top_logprobs_nums[index] = asked


def answer_questions(
    original: Callable[..., int],
    logprobs: Tensor,
    top_k_nums: list[int],
    pruned_lens: list[int],
    top_logprobs_val: list[list[Any]],
    top_logprobs_idx: list[list[Any]],
    split_pruned_len: int,
    **named: Any,
) -> int:
    """Around the top log-probabilities of a chunk of rows: write the answers over those of requests with a question.

    `split_pruned_len`: rows of the chunk's first request that earlier chunks held.
    """
    base = len(top_logprobs_val) - (split_pruned_len > 0)
    next_split = original(
        logprobs, _plain(top_k_nums), pruned_lens, top_logprobs_val, top_logprobs_idx, split_pruned_len, **named
    )
    begin = 0
    for index, (asked, length) in enumerate(zip(top_k_nums, pruned_lens, strict=True)):
        done = split_pruned_len if index == 0 else 0
        rows = logprobs[begin : begin + max(length - done, 0)]
        begin += max(length - done, 0)
        if len(rows) and isinstance(asked, Asked):
            values, ids = score_rows(rows, asked.question, first=asked.first + done, vocab=asked.vocab)
            if named.get("copy_to_pinned_cpu"):
                # Then SGLang holds one tensor a span of rows, and reads it when the copy is done.
                from sglang.srt.utils.common import async_d2h

                top_logprobs_val[base + index][-1:] = [async_d2h(values)]
                top_logprobs_idx[base + index][-1:] = [async_d2h(ids)]
            else:
                top_logprobs_val[base + index][-len(rows) :] = values.tolist()
                top_logprobs_idx[base + index][-len(rows) :] = ids.tolist()
    return next_split


def plain_numbers(
    original: Callable[..., Any], logprobs: Tensor, top_logprobs_nums: list[int], *arguments: Any, **named: Any
) -> Any:
    """Around the top log-probabilities of what is sampled: a question is about the input, and may be wider than V."""
    return original(logprobs, _plain(top_logprobs_nums), *arguments, **named)


def mask_padding(logits: Tensor, processor: Any, *_arguments: Any, **_named: Any) -> Tensor:
    """After the projection: no probability for ids that the tokenizer does not have."""
    logits[:, valid_vocab(processor.vocab_size) :] = float("-inf")
    return logits


def host_on_loopback(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: Any,
    use_libuv: bool = True,
) -> Any:
    """Around torch's rendezvous: the first process hosts the store where the others look for it, and nowhere else."""
    if rank != 0 or hostname != _LOOPBACK:
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.create_server((hostname, port)) as listener:
        return TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
            use_libuv=use_libuv,
        )


def valid_vocab(size: int) -> int:
    """Ids of the tokenizer, of a model with `size` rows in its head."""
    declared = int(os.environ.get(VOCAB_VARIABLE, size))
    if not 0 < declared <= size:
        raise ValueError(f"{VOCAB_VARIABLE}: got {declared}, expected 1 to {size}, the rows of the model's head.")
    return declared


def _plain(numbers: list[int]) -> list[int]:
    return [1 if isinstance(number, Asked) else number for number in numbers]


def _score_of(custom: Any) -> Any:
    return custom.get("score") if isinstance(custom, dict) else None


_LOOPBACK = "127.0.0.1"
_MANAGERS = "sglang.srt.managers"
_CONTROL = f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin"
_LOGPROBS = "sglang.srt.layers.logprob_processor"
# Target, hook, its kind, and the parameters that it relies on.
HOOKS: tuple[tuple[str, Callable[..., Any], str, tuple[str, ...]], ...] = (
    (
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._create_tokenized_object",
        check_request,
        "AROUND",
        ("input_ids",),
    ),
    (f"{_CONTROL}.release_memory_occupation", fall_asleep, "AROUND", ("obj",)),
    (f"{_CONTROL}.resume_memory_occupation", wake_up, "AROUND", ()),
    (f"{_MANAGERS}.schedule_batch.ScheduleBatch.prepare_for_extend", attach_questions, "AFTER", ()),
    (
        f"{_LOGPROBS}.get_top_logprobs_chunk",
        answer_questions,
        "AROUND",
        ("logprobs", "top_k_nums", "pruned_lens", "top_logprobs_val", "top_logprobs_idx", "split_pruned_len"),
    ),
    (f"{_LOGPROBS}.get_top_logprobs_raw", plain_numbers, "AROUND", ("logprobs", "top_logprobs_nums")),
    ("sglang.srt.layers.logits_processor.LogitsProcessor._get_logits", mask_padding, "AFTER", ("hidden_states",)),
    ("torch.distributed.rendezvous._create_c10d_store", host_on_loopback, "AROUND", ("hostname", "port", "rank")),
)


def register() -> None:
    """Entry point of group sglang.srt.plugins, called in each of SGLang's processes.

    Raises:
        SystemExit: this SGLang has other functions. SGLang logs other exceptions, and then serves without the hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind, relied_on in HOOKS:
        try:
            found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        except (ImportError, AttributeError) as error:
            raise SystemExit(f"sdpo_sglang: got no {target} ({error}), expected SGLang 0.5.23.") from error
        if not set(relied_on) <= set(found):
            raise SystemExit(f"sdpo_sglang: got {target}{found}, expected parameters {relied_on} of SGLang 0.5.23.")
        HookRegistry.register(target, hook, HookType[kind])
