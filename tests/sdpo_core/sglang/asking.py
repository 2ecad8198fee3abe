"""Scoring requests as they travel, and what must come back, in float64 from the logits of Hugging Face."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sdpo_core.sglang.server import ManagedServer


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A prompt of `prompt` tokens, a response of `response` tokens, `k` ids at each of them; all drawn by `seed`."""

    prompt: int
    response: int
    k: int
    temperature: float = 1.0
    top_k: int = 0
    best: bool = False
    seed: int = 0

    def draw(self, vocab: int) -> tuple[list[int], np.ndarray]:
        """The tokens of prompt and response, and distinct ids for each row."""
        generator = np.random.default_rng(self.seed)
        tokens = generator.integers(0, vocab, self.prompt + self.response).tolist()
        ids = np.stack([generator.permutation(vocab)[: self.k] for _ in range(self.response)])
        return tokens, ids.astype("<i4")

    @property
    def num_columns(self) -> int:
        return self.k + 3 + (self.top_k > 0 and self.k > 0) + (1 + self.top_k if self.best else 0)


def body_of(ask: Ask, tokens: Sequence[int], ids: np.ndarray) -> dict[str, Any]:
    score = {
        "ids": base64.b64encode(ids.tobytes()).decode(),
        "k": ask.k,
        "start": ask.prompt - 1,
        "temperature": ask.temperature,
        "top_k": ask.top_k,
        "best": ask.best,
    }
    return {
        "input_ids": list(tokens),
        "sampling_params": {"max_new_tokens": 0, "custom_params": {"score": score}},
        "return_logprob": True,
        "logprob_start_len": ask.prompt - 1,
        "top_logprobs_num": ask.num_columns,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }


def post(server: ManagedServer, body: Any, *, path: str = "/generate", token: str | None = None) -> tuple[int, Any]:
    """Status and answer; the text of a refusal."""
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {server.token if token is None else token}",
            "Content-Type": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answer(server: ManagedServer, ask: Ask, *, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and ids of the columns."""
    status, found = post(server, body_of(ask, *ask.draw(vocab)))
    assert status == 200, found
    meta = found["meta_info"]
    shape = meta["input_top_logprobs_shape"]
    values = np.frombuffer(base64.b64decode(meta["input_top_logprobs_val_flat_b64"]), "<f4").reshape(shape)
    ids = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), "<i4").reshape(shape)
    return values, ids


class Oracle:
    """Columns in float64, from the logits of the same model in the float32 that the server runs it in.

    The model in float64 has log-probabilities up to 2.5e-5 from these (temperature 0.5), in Hugging Face too.
    """

    def __init__(self, folder: Path, *, vocab: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._vocab = vocab

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Of every position, over the valid ids."""
        found: np.ndarray = self._model(torch.tensor([list(tokens)])).logits[0, :, : self._vocab].double().numpy()
        return found

    def columns(self, ask: Ask) -> tuple[np.ndarray, np.ndarray]:
        """Values and ids of the columns, one row at a time."""
        tokens, given = ask.draw(self._vocab)
        rows = []
        for step, logits in enumerate(self.logits(tokens)[ask.prompt - 1 : -1]):
            logps = logits / ask.temperature - np.logaddexp.reduce(logits / ask.temperature)
            own, ids = tokens[ask.prompt + step], given[step].tolist()
            row = [(logps[token], token) for token in ids]
            row += [(_tail(logps, ids), -1), (logps[own], own), (-np.sum(np.exp(logps) * logps), -2)]
            best = sorted(range(self._vocab), key=lambda token: (-logits[token], token))[: ask.top_k]
            if ask.top_k and ids:
                first = ids[: ask.top_k]
                row.append((len(set(first) & set(best)) / len(first), -3))
            if ask.best:
                row.append((_tail(logps, [*ids, *best]), -4))
                row += [(logps[token], token) for token in best]
            rows.append(row)
        table = np.array(rows)
        return table[:, :, 0], table[:, :, 1].astype(int)


def _tail(logps: np.ndarray, ids: Sequence[int]) -> float:
    outside = np.delete(logps, list(ids))
    return float(np.logaddexp.reduce(outside)) if len(outside) else -np.inf
