"""The client of one or several SGLang servers with the same weights: many requests at once, answers in their order.

A request goes to the server with the fewest tokens outstanding; those that share a prompt go to one server, one after
the prompt has been run there. What a server fails on goes to another; what none answers is a `Failure`, and all other
answers are kept.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.sglang.transport import Endpoint, Limits, Transport, UnreachableError
from sdpo_core.sglang.wire import (
    GenerateAnswer,
    GenerateRequest,
    ScoreAnswer,
    ScoreRequest,
    abort_reason,
    generate_body,
    prefill_body,
    read_generated,
    read_scores,
    score_body,
)

_GENERATE = "/generate"
_FLUSH_SECONDS = 2.0
_FLUSH_WAIT_SECONDS = 0.1

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A request that no server has answered."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What a server says of itself.

    `max_tokens`: of one sequence; `weights`: the tag of its weights; `can_sleep`: it was started to give memory back.
    """

    version: str
    model: str
    dtype: str
    max_tokens: int
    is_deterministic: bool
    can_sleep: bool
    weights: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job(Generic[Answer]):
    """`read` makes an answer of what the server says."""

    body: Mapping[str, Any]
    read: Callable[[Any], Answer]
    tokens: int
    prompt: tuple[int, ...]


class _Server:
    """A transport and the tokens under way on it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.tokens = 0


class SglangClient:
    """`concurrency`: requests under way at a server, on average over the servers. One call at a time.

    `seed`: of the jitter of retries.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], *, concurrency: int = 32, limits: Limits | None = None, seed: int = 0
    ) -> None:
        self._limits = limits or Limits()
        self._concurrency = concurrency
        self._seed = seed
        # Tells this client's weights from those of another run, whose numbers start at 0 too.
        self._run = secrets.token_hex(4)
        self._weights: str | None = None
        self._calls = 0
        self.use(endpoints)

    def use(self, endpoints: Sequence[Endpoint]) -> None:
        """Go on with these servers: one that was started again has another address."""
        self._servers = tuple(
            _Server(Transport(endpoint, limits=self._limits, seed=self._seed + index))
            for index, endpoint in enumerate(endpoints)
        )

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def generate(self, requests: Sequence[GenerateRequest]) -> tuple[GenerateAnswer | Failure, ...]:
        """One response a request.

        Raises:
            DataError: a server refuses a request, or its answer does not fit; what is left is aborted.
        """

        def job(request: GenerateRequest) -> _Job[GenerateAnswer]:
            return _Job(
                body=generate_body(request),
                read=lambda answer: self._of_these_weights(read_generated(request, answer)),
                tokens=len(request.prompt_ids) + request.max_new_tokens,
                prompt=request.prompt_ids,
            )

        return self._run_all([job(request) for request in requests], servers=self._servers)

    def score(
        self, requests: Sequence[ScoreRequest], *, server: int | None = None
    ) -> tuple[ScoreAnswer | Failure, ...]:
        """Scores of each request's response; `server`: by that one alone.

        Raises:
            DataError: as `generate`.
        """

        def job(request: ScoreRequest) -> _Job[ScoreAnswer]:
            return _Job(
                body=score_body(request),
                read=lambda answer: self._of_these_weights(read_scores(request, answer)),
                tokens=len(request.prompt_ids) + len(request.response_ids),
                prompt=request.prompt_ids,
            )

        chosen = self._servers if server is None else (self._servers[server],)
        return self._run_all([job(request) for request in requests], servers=chosen)

    def update_from_folder(self, folder: Path, *, version: int) -> None:
        """Make every server read the safetensors in `folder`, which it must see under this path.

        From now on an answer of other weights is refused. Nothing may be under way.

        Raises:
            CellError: a server could not take them.
        """
        weights = f"{self._run}-{version}"
        body = {"model_path": str(folder), "weight_version": weights, "flush_cache": True}
        for answer in self._ask_each("/update_weights_from_disk", body=body, seconds=self._limits.update_seconds):
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise CellError(f"sglang server: got {answer} to an update of weights, expected success.")
        self._weights = weights

    def update_by(self, send: Callable[[Transport, str], None], *, version: int) -> None:
        """Have `send` give every server weights, all at once: with a transport that asks once, and under this tag.

        What holds for `update_from_folder` holds here.

        Raises:
            CellError: of `send`, when it has ended for all of them.
        """
        weights, once = f"{self._run}-{version}", replace(self._limits, attempts=1)
        transports = [Transport(server.transport.endpoint, limits=once, seed=self._seed) for server in self._servers]
        with ThreadPoolExecutor(len(transports)) as pool:
            sent = [pool.submit(send, transport, weights) for transport in transports]
        for one in sent:
            one.result()
        self._weights = weights

    def health(self) -> tuple[bool, ...]:
        """Whether each server generates; one that sleeps does not."""
        return tuple(server.transport.is_healthy() for server in self._servers)

    def info(self) -> tuple[ServerInfo, ...]:
        """What each server says of itself."""
        try:
            return tuple(
                ServerInfo(
                    version=str(found["version"]),
                    model=str(found["model_path"]),
                    dtype=str(found["dtype"]),
                    max_tokens=min(int(found["context_length"]), int(found["max_total_num_tokens"])),
                    is_deterministic=bool(found["enable_deterministic_inference"]),
                    can_sleep=bool(found["enable_memory_saver"]),
                    # The other page goes on to show the tag of the start.
                    weights=str(model["weight_version"]),
                )
                for found, model in zip(self._ask_each("/server_info"), self._ask_each("/model_info"), strict=True)
            )
        except (KeyError, TypeError) as error:
            raise DataError(f"sglang server: got no {error} in its description, expected SGLang 0.5.23.") from None

    def flush(self) -> None:
        """Forget the prompts that have been run; a server that still holds its last request is asked again."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                self._ask_each("/flush_cache", body={})
            except CellError:
                if time.monotonic() > deadline:
                    raise
                threading.Event().wait(_FLUSH_WAIT_SECONDS)
            else:
                return

    def sleep(self) -> None:
        """Have every server give back the memory of its weights and prompts. Until `wake` it takes no request.

        Raises:
            CellError: one does not, or has something under way.
        """
        # One that is asked in the middle of a request ends.
        self.flush()
        self._ask_each("/release_memory_occupation", body={})

    def wake(self) -> None:
        """Give the memory to every server again. What it holds then is no model: send weights before you ask.

        Raises:
            CellError: one does not take it.
        """
        self._ask_each("/resume_memory_occupation", body={})

    def pause(self) -> None:
        """Stop generating; what is under way waits."""
        self._ask_each("/pause_generation", body={"mode": "in_place"})

    def resume(self) -> None:
        """Generate again."""
        self._ask_each("/continue_generation", body={})

    def abort(self) -> None:
        """Ask the servers to end all that this client has under way; its calls get failures."""
        for server in self._servers:
            server.transport.abort()

    def _ask_each(self, path: str, *, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> list[Any]:
        """`seconds`: longest that an attempt waits for the answer, that of /health where nothing is said."""
        limits = replace(self._limits, read_seconds=seconds or self._limits.health_seconds)
        for server in self._servers:
            server.transport.take_up()
        transports = [Transport(one.transport.endpoint, limits=limits, seed=self._seed) for one in self._servers]
        with ThreadPoolExecutor(len(transports)) as pool:
            asked = [pool.submit(transport.call, path, body=body) for transport in transports]
        try:
            return [call.result() for call in asked]
        except (UnreachableError, DataError) as error:
            raise CellError(f"{error}. Look at the server's log.") from None

    def _of_these_weights(self, answer: Answer) -> Answer:
        found = getattr(answer, "weights", None)
        if self._weights is not None and found != self._weights:
            raise DataError(
                f"sglang answer: got one of weights {found!r}, expected {self._weights!r}, the last ones published. "
                "Nobody else may update a server that samples for a cell."
            )
        return answer

    def _run_all(self, jobs: Sequence[_Job[Answer]], *, servers: tuple[_Server, ...]) -> tuple[Answer | Failure, ...]:
        for server in servers:
            server.transport.take_up()
            server.tokens = 0
        self._calls += 1
        batch = _Batch(
            jobs, servers=servers, name=f"{self._run}-{self._calls}", stall_seconds=self._limits.stall_seconds
        )
        return batch.run(threads=self._concurrency * len(servers))


class _Batch(Generic[Answer]):
    """The jobs of one call, on their way through a pool of threads. `name` opens the names of its requests."""

    def __init__(
        self, jobs: Sequence[_Job[Answer]], *, servers: tuple[_Server, ...], name: str, stall_seconds: float
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
            with suppress(UnreachableError, DataError, SpecError):
                server.transport.call(_GENERATE, body=prefill_body(self._jobs[group[0]].prompt))
        for index in group[1:]:
            with suppress(RuntimeError):  # The call has ended with an error.
                pool.submit(self._settle, index, server)
        self._settle(group[0], server)

    def _settle(self, index: int, server: _Server | None) -> None:
        """Run a job whose tokens are reserved on `server`, and on others when that one fails."""
        job, tried = self._jobs[index], set[_Server]()
        found: Answer | Failure | BaseException = Failure(reason=self._servers[0].transport.why)
        while server is not None:
            try:
                answer = server.transport.call(_GENERATE, body=job.body, name=f"{self._name}-{index}")
                aborted = abort_reason(answer)
                found = job.read(answer) if aborted is None else Failure(reason=f"sglang: got an abort ({aborted})")
                break
            except UnreachableError as error:
                found = Failure(reason=str(error))
                if not server.transport.is_given_up and not server.transport.is_healthy():
                    server.transport.give_up(f"no health ({error})")
            except BaseException as error:  # noqa: BLE001 -- raised again by `run`, in the thread that asked
                found = error
                break
            finally:
                with self._lock:
                    server.tokens -= job.tokens
            tried.add(server)
            server = self._reserve(job.tokens, tried=tried)
        self._done.put((index, found))

    def _reserve(self, tokens: int, *, tried: set[_Server]) -> _Server | None:
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
