"""What is asked of an SGLang server and what it answers: JSON there and back, every answer held against its question.

Torch-free. Ids travel, never text. An answer that does not fit is a DataError; nothing is put in its place.
"""

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sdpo_core.errors import DataError
from sdpo_core.records import Finish

Json = dict[str, Any]

# Of the answer's columns that are no id of the vocabulary (sglang_plugin).
TAIL, ENTROPY, OVERLAP, BEST_TAIL = -1, -2, -3, -4
# Nats. A float32 log-softmax over 152k ids sums to 1 within 2e-5.
_MASS_SLACK = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One response to sample: plain sampling, no top-p and no top-k.

    `seed` (63 bits) decides the draws on a deterministic server. `end_id` ends the response and is its last id; `stop`:
    texts that end it too.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_new_tokens: int
    end_id: int
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.max_new_tokens < 1 or not 0 < self.temperature < math.inf:
            raise DataError(
                f"GenerateRequest: got {len(self.prompt_ids)} prompt ids, temperature {self.temperature} and at most "
                f"{self.max_new_tokens} new tokens, expected each above 0. Render the prompt with the chat template."
            )
        if not 0 <= self.seed < 2**63:
            raise DataError(f"GenerateRequest: got seed {self.seed}, expected 63 bits. Take it modulo 2**63.")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateAnswer:
    """`logps` at the sampling temperature; `matched`: the stop text that ended it, else None.

    `weights`: the tag of the weights. `cached_tokens`: of the prompt, not run again.
    """

    response_ids: tuple[int, ...]
    logps: Float[np.ndarray, " token"]
    finish: Finish
    matched: str | None
    weights: str
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """One response to score at `temperature`. `ids` [token, k]: those asked for at each of its tokens; None: none.

    `top_k` > 0 asks how many of `ids` are among the server's own best; `best`: for these as well.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float
    ids: Int[np.ndarray, "token k"] | None = None
    top_k: int = 0
    best: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids or not 0 < self.temperature < math.inf:
            raise DataError(
                f"ScoreRequest: got {len(self.prompt_ids)} prompt ids, {len(self.response_ids)} response ids and "
                f"temperature {self.temperature}, expected each above 0. There is nothing to score."
            )
        if self.ids is not None and len(self.ids) != len(self.response_ids):
            raise DataError(
                f"ScoreRequest: got {len(self.ids)} rows of ids for {len(self.response_ids)} response ids, expected "
                "one each. Build them from the same response."
            )
        if self.top_k < 0 or (self.best and not self.top_k):
            raise DataError(f"ScoreRequest: got top_k {self.top_k} with best {self.best}, expected it above 0.")

    @property
    def width(self) -> int:
        """K."""
        return 0 if self.ids is None else self.ids.shape[1]

    @property
    def has_overlap(self) -> bool:
        """Whether there is something to compare with the server's best."""
        return self.top_k > 0 and self.width > 0

    @property
    def num_columns(self) -> int:
        """Of the answer: the ids, tail, own token and entropy, and what `top_k` and `best` add."""
        return self.width + 3 + self.has_overlap + (1 + self.top_k if self.best else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreAnswer:
    """Log-probabilities at the request's temperature, one row a response token.

    `logps` and `entropies`: of the response's own tokens. `table` [token, k]: at the ids asked for, `tails` the mass
    outside them. `overlap`: share of the first min(k, top_k) of them among the server's best. `best_ids` [token,
    top_k]: the server's, best first, `best_table` at these, `best_tails` the mass outside both.
    """

    logps: Float[np.ndarray, " token"]
    entropies: Float[np.ndarray, " token"]
    table: Float[np.ndarray, "token k"]
    tails: Float[np.ndarray, " token"]
    weights: str
    overlap: Float[np.ndarray, " token"] | None = None
    best_ids: Int[np.ndarray, "token best"] | None = None
    best_table: Float[np.ndarray, "token best"] | None = None
    best_tails: Float[np.ndarray, " token"] | None = None


def generate_body(request: GenerateRequest) -> Json:
    """The body of POST /generate. Every number that a model's own generation settings could change is in it."""
    return {
        "input_ids": list(request.prompt_ids),
        "sampling_params": {
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "sampling_seed": request.seed,
            "stop_token_ids": [request.end_id],
            "stop": list(request.stop),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
        },
        "return_logprob": True,
    }


def prefill_body(prompt_ids: tuple[int, ...]) -> Json:
    """A request that runs the prompt and samples nothing: the next ones with this prompt find it."""
    return {"input_ids": list(prompt_ids), "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}


def score_body(request: ScoreRequest) -> Json:
    """The body of POST /generate that sglang_plugin answers with scores."""
    start = len(request.prompt_ids) - 1
    ids = b"" if request.ids is None else np.ascontiguousarray(request.ids, dtype="<i4").tobytes()
    score = {
        "ids": base64.b64encode(ids).decode(),
        "k": request.width,
        "start": start,
        "temperature": request.temperature,
        "top_k": request.top_k,
        "best": request.best,
    }
    return {
        "input_ids": [*request.prompt_ids, *request.response_ids],
        "sampling_params": {"max_new_tokens": 0, "custom_params": {"score": score}},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": request.num_columns,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }


def abort_reason(answer: Any) -> str | None:
    """Why the request was ended without its answer; None for one that has it."""
    finish = _meta(answer).get("finish_reason")
    return str(finish.get("message")) if isinstance(finish, dict) and finish.get("type") == "abort" else None


def read_generated(request: GenerateRequest, answer: Any) -> GenerateAnswer:
    """The response sampled for `request`.

    Raises:
        DataError: it is no answer to this request.
    """
    meta = _meta(answer)
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict):
        raise _unfit(f"finish reason {finish!r}", "a reason")
    try:
        ids = tuple(int(token) for token in answer["output_ids"])
        pairs = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
        cached = int(meta.get("cached_tokens", 0))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _unfit(f"no ids with log-probabilities ({error!r})", "one log-probability a token") from None
    logps = np.array([logp for logp, _ in pairs], dtype=np.float32)
    if not ids or tuple(token for _, token in pairs) != ids or int(meta.get("completion_tokens", -1)) != len(ids):
        raise _unfit(
            f"{len(ids)} ids, log-probabilities of {len(pairs)} and {meta.get('completion_tokens')} tokens counted",
            "the same ids in all three",
        )
    if not (logps <= _MASS_SLACK).all() or not np.isfinite(logps).all():
        raise _unfit("log-probabilities above 0 or no numbers", "finite ones")
    kind, matched = _finish(request, ids, finish)
    return GenerateAnswer(
        response_ids=ids, logps=logps, finish=kind, matched=matched, weights=_weights(meta), cached_tokens=cached
    )


def _finish(request: GenerateRequest, ids: tuple[int, ...], finish: Json) -> tuple[Finish, str | None]:
    """How it ended, which the ids must agree with: the end token stands last or nowhere."""
    kind, matched = finish.get("type"), finish.get("matched")
    is_ended = ids[-1] == request.end_id
    stopped = matched if isinstance(matched, str) and matched in request.stop else None
    fits = {
        "stop": (is_ended and matched == request.end_id) or stopped is not None,
        "length": len(ids) == request.max_new_tokens and not is_ended,
    }
    if not fits.get(str(kind)) or request.end_id in ids[:-1] or len(ids) > request.max_new_tokens:
        raise _unfit(
            f"finish {finish} after {len(ids)} ids, the last of them {ids[-1]}",
            f"a stop at id {request.end_id}, or {request.max_new_tokens} ids without it",
        )
    return ("stop" if kind == "stop" else "length"), stopped


def read_scores(request: ScoreRequest, answer: Any) -> ScoreAnswer:
    """The scores that `request` asked for.

    Raises:
        DataError: they are of other ids (a server without sglang_plugin answers with its own best), or no numbers.
    """
    meta = _meta(answer)
    rows, columns, k = len(request.response_ids), request.num_columns, request.width
    values, ids = _table(meta, "val", "<f4"), _table(meta, "idx", "<i4")
    if values.shape != (rows, columns):
        raise _unfit(f"scores of shape {list(values.shape)}", f"{[rows, columns]}, a row a response token")
    first = k + 3 + request.has_overlap
    fixed = [TAIL, None, ENTROPY] + [OVERLAP] * request.has_overlap + [BEST_TAIL] * request.best
    own = np.array(request.response_ids)
    wanted = np.stack([own if label is None else np.full(rows, label) for label in fixed], axis=1)
    asked = np.zeros((rows, 0), dtype=np.int32) if request.ids is None else request.ids
    if not np.array_equal(ids[:, : k + wanted.shape[1]], np.concatenate([asked, wanted], axis=1)):
        raise _unfit("scores at other ids than were asked for", "the same: is the server one with sglang_plugin?")
    best_ids, best_table = ids[:, first + 1 :], values[:, first + 1 :]
    _check_numbers(request, values, best_ids=best_ids)
    return ScoreAnswer(
        logps=values[:, k + 1],
        entropies=values[:, k + 2],
        table=values[:, :k],
        tails=values[:, k],
        weights=_weights(meta),
        overlap=values[:, k + 3] if request.has_overlap else None,
        best_ids=best_ids if request.best else None,
        best_table=best_table if request.best else None,
        best_tails=values[:, first] if request.best else None,
    )


def _check_numbers(request: ScoreRequest, values: np.ndarray, *, best_ids: np.ndarray) -> None:
    """No NaN, no mass above 1, none lost: of ids that differ, the mass at them and outside them is all there is."""
    k, first = request.width, request.width + 3 + request.has_overlap
    logps = np.concatenate([values[:, : k + 2], values[:, first:]], axis=1)
    others = values[:, k + 2 : first]
    if np.isnan(values).any() or not (logps <= _MASS_SLACK).all() or not np.isfinite(values[:, k + 1]).all():
        raise _unfit("log-probabilities above 0 or no numbers", "numbers up to 0")
    if not (others >= -_MASS_SLACK).all() or not np.isfinite(others).all():
        raise _unfit("a negative entropy or overlap", "numbers from 0 on")
    if request.best and any(len(set(row)) != len(row) or min(row) < 0 for row in best_ids.tolist()):
        raise _unfit("the same best id twice in a row", "distinct ids")
    if request.ids is not None:
        is_distinct = (np.diff(np.sort(request.ids, axis=1), axis=1) != 0).all(axis=1)
        mass = np.exp(values[is_distinct, : k + 1].astype(np.float64)).sum(axis=1)
        if not (np.abs(mass - 1) <= _MASS_SLACK).all():
            raise _unfit(f"mass {mass.min():.4f} to {mass.max():.4f} at the ids and outside them", "1")


def _table(meta: Json, name: str, dtype: str) -> np.ndarray:
    try:
        raw = base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"], validate=True)
        table: np.ndarray = np.frombuffer(raw, dtype).reshape(meta["input_top_logprobs_shape"])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise _unfit(
            f"no table of scores ({error!r})", "one in base64: is the server one with sglang_plugin?"
        ) from None
    return table


def _meta(answer: Any) -> Json:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, dict):
        raise _unfit(f"{json.dumps(answer, default=str)[:200]}", "an answer with meta_info")
    return meta


def _weights(meta: Json) -> str:
    """The tag of the weights that the whole answer is from."""
    spans = {str(span.get("version")) for span in meta.get("weight_versions") or ()}
    tags = spans | {str(meta.get("weight_version"))}
    if len(tags) != 1:
        raise _unfit(f"tokens of several weights ({', '.join(sorted(tags))})", "one. Nobody else may update them")
    return tags.pop()


def _unfit(got: str, expected: str) -> DataError:
    return DataError(f"sglang answer: got {got}, expected {expected}. Look at the server's log.")
