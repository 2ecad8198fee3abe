"""What a scoring request asks of each response token: `sampling_params.custom_params["score"]`, checked.

    {"ids": base64 of little-endian int32 [R, K], "k": K, "start": P - 1, "temperature": T, "top_k": 0, "best": false}

Row t is about response token t, which the logits at position P - 1 + t predict. All R = len(input_ids) - P rows are
asked.
"""

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIELDS = frozenset({"ids", "k", "start", "temperature", "top_k", "best"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """`ids` [R, K] and `own` [R], the response's tokens, are int64; `best` asks for the server's `top_k` best ids."""

    ids: Tensor
    own: Tensor
    temperature: float
    top_k: int
    best: bool

    @property
    def has_overlap(self) -> bool:
        return self.top_k > 0 and self.ids.shape[1] > 0

    @property
    def num_columns(self) -> int:
        """Of the answer; see `answer.score_rows`."""
        return self.ids.shape[1] + 3 + self.has_overlap + (1 + self.top_k if self.best else 0)


def parse(score: Mapping[str, Any], *, input_ids: Sequence[int], vocab: int) -> Question:
    """The question of a request over `vocab` ids.

    Raises:
        ValueError: it is malformed; SGLang answers it with HTTP 400.
    """
    if set(score) != FIELDS:
        raise ValueError(f"score: got fields {sorted(score)}, expected {sorted(FIELDS)}.")
    k, start, top_k, best = (score[name] for name in ("k", "start", "top_k", "best"))
    temperature = score["temperature"]
    if any(type(value) is not int or value < 0 for value in (k, start, top_k)) or type(best) is not bool:
        raise ValueError(
            f"score: got k {k!r}, start {start!r}, top_k {top_k!r}, best {best!r}, expected whole numbers."
        )
    if type(temperature) not in (int, float) or not (0 < temperature < math.inf):
        raise ValueError(f"score: got temperature {temperature!r}, expected a number above 0.")
    if top_k > vocab or (best and top_k == 0):
        raise ValueError(f"score: got top_k {top_k} with best {best}, expected at most {vocab}, and 1 for best.")
    rows = len(input_ids) - 1 - start
    if rows < 1:
        raise ValueError(f"score: got start {start} for {len(input_ids)} tokens, expected a response after it.")
    return Question(
        ids=_ids(score["ids"], rows=rows, k=k, vocab=vocab),
        own=_valid(torch.tensor(list(input_ids)[start + 1 :]), vocab=vocab),
        temperature=float(temperature),
        top_k=top_k,
        best=best,
    )


def _ids(text: object, *, rows: int, k: int, vocab: int) -> Tensor:
    if not isinstance(text, str):
        raise ValueError(f"score: got ids of type {type(text).__name__}, expected base64.")
    try:
        raw = bytearray(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise ValueError(f"score: got ids that are no base64 ({error}), expected base64.") from error
    if len(raw) != 4 * rows * k:
        raise ValueError(f"score: got {len(raw)} bytes of ids, expected {4 * rows * k} ({rows} rows of {k} int32).")
    if not raw:
        return torch.zeros(rows, 0, dtype=torch.int64)
    return _valid(torch.frombuffer(raw, dtype=torch.int32).to(torch.int64).view(rows, k), vocab=vocab)


def _valid(ids: Tensor, *, vocab: int) -> Tensor:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise ValueError(f"score: got id {low if low < 0 else high}, expected 0 to {vocab - 1}.")
    return ids
