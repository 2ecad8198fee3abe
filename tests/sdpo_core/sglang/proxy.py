"""A small HTTP server that answers as a test says: by a function, or by asking a real server, with faults between."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sdpo_core.sglang.transport import Endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What came in; `body` is None for a GET."""

    path: str
    body: Any
    token: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What goes out. `is_cut`: the connection ends in the middle of `body`; `rest`: the second half waits for it."""

    status: int = 200
    body: bytes = b""
    is_cut: bool = False
    rest: threading.Event | None = None


Answerer = Callable[[Call], Reply]


def as_json(value: Any) -> Reply:
    return Reply(body=json.dumps(value).encode())


class Proxy:
    """Serves on a free port while the block lasts; `calls` are all that came in. `is_well`: it is, whoever answers."""

    def __init__(self, answer: Answerer, *, is_well: bool = True) -> None:
        self.calls: list[Call] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def log_message(self, *_: object) -> None: ...

            def _serve(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
                call = Call(path=self.path, body=json.loads(text) if text else None, token=token)
                with proxy._lock:
                    proxy.calls.append(call)
                reply = Reply() if is_well and call.path == "/health" else answer(call)
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                half = len(reply.body) // 2
                self.wfile.write(reply.body[:half])
                if reply.rest is not None:
                    reply.rest.wait(15)
                if not reply.is_cut:
                    self.wfile.write(reply.body[half:])

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that has gone is part of many tests."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, path: str = "/generate") -> list[Any]:
        with self._lock:
            return [call.body for call in self.calls if call.path == path]


def ask(endpoint: Endpoint) -> Answerer:
    """Hand every call on to a real server."""

    def answer(call: Call) -> Reply:
        request = urllib.request.Request(
            endpoint.url + call.path,
            data=None if call.body is None else json.dumps(call.body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {call.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Reply(status=response.status, body=response.read())
        except urllib.error.HTTPError as error:
            return Reply(status=error.code, body=error.read())

    return answer


def sampled(call: Call, *, weights: str = "default") -> Any:
    """What a server answers to a request for a response: as many times id 7 as may be, or nothing for a prefill."""
    count = call.body["sampling_params"]["max_new_tokens"]
    return {
        "output_ids": [7] * count,
        "meta_info": {
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": [[-1.0, 7, None] for _ in range(count)],
            "completion_tokens": count,
            "cached_tokens": 0,
            "weight_version": weights,
        },
    }
