"""The SGLang engine: samples over HTTP from servers that hold a copy of the weights the policy trains.

Process 0 of the student starts the servers (or takes those of SDPO_SGLANG_URL), asks them, and tells the others; these
take part where weights are put together. Weights go by a safetensors folder, before the first sampling after a change
and after a restart, and each time the canary must agree. Nothing is under way while they change, so a rollout is of one
version.
"""

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import IO, Literal

import torch.distributed as dist
from safetensors.torch import save_file

from sdpo_core.backends.base import Policy
from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.publish import RESPONSE_TOKENS, Publication, canary_rows, check_canary, publish
from sdpo_core.sglang.address import external_servers
from sdpo_core.sglang.client import Failure, SglangClient
from sdpo_core.sglang.server import ManagedServer, ServerSpec
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.sglang.wire import GenerateAnswer, GenerateRequest, ScoreAnswer, ScoreRequest
from sdpo_core.specs import CellSpec, Dtype
from sdpo_core.text import ChatTokenizer

# Nats. In float32 the gap is that of sums in another order; bfloat16 keeps 8 bits of logits of about 10.
_TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.25}
_MAX_RESTARTS = 5
# Calls for what is left, when servers fail on requests and are healthy all the same.
_TRIES = 3


def load_engine(spec: CellSpec, *, policy: Policy, folder: Path, device: str) -> "SglangEngine":
    """Servers that have started with the base in `folder`, and the engine that samples from them.

    Raises:
        SpecError: a server is not what the cell asks for.
        CellError: one did not start.
    """
    text = ChatTokenizer.load(folder)
    engine = SglangEngine(policy, spec=spec, text=text)
    if _rank() == 0:
        engine.start(folder, device=device)
    return engine


class SglangEngine:
    """Samples with the policy's weights of the moment; `close` ends what it has started, as the process's end does.

    `limits`: of the client's patience.
    """

    def __init__(self, policy: Policy, *, spec: CellSpec, text: ChatTokenizer, limits: Limits | None = None) -> None:
        self._policy = policy
        self._spec = spec
        self._text = text
        self._limits = limits
        self._version: int | None = None
        self._published: Publication | None = None
        self._file: IO[bytes] = BytesIO()
        self._restarts = 0
        self.servers: tuple[ManagedServer, ...] = ()

    def start(self, folder: Path, *, device: str) -> None:
        """Start the servers with the base in `folder`, unless others are named; on one process alone."""
        self._scratch = Path(tempfile.mkdtemp(prefix="sdpo-sglang-"))
        external = external_servers()
        if not external:
            self.servers = self._managed(folder, device=device)
        self.close = weakref.finalize(self, _close, self.servers, self._scratch)
        try:
            with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
                list(pool.map(ManagedServer.start, self.servers))
            self._client = SglangClient(external or self._endpoints(), limits=self._limits, seed=self._spec.seed)
            self._check_servers()
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        """One rollout a request, in order; all processes of the student call it and have all of them.

        Raises:
            DataError: a request does not fit the model, or an answer its request.
            CellError: servers hold other weights, or cannot be brought back.
        """
        self._check_lengths(requests, sampling=sampling)
        if self._version != self._policy.weights_version():
            self._follow([request.prompt_ids for request in requests])
        found = [self._sample(requests, sampling=sampling) if _rank() == 0 else ()]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def _managed(self, folder: Path, *, device: str) -> tuple[ManagedServer, ...]:
        kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
        server = ServerSpec(
            model=_served_folder(folder, self._scratch / "base", end_id=self._text.end_id),
            dtype=self._spec.dtype,
            valid_vocab=self._text.vocab_size,
            max_total_tokens=self._spec.sglang.max_total_tokens,
            threads=self._spec.threads_per_worker,
            deterministic=self._spec.sglang.deterministic,
            device=kind,
        )
        names = [f"server-{index}" for index in range(self._spec.sglang.replicas)]
        return tuple(ManagedServer(server, folder=self._scratch / name) for name in names)

    def _endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(url=server.url, token=server.token) for server in self.servers)

    def _check_servers(self) -> None:
        training, wanted = self._spec.training, self._spec.sglang.deterministic
        longest = training.max_prompt_tokens + training.max_response_tokens
        for info in self._client.info():
            if info.is_deterministic != wanted or info.max_tokens < longest:
                raise SpecError(
                    f"sglang engine: got a server of {info.model} with deterministic {info.is_deterministic} and room "
                    f"for {info.max_tokens} tokens, expected {wanted} and at least {longest}. Start it with other "
                    "flags, or change `sglang` in the profile."
                )

    def _check_lengths(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> None:
        positions = self._spec.base.shape.max_positions
        longest = max((len(request.prompt_ids) for request in requests), default=0) + sampling.max_response_tokens
        if longest > positions:
            raise DataError(
                f"SglangEngine.generate: got a sequence of {longest} tokens, expected at most {positions}. "
                "Shorten the prompts or the responses in the profile."
            )

    def _follow(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Publish the weights as they are now: put together by all processes, written and sent by process 0."""
        room = self._spec.base.shape.max_positions - RESPONSE_TOKENS
        canary = canary_rows([prompt[-room:] for prompt in prompts], vocab=self._text.vocab_size)
        publication = publish(self._policy, canary=canary)
        if _rank() == 0:
            self._write(publication)
            # What a restart sends is the file; the weights need no place in memory.
            self._published = replace(publication, weights={})
            self._send()
        self._version = publication.version

    def _write(self, publication: Publication) -> None:
        """A folder with the weights. Their file has no name but a link to this process's open one.

        So no copy of a model stays on the disk, however this process ends. Servers must run as the same user.
        """
        place = self._scratch / "weights" / WEIGHTS_FILE
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        save_file(dict(publication.weights), place, metadata={"format": "pt"})
        self._file.close()
        self._file = place.open("rb")
        place.unlink()
        place.symlink_to(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def _send(self) -> None:
        """Give every server the published weights, until the canary shows that each has them."""
        published = self._published
        assert published is not None
        while True:
            try:
                self._client.update_from_folder(self._scratch / "weights", version=published.version)
                scores = self._canary_scores(published)
                break
            except CellError as error:
                if not self._restart_dead(str(error)):
                    raise
        for index, found in enumerate(scores):
            where = f"sglang engine, server {index}"
            gaps = [score.logps for score in found]
            check_canary(published, gaps, tolerance=_TOLERANCES[self._spec.dtype], where=where)

    def _canary_scores(self, published: Publication) -> list[list[ScoreAnswer]]:
        """Of each server, each of which must hold the weights."""
        temperature = self._spec.training.temperature
        requests = [
            ScoreRequest(prompt_ids=row.prompt_ids, response_ids=row.response_ids, temperature=temperature)
            for row in published.canary
        ]
        scores = []
        for index in range(self._client.num_servers):
            answers = self._client.score(requests, server=index)
            failed = [answer.reason for answer in answers if isinstance(answer, Failure)]
            if failed:
                raise CellError(f"sglang engine: got no canary from server {index} ({failed[0]}), expected its scores.")
            scores.append([answer for answer in answers if isinstance(answer, ScoreAnswer)])
        return scores

    def _sample(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        assert self._published is not None
        asked = [self._request(request, sampling=sampling) for request in requests]
        answers: dict[int, GenerateAnswer] = {}
        reason, tries = "", 0
        while len(answers) < len(asked):
            left = [index for index in range(len(asked)) if index not in answers]
            for index, answer in zip(left, self._client.generate([asked[index] for index in left]), strict=True):
                if isinstance(answer, Failure):
                    reason = answer.reason
                else:
                    answers[index] = answer
            if len(answers) == len(asked):
                break
            if self._restart_dead(reason):
                self._send()
            elif (tries := tries + 1) == _TRIES:
                raise CellError(
                    f"sglang engine: got {len(asked) - len(answers)} of {len(asked)} rollouts unanswered ({reason}), "
                    "expected all. Look at the server's log."
                )
        version = self._published.version
        return tuple(self._rollout(request, answers[index], version) for index, request in enumerate(requests))

    def _request(self, request: RolloutRequest, *, sampling: Sampling) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=request.prompt_ids,
            # A hash already: any 63 of its bits are as good as all.
            seed=request.stream_key % 2**63,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_response_tokens,
            end_id=self._text.end_id,
        )

    def _rollout(self, request: RolloutRequest, answer: GenerateAnswer, version: int) -> Rollout:
        if max(answer.response_ids) >= self._text.vocab_size:
            raise DataError(
                f"sglang engine: got id {max(answer.response_ids)}, expected ids below {self._text.vocab_size}, those "
                "of the tokenizer. Start the server with sglang_plugin and SDPO_SGLANG_VALID_VOCAB."
            )
        return Rollout(
            prompt_ids=request.prompt_ids,
            response_ids=answer.response_ids,
            sampling_logps=tuple(answer.logps.tolist()),
            finish=answer.finish,
            weights_version=version,
        )

    def _restart_dead(self, reason: str) -> bool:
        """Start those of our servers again that do not generate; whether there was one. They hold the base then.

        Raises:
            CellError: too often, or one does not come back.
        """
        health = self._client.health() if self.servers else ()
        dead = [server for server, is_well in zip(self.servers, health, strict=True) if not is_well]
        self._restarts += len(dead)
        if self._restarts > _MAX_RESTARTS:
            raise CellError(
                f"sglang engine: got {self._restarts} servers that had died or hung, the last with: {reason} "
                f"({dead[0].last_words()}), expected at most {_MAX_RESTARTS} in a cell. Read {dead[0].log_path}."
            )
        with ThreadPoolExecutor(max(1, len(dead))) as pool:
            list(pool.map(ManagedServer.restart, dead))
        if dead:
            self._client.use(self._endpoints())
        return bool(dead)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _served_folder(base: Path, place: Path, *, end_id: int) -> Path:
    """`base` for a server that stops at `end_id` alone: models' own settings name further ids to stop at."""
    place.mkdir()
    for file in base.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (place / file.name).symlink_to(file.resolve())
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    (place / "config.json").write_text(json.dumps({**config, "eos_token_id": end_id}), encoding="utf-8")
    return place


def _close(servers: Sequence[ManagedServer], scratch: Path) -> None:
    for server in servers:
        server.stop()
    shutil.rmtree(scratch, ignore_errors=True)
