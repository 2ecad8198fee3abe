"""The servers of the SGLang engine: started, given weights that a canary must show, and brought back when they fail."""

import json
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch.distributed as dist

from sdpo_core.errors import CellError, SpecError
from sdpo_core.rollout.publish import RESPONSE_TOKENS, TOLERANCES, Publication, check_canary
from sdpo_core.rollout.sglang_weights import make_weight_path
from sdpo_core.rollout.table import LIVE
from sdpo_core.sglang.address import external_servers
from sdpo_core.sglang.batch import Answer, Failure
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.server import ManagedServer, ServerSpec
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.sglang.wire import GenerateRequest, ScoreAnswer, ScoreRequest
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer

_log = logging.getLogger(__name__)

_MAX_RESTARTS = 5
_MIN_REQUESTS = 64
_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


class Servers:
    """Several with the same weights, started here unless SDPO_SGLANG_URL names others.

    `close` ends those that were started here, as the process's end does. `gpus`: where they start, in turn. `kept`: a
    folder for what they print, which goes with them otherwise. `limits`: of the client's patience.
    """

    def __init__(
        self,
        spec: CellSpec,
        *,
        text: ChatTokenizer,
        folder: Path,
        device: str,
        kept: Path | None = None,
        gpus: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self._spec = spec
        self._text = text
        self._published: Publication | None = None
        self._restarts = 0
        self._is_asleep = False
        self._is_ended = False
        external = external_servers()
        place = kept or Path(tempfile.mkdtemp(prefix="sdpo-sglang-"))
        self.scratch = place / LIVE
        managed: list[ManagedServer] = []
        self.close = weakref.finalize(self, _close, managed, place if kept is None else self.scratch)
        try:
            # Of a run that was killed.
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            managed += () if external else self._make(folder, device=device, gpus=gpus, place=place)
            self.managed = tuple(managed)
            self._path = make_weight_path(spec, folder=self.scratch / "weights", is_managed=not external)
            with ThreadPoolExecutor(max(1, len(self.managed))) as pool:
                list(pool.map(ManagedServer.start, self.managed))
            self.client = SglangClient(
                external or self._endpoints(), concurrency=spec.sglang.concurrency, limits=limits, seed=spec.seed
            )
            self._check()
            self.sleep()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the weights that all of them hold."""
        if self._published is None:
            raise CellError("sglang engine: got no weights yet, expected some. Publish them first.")
        return self._published.version

    def publish(self, publication: Publication) -> None:
        """Give every server these weights, from now on.

        Raises:
            CellError: the canary shows that one has not taken them, or cannot be brought back.
        """
        self._path.hold(publication.weights)
        is_first = self._published is None
        # What is sent again is the path's; the weights need no second place in memory.
        self._published = replace(publication, weights={})
        self._send()
        if is_first:
            self._check_temperature()

    def bring_back(self, reason: str) -> bool:
        """Start those of ours again that do not generate, with the weights published last; whether there was one.

        Raises:
            CellError: too often, or one does not come back.
        """
        is_back = self._restart_dead(reason)
        if is_back:
            self._send()
        return is_back

    def sleep(self) -> None:
        """Have them give their memory back until `publish` or `wake`, where the cell asks for it.

        Those of ours are ended when one of them does not, which gives it back as well: they start again with `wake`.

        Raises:
            CellError: one that somebody else has started does not.
        """
        if not self._spec.sglang.sleep:
            return
        self._is_asleep = True
        try:
            self.client.sleep()
        except CellError as error:
            if not self.managed:
                raise
            _log.warning("ends servers that do not sleep: %s", error)
            for server in self.managed:
                server.stop()
            self._is_ended = True

    def wake(self) -> None:
        """Give them memory and the weights published last; nothing happens when they are awake.

        Raises:
            CellError: as `publish`.
        """
        if self._is_asleep:
            self._send()

    def _make(self, folder: Path, *, device: str, gpus: Sequence[str], place: Path) -> tuple[ManagedServer, ...]:
        kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
        server = ServerSpec(
            model=_served_folder(folder, self.scratch / "base", end_id=self._text.end_id),
            dtype=self._spec.dtype,
            valid_vocab=self._text.vocab_size,
            max_total_tokens=self._spec.sglang.max_total_tokens,
            threads=self._spec.threads_per_worker,
            deterministic=self._spec.sglang.deterministic,
            sleep=self._spec.sglang.sleep,
            device=kind,
            max_requests=max(_MIN_REQUESTS, self._spec.sglang.concurrency),
            memory_fraction=self._spec.sglang.memory_fraction,
        )
        return tuple(
            ManagedServer(
                replace(server, environment=gpu_environment(index, gpus=gpus)),
                folder=place / f"server-{index}",
            )
            for index in range(self._spec.sglang.replicas)
        )

    def _endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(url=server.url, token=server.token) for server in self.managed)

    def _check(self) -> None:
        training, wanted = self._spec.training, self._spec.sglang.deterministic
        longest = training.max_prompt_tokens + training.max_response_tokens
        for info in self.client.info():
            if info.is_deterministic != wanted or info.max_tokens < longest:
                raise SpecError(
                    f"sglang engine: got a server of {info.model} with deterministic {info.is_deterministic} and room "
                    f"for {info.max_tokens} tokens, expected {wanted} and at least {longest}. Start it with other "
                    "flags, or change `sglang` in the profile."
                )
            if self._spec.sglang.sleep and not info.can_sleep:
                raise SpecError(
                    f"sglang engine: got a server of {info.model} that keeps its memory, expected one that can sleep. "
                    "Start it with --enable-memory-saver, or change `sglang` in the profile."
                )

    def _check_temperature(self) -> None:
        """A server may be told to give the log-probabilities of what it samples at temperature 1, whatever it is."""
        temperature, vocab = self._spec.training.temperature, self._text.vocab_size
        prompt = tuple(index % vocab for index in range(RESPONSE_TOKENS))
        asked = GenerateRequest(
            prompt_ids=prompt,
            seed=0,
            temperature=temperature,
            max_new_tokens=RESPONSE_TOKENS,
            end_id=self._text.end_id,
        )
        for index in range(self.client.num_servers):
            where = f"sglang engine, server {index}"
            (sampled,) = _answered(self.client.generate([asked], server=index), where=where)
            again = ScoreRequest(prompt_ids=prompt, response_ids=sampled.response_ids, temperature=temperature)
            (score,) = _answered(self.client.score([again], server=index), where=where)
            gap = float(np.abs(sampled.logps - score.logps).max())
            if not gap <= TOLERANCES[self._spec.dtype]:
                raise SpecError(
                    f"{where}: got a response whose log-probabilities are {gap:.3g} nats off its scores at temperature "
                    f"{temperature:g}, expected {TOLERANCES[self._spec.dtype]:g} at most. Start it without "
                    "SGLANG_RETURN_ORIGINAL_LOGPROB."
                )

    def _send(self) -> None:
        """Give every server the published weights, until the canary shows that each has them."""
        published = self._published
        if published is None:
            return
        if self._is_ended:
            self._restart(self.managed)
            self._is_ended = False
        while True:
            try:
                if self._is_asleep:
                    self.client.wake()
                self._path.send(self.client, version=published.version)
                scores = self._canary_scores(published)
                break
            except CellError as error:
                if not self._restart_dead(str(error)):
                    raise
        for index, found in enumerate(scores):
            where = f"sglang engine, server {index}"
            gaps = [score.logps for score in found]
            check_canary(published, gaps, tolerance=TOLERANCES[self._spec.dtype], where=where)
        # Not before: a server that is awake and holds no model would be asked.
        self._is_asleep = False

    def _canary_scores(self, published: Publication) -> list[list[ScoreAnswer]]:
        """Of each server, each of which must hold the weights."""
        temperature = self._spec.training.temperature
        requests = [
            ScoreRequest(prompt_ids=row.prompt_ids, response_ids=row.response_ids, temperature=temperature)
            for row in published.canary
        ]
        return [
            _answered(self.client.score(requests, server=index), where=f"sglang engine, server {index}")
            for index in range(self.client.num_servers)
        ]

    def _restart_dead(self, reason: str) -> bool:
        """They hold the base then."""
        health = self.client.health() if self.managed else ()
        dead = [server for server, is_well in zip(self.managed, health, strict=True) if not is_well]
        self._restarts += len(dead)
        if self._restarts > _MAX_RESTARTS:
            raise CellError(
                f"sglang engine: got {self._restarts} servers that had died or hung, the last with: {reason} "
                f"({dead[0].last_words()}), expected at most {_MAX_RESTARTS} in a cell. Read {dead[0].log_path}."
            )
        if dead:
            self._restart(dead)
        return bool(dead)

    def _restart(self, servers: Sequence[ManagedServer]) -> None:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(ManagedServer.restart, servers))
        self.client.use(self._endpoints())


def _answered(answers: Sequence[Answer | Failure], *, where: str) -> list[Answer]:
    """All of them, or a CellError with the first reason."""
    failed = [answer.reason for answer in answers if isinstance(answer, Failure)]
    if failed:
        raise CellError(f"{where}: got no answer to the canary ({failed[0]}), expected one. Look at its log.")
    return [answer for answer in answers if not isinstance(answer, Failure)]


def visible_gpus(group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """What each process of the student sees of the machine's GPUs, as CUDA names it; all of them call it.

    Nothing where one is not restricted: it sees all, and so do the servers.
    """
    seen = [os.environ.get(_GPU_VARIABLE)]
    if group is not None:
        seen *= dist.get_world_size(group)
        dist.all_gather_object(seen, seen[0], group=group)
    named = tuple(gpus for gpus in seen if gpus is not None)
    return named if len(named) == len(seen) else ()


def gpu_environment(index: int, *, gpus: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Settings that put server `index` on its turn's entry of `gpus`; none where it may take any."""
    return ((_GPU_VARIABLE, gpus[index % len(gpus)]),) if gpus else ()


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
