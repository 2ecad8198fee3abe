"""Requests to one SGLang server over HTTP: time-outs, retries with back-off, and a way to give all of them up."""

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from sdpo_core.errors import DataError, SpecError

# What may heal by itself: too many requests, and a server that is starting, overloaded or behind a proxy.
_TRANSIENT = frozenset({429, 500, 502, 503, 504})
_SHOWN_CHARACTERS = 300
_ABORT_SECONDS = 5.0
# Others answer with text, or with nothing.
_JSON_PATHS = frozenset({"/generate", "/update_weights_from_disk", "/server_info", "/model_info"})
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server is. The token travels in a header and nowhere else."""

    url: str
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in _CONNECTIONS or not parts.hostname:
            raise SpecError(f"sglang server: got address {self.url!r}, expected http://HOST:PORT.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long to wait, and how often to try.

    `read_seconds`: for an answer, longer than the longest response takes; `update_seconds`: for new weights. Where no
    answer at all has come in for `stall_seconds`, /health has `health_seconds` to answer, twice (SGLang itself takes
    20 s to find that it hangs).
    No attempt of a request starts later than `retry_seconds` after its first one has failed.
    """

    connect_seconds: float = 5.0
    read_seconds: float = 1800.0
    update_seconds: float = 300.0
    stall_seconds: float = 30.0
    health_seconds: float = 25.0
    attempts: int = 7
    first_wait_seconds: float = 0.25
    longest_wait_seconds: float = 8.0
    retry_seconds: float = 30.0


class UnreachableError(Exception):
    """A server gave no answer, however often it was asked. The client turns it into a `Failure`."""


class _PassingError(Exception):
    """One attempt that another one may make good."""


class Transport:
    """One server, for several threads. `seed`: of the jitter between attempts. `why`: it was given up last time."""

    def __init__(self, endpoint: Endpoint, *, limits: Limits, seed: int) -> None:
        self.endpoint = endpoint
        self._limits = limits
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        # Not the connections: they let go of a socket whose answer has begun.
        self._open: set[socket.socket] = set()
        self._names: set[str] = set()
        self._given_up = threading.Event()
        self.why = ""

    def call(self, path: str, *, body: Mapping[str, Any] | None = None, name: str | None = None) -> Any:
        """The JSON that `path` answers; GET without a body, else POST. `name`: for `abort`, with the attempt's number.

        Raises:
            UnreachableError: no attempt got an answer, or `give_up` was called.
            DataError: the server refuses the request.
            SpecError: it refuses the token.
        """
        deadline = float("inf")
        for attempt in range(1, self._limits.attempts + 1):
            try:
                return self._attempt(path, body, name=None if name is None else f"{name}.{attempt}")
            except _PassingError as error:
                reason = str(error)
            deadline = min(deadline, time.monotonic() + self._limits.retry_seconds)
            wait = self._wait_seconds(attempt)
            is_last = attempt == self._limits.attempts or time.monotonic() + wait > deadline
            if is_last or self._given_up.wait(wait):
                break
        if self._given_up.is_set():
            reason = self.why
        raise UnreachableError(f"{self._where(path)}: got {reason} after {attempt} attempts, expected an answer")

    def give_up(self, why: str) -> None:
        """End all calls now, and those to come, until `take_up`."""
        self.why = why
        self._given_up.set()
        with self._lock:
            for link in self._open:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def take_up(self) -> None:
        """Calls are made again."""
        self._given_up.clear()

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self._open)

    def is_healthy(self) -> bool:
        """Whether the server generates: one attempt, whatever else is under way or given up."""
        with suppress(_PassingError, DataError, SpecError):
            self._once("/health", None, read_seconds=self._limits.health_seconds, is_check=True)
            return True
        return False

    def abort(self) -> None:
        """Ask the server to end the named requests under way: a favour to it, so one attempt each, and no error."""
        with self._lock:
            names = sorted(self._names)
        with suppress(_PassingError, DataError, SpecError):
            for name in names:
                self._once("/abort_request", {"rid": name}, read_seconds=_ABORT_SECONDS, is_check=True)

    def _attempt(self, path: str, body: Mapping[str, Any] | None, *, name: str | None) -> Any:
        if name is None or body is None:
            return self._once(path, body, read_seconds=self._limits.read_seconds)
        with self._lock:
            self._names.add(name)
        try:
            return self._once(path, {**body, "rid": name}, read_seconds=self._limits.read_seconds)
        finally:
            with self._lock:
                self._names.discard(name)

    def _once(self, path: str, body: Mapping[str, Any] | None, *, read_seconds: float, is_check: bool = False) -> Any:
        payload = None if body is None else json.dumps(body, allow_nan=False).encode()
        parts = urlsplit(self.endpoint.url)
        connection = _CONNECTIONS[parts.scheme](str(parts.hostname), parts.port, timeout=self._limits.connect_seconds)
        try:
            connection.connect()
            with self._noted(connection.sock) if not is_check else nullcontext():
                status, text = self._exchange(connection, path, payload, read_seconds=read_seconds)
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"{type(error).__name__} ({error})") from None
        finally:
            connection.close()
        if status in _TRANSIENT:
            raise _PassingError(f"HTTP {status} ({self._shown(text)})")
        if status in (401, 403):
            raise SpecError(f"{self._where(path)}: got HTTP {status}, expected the token to do. Set SDPO_SGLANG_TOKEN.")
        if status != HTTPStatus.OK:
            raise DataError(
                f"{self._where(path)}: got HTTP {status} ({self._shown(text)}), expected an answer. Look at its log."
            )
        try:
            return json.loads(text) if path in _JSON_PATHS or text[:1] in (b"{", b"[") else None
        except ValueError:
            raise _PassingError(f"{len(text)} bytes that are no JSON") from None

    @contextmanager
    def _noted(self, link: socket.socket) -> Iterator[None]:
        """`give_up` ends what `link` brings while the block lasts."""
        with self._lock:
            self._open.add(link)
        try:
            if self._given_up.is_set():
                raise OSError("given up")
            yield
        finally:
            with self._lock:
                self._open.discard(link)

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, payload: bytes | None, *, read_seconds: float
    ) -> tuple[int, bytes]:
        connection.sock.settimeout(read_seconds)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.endpoint.token is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.token}"
        prefix = urlsplit(self.endpoint.url).path.rstrip("/")
        connection.request("GET" if payload is None else "POST", prefix + path, body=payload, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _wait_seconds(self, attempt: int) -> float:
        """Twice as long each time, and somewhere in the upper half of that: those who failed together come apart."""
        whole = min(self._limits.first_wait_seconds * 2.0 ** (attempt - 1), self._limits.longest_wait_seconds)
        return whole * (0.5 + 0.5 * self._random.random())

    def _where(self, path: str) -> str:
        return f"sglang server {self.endpoint.url}{path}"

    def _shown(self, text: bytes) -> str:
        """What a server said, without the token, should it repeat what it was sent."""
        shown = text.decode(errors="replace")
        if self.endpoint.token:
            shown = shown.replace(self.endpoint.token, "(token)")
        return " ".join(shown.split())[:_SHOWN_CHARACTERS]
