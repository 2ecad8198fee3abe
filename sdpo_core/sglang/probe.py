"""Whether a server answers scores: the question that tells a server with the hooks of sglang_plugin from any other."""

import base64
import http.client
import json
import struct
import urllib.error
import urllib.request
from typing import Any

from sdpo_core.errors import CellError

_REQUEST_SECONDS = 30.0
# One token is scored without given ids: tail, own token (id 0) and entropy come back, under these ids.
_IDS = (-1, 0, -2)
_QUESTION: dict[str, Any] = {
    "input_ids": [0, 0],
    "sampling_params": {
        "max_new_tokens": 0,
        "custom_params": {
            "score": {"ids": "", "k": 0, "start": 0, "temperature": 1.0, "top_k": 0, "best": False},
        },
    },
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": len(_IDS),
    "return_flat_raw_top_logprobs": True,
    "return_flat_raw_top_logprobs_b64": True,
}
_OTHER_HOOKS = (
    "SGLang server: got another answer than the score of a token, expected that of sglang_plugin. Build the server's "
    "environment again: `make sglang-env`."
)


def is_ready(url: str, *, token: str) -> bool:
    """True when the server at `url` has scored a token; False while it does not answer, or to somebody else's token.

    Raises:
        CellError: it answers something else.
    """
    try:
        _ask(f"{url}/health", token=token)
        answer = _ask(f"{url}/generate", token=token, body=_QUESTION)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.BAD_REQUEST:
            raise CellError(f"{_OTHER_HOOKS} It said: {error.read().decode(errors='replace')[:300]}") from error
        return False
    except (OSError, http.client.HTTPException):
        return False
    try:
        ids = base64.b64decode(json.loads(answer)["meta_info"]["input_top_logprobs_idx_flat_b64"])
    except (ValueError, KeyError, TypeError) as error:
        raise CellError(f"{_OTHER_HOOKS} It has no ids ({error!r}).") from error
    if ids != struct.pack(f"<{len(_IDS)}i", *_IDS):
        raise CellError(_OTHER_HOOKS)
    return True


def _ask(url: str, *, token: str, body: dict[str, Any] | None = None) -> bytes:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    # Loopback only: a proxy from the environment must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data=data, headers=headers), timeout=_REQUEST_SECONDS) as response:
        answer: bytes = response.read()
        return answer
