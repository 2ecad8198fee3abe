"""A teacher that an SGLang server scores for: each question over HTTP, each answer held against it.

The server belongs to this worker: started with it, ended with it, and started again with the current weights when it
has died. A question without an answer is a failure with its reason; nothing stands in for its scores.
"""

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sdpo_core.algorithm_specs import Support, TeacherSpec
from sdpo_core.backends.base import (
    Projection,
    TeacherFailure,
    TeacherQuestion,
    TeacherScores,
    WeightsAt,
    WorkerFacts,
)
from sdpo_core.backends.memory import memory_kind, resident_peak_bytes
from sdpo_core.backends.weight_files import read_weights
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import read_json, write_json
from sdpo_core.sglang.batch import Failure
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.server import ManagedServer, ServerSpec
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.sglang.wire import ScoreAnswer, ScoreRequest
from sdpo_core.specs import CellSpec, Dtype
from sdpo_core.teacher.schedule import commit_rate
from sdpo_core.teacher.served_answers import score_request, teacher_scores
from sdpo_core.teacher.served_weights import CANARY_K, ServedWeights

_log = logging.getLogger(__name__)

# What the checkpoint of a teacher that never changes holds in the place of its weights.
DIGEST_FILE = "served.json"
# Nats. In float32 the gap is that of sums in another order. In bfloat16 it is between a server that keeps 8 bits of
# logits and a master copy that keeps 24, at ids few of which are likely: 0.37 was measured on a tiny model.
_TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.5}
# Beside the longest sequence: what SGLang keeps free.
_SPARE_TOKENS = 64
# Rows of logits that are in the server's memory at once (512 rows of 152k float32 are 311 MB).
_CHUNKS = (("SGLANG_ENABLE_LOGPROB_CHUNK", "1"), ("SGLANG_LOGPROB_CHUNK_SIZE", "512"))
# A server that is gone is started again sooner than others would be waited for.
_LIMITS = Limits(retry_seconds=10.0)
_MAX_RESTARTS = 5
_CPU = torch.device("cpu")


def load_scorer(
    spec: CellSpec, *, life: TeacherSpec, at: WeightsAt, device: str, scratch: Path | None
) -> "ServedScorer":
    """Start a server for the teacher of a cell. `scratch`: for its log, and for weights on their way to it."""
    scratch = Path(tempfile.mkdtemp(prefix="sdpo-teacher-")) if scratch is None else scratch
    training = spec.training
    weights = ServedWeights(
        at,
        dtype=getattr(torch, spec.dtype),
        temperature=training.temperature,
        tolerance=_TOLERANCES[spec.dtype],
        follows=commit_rate(life) is not None,
        scratch=scratch,
    )
    longest = max(training.max_prompt_tokens, training.max_teacher_prompt_tokens) + training.max_response_tokens
    server = teacher_server(
        weights,
        dtype=spec.dtype,
        tokens=max(training.microbatch_tokens, longest),
        threads=spec.threads_per_worker,
        device=device,
        scratch=scratch,
    )
    return ServedScorer(server, weights, temperature=training.temperature)


def teacher_server(
    weights: ServedWeights, *, dtype: Dtype, tokens: int, threads: int, device: str, scratch: Path
) -> ManagedServer:
    """A server for a teacher, not started yet. `tokens`: what it holds at once, the longest sequence at least."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
    spec = ServerSpec(
        model=weights.folder,
        dtype=dtype,
        valid_vocab=weights.vocab,
        max_total_tokens=tokens + _SPARE_TOKENS,
        threads=threads,
        deterministic=False,
        device=kind,
        environment=_CHUNKS,
    )
    return ManagedServer(spec, folder=scratch)


class ServedScorer:
    """A `ScoringModel` over its own server, which is started here and ended by `close`, or with this process."""

    def __init__(
        self, server: ManagedServer, weights: ServedWeights, *, temperature: float, limits: Limits | None = None
    ) -> None:
        self.server = server
        self._weights = weights
        self._temperature = temperature
        # Of the weights that the canary was scored with.
        self._tag: str | None = None
        self._restarts = 0
        server.start()
        try:
            self._client = SglangClient([self._endpoint()], limits=limits or _LIMITS)
            self._check_canary()
        except BaseException:
            server.stop()
            raise

    def close(self) -> None:
        """End the server."""
        self.server.stop()

    def score(
        self, questions: Sequence[TeacherQuestion], *, support: Support | None, top_k: int
    ) -> tuple[TeacherScores | TeacherFailure, ...]:
        """Scores of each response under its prompt, float32, at the cell's temperature.

        Questions that a dead or hanging server has left are asked once more, of a new one.
        """
        requests = [self._request(question, support=support, top_k=top_k) for question in questions]
        found = self._ask(requests)
        left = [index for index, answer in enumerate(found) if isinstance(answer, Failure)]
        if left and not self._is_well():
            self._restart()
            for index, answer in zip(left, self._ask([requests[index] for index in left]), strict=True):
                found[index] = answer
        return tuple(
            self._scores(question, answer, support=support) for question, answer in zip(questions, found, strict=True)
        )

    def projection(self) -> Projection:
        raise SpecError(
            "served teacher: got asked for its output projection, expected a support of ids. A divergence over the "
            "whole vocabulary needs teacher_placement 'trainer'."
        )

    def projection_version(self) -> int:
        return self._weights.version

    def weights(self) -> dict[str, Tensor]:
        master = self._weights.master
        return read_weights(self._weights.published) if master is None else master.weights()

    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        """One commit: into the master copy, and from there to the server."""
        master = self._weights.master
        if master is None:
            raise SpecError("served teacher: got a commit, expected none: its schedule is 'static'.")
        master.blend(weights, rate=rate)
        self._publish()

    def save(self, folder: Path) -> None:
        """The master copy; of a teacher that never changes the digest of its weights alone."""
        if self._weights.master is not None:
            self._weights.master.save_weights(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / DIGEST_FILE, {"weights_sha256": self._weights.digest()})

    def load(self, folder: Path) -> None:
        """What `save` has written.

        Raises:
            CellError: a static teacher's weights are others than those of the checkpoint.
        """
        if self._weights.master is not None:
            self._weights.master.load_weights(folder)
            self._publish()
            return
        saved, found = str(read_json(folder / DIGEST_FILE)["weights_sha256"]), self._weights.digest()
        if saved != found:
            raise CellError(
                f"served teacher {self._weights.folder}: got weights {found}, expected {saved} of {folder}. "
                "Put the weights back that the cell was started with."
            )

    def facts(self) -> WorkerFacts:
        """Digest of the weights that were given to the server, read anew, and the canary shows that it has them."""
        self._ensure()
        return WorkerFacts(pid=os.getpid(), weights_sha256=self._weights.digest(), memory_kind=memory_kind(_CPU))

    def peak_memory_bytes(self) -> int:
        """Of this process or one of the server's, whichever needs most, in main memory."""
        return max(resident_peak_bytes(pid) for pid in (os.getpid(), *(one.pid for one in self.server.processes())))

    def _request(self, question: TeacherQuestion, *, support: Support | None, top_k: int) -> ScoreRequest:
        if support == "full":
            self.projection()
        return score_request(
            question, support=support, top_k=top_k, temperature=self._temperature, vocab=self._weights.vocab
        )

    def _ask(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer | Failure]:
        """Answers in order. One that does not fit ends the client's call: then each is asked for by itself.

        Raises:
            DataError: none fits.
        """
        try:
            return list(self._client.score(requests))
        except DataError:
            if len(requests) == 1:
                raise
        found: list[ScoreAnswer | Failure] = []
        unfit: list[DataError] = []
        for request in requests:
            try:
                found += self._client.score([request])
            except DataError as error:
                unfit.append(error)
                found.append(Failure(reason=str(error)))
        if len(unfit) == len(requests):
            raise unfit[0]
        return found

    def _scores(
        self, question: TeacherQuestion, answer: ScoreAnswer | Failure, *, support: Support | None
    ) -> TeacherScores | TeacherFailure:
        if isinstance(answer, Failure):
            return TeacherFailure(reason=answer.reason)
        if answer.weights != self._tag:
            raise DataError(
                f"served teacher: got scores of weights {answer.weights!r}, expected {self._tag!r}, which the canary "
                "was scored with. Nobody else may update its server."
            )
        return teacher_scores(question, answer, support=support)

    def _publish(self) -> None:
        self._ensure(sent=self._weights.publish())
        self._weights.keep_last()

    def _ensure(self, *, sent: Path | None = None) -> None:
        """Have the server read `sent`, and check the canary; with a new server where this one has died or hangs."""
        try:
            if sent is not None:
                self._client.update_from_folder(sent, version=self._weights.version)
            self._check_canary()
        except CellError as error:
            if self._is_well():
                raise
            _log.warning("%s", error)
            self._restart()

    def _is_well(self) -> bool:
        return self.server.is_alive() and all(self._client.health())

    def _restart(self) -> None:
        """Start the server again, with the current weights.

        Raises:
            CellError: too often, it does not come back, or the weights in its folder have changed.
        """
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise CellError(
                f"served teacher: got a server that died or hung {self._restarts} times, expected at most "
                f"{_MAX_RESTARTS} in a cell. It said: {self.server.last_words()}. Read {self.server.log_path}."
            )
        _log.warning("served teacher: starts its server again; it said: %s", self.server.last_words())
        self._weights.check_folder()
        self.server.restart()
        self._client.use([self._endpoint()])
        if self._weights.version:
            self._client.update_from_folder(self._weights.published, version=self._weights.version)
        self._check_canary()

    def _check_canary(self) -> None:
        """Raise CellError unless the server holds the weights that it has to hold."""
        questions = self._weights.canary
        requests = [self._request(question, support="student", top_k=CANARY_K) for question in questions]
        answers = self._ask(requests)
        failed = [answer.reason for answer in answers if isinstance(answer, Failure)]
        if failed:
            raise CellError(
                f"served teacher: got no answer to the canary ({failed[0]}), expected one. "
                f"It said: {self.server.last_words()}. Read {self.server.log_path}."
            )
        scored = [answer for answer in answers if isinstance(answer, ScoreAnswer)]
        self._weights.check_canary(
            tuple(
                teacher_scores(question, answer, support="student")
                for question, answer in zip(questions, scored, strict=True)
            )
        )
        self._tag = scored[0].weights

    def _endpoint(self) -> Endpoint:
        return Endpoint(url=self.server.url, token=self.server.token)
