"""Many requests at once: which server each goes to, what becomes of those that one fails on, when to give one up."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sdpo_core.errors import DataError, SpecError
from sdpo_core.sglang.transport import Transport, UnreachableError
from sdpo_core.sglang.wire import abort_reason, prefill_body

_GENERATE = "/generate"

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request that no server has answered."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Generic[Answer]):
    """`read` makes an answer of what the server says."""

    body: Mapping[str, Any]
    read: Callable[[Any], Answer]
    tokens: int
    prompt: tuple[int, ...]


class Server:
    """A transport and the tokens under way on it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.tokens = 0


class Batch(Generic[Answer]):
    """The jobs of one call, on their way through a pool of threads. `name` opens the names of its requests."""

    def __init__(
        self, jobs: Sequence[Job[Answer]], *, servers: tuple[Server, ...], name: str, stall_seconds: float
    ) -> None:
        self._jobs = jobs
        self._servers = servers
        self._name = name
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._done: queue.SimpleQueue[tuple[int, Answer | Failure | BaseException]] = queue.SimpleQueue()

    def run(self, *, threads: int) -> tuple[Answer | Failure, ...]:
        """All answers in order; the first error that is not a server's ends the rest."""
        answers: dict[int, Answer | Failure] = {}
        with ThreadPoolExecutor(max(1, min(threads, len(self._jobs)))) as pool:
            try:
                for group in self._groups():
                    pool.submit(self._open, group, pool)
                while len(answers) < len(self._jobs):
                    try:
                        index, answer = self._done.get(timeout=self._stall_seconds)
                    except queue.Empty:
                        self._give_up_hanging()
                        continue
                    if isinstance(answer, BaseException):
                        raise answer
                    answers[index] = answer
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for server in self._servers:
                    server.transport.abort()
                    server.transport.give_up("an end of the whole call")
                raise
        return tuple(answers[index] for index in range(len(self._jobs)))

    def _groups(self) -> list[list[int]]:
        """Jobs of one prompt together."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, job in enumerate(self._jobs):
            groups.setdefault(job.prompt, []).append(index)
        return list(groups.values())

    def _open(self, group: list[int], pool: ThreadPoolExecutor) -> None:
        """Choose a server, run the prompt there if several share it, and start them."""
        server = self._reserve(sum(self._jobs[index].tokens for index in group), tried=set())
        if server is not None and len(group) > 1:
            # Nothing depends on it but time: without it each of them runs the prompt, or fails for itself.
            with suppress(DataError, SpecError):
                try:
                    server.transport.call(_GENERATE, body=prefill_body(self._jobs[group[0]].prompt))
                except UnreachableError as error:
                    _give_up_if_ill(server, error)
        for index in group[1:]:
            with suppress(RuntimeError):  # The call has ended with an error.
                pool.submit(self._settle, index, server)
        self._settle(group[0], server)

    def _settle(self, index: int, server: Server | None) -> None:
        """Run a job whose tokens are reserved on `server`, and on others when that one fails."""
        job, tried = self._jobs[index], set[Server]()
        found: Answer | Failure | BaseException = Failure(reason=self._servers[0].transport.why)
        while server is not None:
            try:
                answer = server.transport.call(_GENERATE, body=job.body, name=f"{self._name}-{index}")
                aborted = abort_reason(answer)
                found = job.read(answer) if aborted is None else Failure(reason=f"sglang: got an abort ({aborted})")
                break
            except UnreachableError as error:
                found = Failure(reason=str(error))
                _give_up_if_ill(server, error)
            except BaseException as error:  # noqa: BLE001 -- raised again by `run`, in the thread that asked
                found = error
                break
            finally:
                with self._lock:
                    server.tokens -= job.tokens
            tried.add(server)
            server = self._reserve(job.tokens, tried=tried)
        self._done.put((index, found))

    def _reserve(self, tokens: int, *, tried: set[Server]) -> Server | None:
        """The server with the fewest tokens outstanding, with these added; None when none is left."""
        with self._lock:
            left = [one for one in self._servers if one not in tried and not one.transport.is_given_up]
            if not left:
                return None
            chosen = min(left, key=lambda one: one.tokens)
            chosen.tokens += tokens
            return chosen

    def _give_up_hanging(self) -> None:
        """No answer for a while: a server that does not generate, asked twice, is given up with all it was to do."""
        for server in self._servers:
            if server.transport.is_busy and not (server.transport.is_healthy() or server.transport.is_healthy()):
                server.transport.give_up(f"no answer in {self._stall_seconds:.0f} s, and no health")


def _give_up_if_ill(server: Server, error: UnreachableError) -> None:
    if not server.transport.is_given_up and not server.transport.is_healthy():
        server.transport.give_up(f"no health ({error})")
