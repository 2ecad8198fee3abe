"""The client of one or several SGLang servers with the same weights: many requests at once, answers in their order.

A request goes to the server with the fewest tokens outstanding; those that share a prompt go to one server, one after
the prompt has been run there. What a server fails on goes to another; what none answers is a `Failure`, and all other
answers are kept.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdpo_core.errors import CellError, DataError
from sdpo_core.sglang.batch import Answer, Batch, Failure, Job, Server
from sdpo_core.sglang.transport import Endpoint, Limits, Transport, UnreachableError
from sdpo_core.sglang.wire import (
    GenerateAnswer,
    GenerateRequest,
    ScoreAnswer,
    ScoreRequest,
    generate_body,
    read_generated,
    read_scores,
    score_body,
)

_FLUSH_SECONDS = 2.0
_FLUSH_WAIT_SECONDS = 0.1


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
            Server(Transport(endpoint, limits=self._limits, seed=self._seed + index))
            for index, endpoint in enumerate(endpoints)
        )

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def generate(
        self, requests: Sequence[GenerateRequest], *, server: int | None = None
    ) -> tuple[GenerateAnswer | Failure, ...]:
        """One response a request; `server`: by that one alone.

        Raises:
            DataError: a server refuses a request, or its answer does not fit; what is left is aborted.
        """

        def job(request: GenerateRequest) -> Job[GenerateAnswer]:
            return Job(
                body=generate_body(request),
                read=lambda answer: self._of_these_weights(read_generated(request, answer)),
                tokens=len(request.prompt_ids) + request.max_new_tokens,
                prompt=request.prompt_ids,
            )

        return self._run_all([job(request) for request in requests], server=server)

    def score(
        self, requests: Sequence[ScoreRequest], *, server: int | None = None
    ) -> tuple[ScoreAnswer | Failure, ...]:
        """Scores of each request's response; `server`: by that one alone.

        Raises:
            DataError: as `generate`.
        """

        def job(request: ScoreRequest) -> Job[ScoreAnswer]:
            return Job(
                body=score_body(request),
                read=lambda answer: self._of_these_weights(read_scores(request, answer)),
                tokens=len(request.prompt_ids) + len(request.response_ids),
                prompt=request.prompt_ids,
            )

        return self._run_all([job(request) for request in requests], server=server)

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
        weights, transports = f"{self._run}-{version}", self._transports(replace(self._limits, attempts=1))
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

    def abort(self) -> None:
        """Ask the servers to end all that this client has under way; its calls get failures."""
        for server in self._servers:
            server.transport.abort()

    def _ask_each(self, path: str, *, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> list[Any]:
        """`seconds`: longest that an attempt waits for the answer, that of /health where nothing is said."""
        transports = self._transports(replace(self._limits, read_seconds=seconds or self._limits.health_seconds))
        with ThreadPoolExecutor(len(transports)) as pool:
            asked = [pool.submit(transport.call, path, body=body) for transport in transports]
        try:
            return [call.result() for call in asked]
        except (UnreachableError, DataError) as error:
            raise CellError(f"{error}. Look at the server's log.") from None

    def _transports(self, limits: Limits) -> list[Transport]:
        """To every server, whether it is given up or not."""
        return [Transport(server.transport.endpoint, limits=limits, seed=self._seed) for server in self._servers]

    def _of_these_weights(self, answer: Answer) -> Answer:
        found = getattr(answer, "weights", None)
        if self._weights is not None and found != self._weights:
            raise DataError(
                f"sglang answer: got one of weights {found!r}, expected {self._weights!r}, the last ones published. "
                "Nobody else may update a server that samples for a cell."
            )
        return answer

    def _run_all(self, jobs: Sequence[Job[Answer]], *, server: int | None) -> tuple[Answer | Failure, ...]:
        servers = self._servers if server is None else (self._servers[server],)
        for chosen in servers:
            chosen.transport.take_up()
            chosen.tokens = 0
        self._calls += 1
        batch = Batch(
            jobs, servers=servers, name=f"{self._run}-{self._calls}", stall_seconds=self._limits.stall_seconds
        )
        return batch.run(threads=self._concurrency * len(servers))
