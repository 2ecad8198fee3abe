"""The SGLang engine: samples over HTTP from servers that hold a copy of the weights the policy trains.

Process 0 of the student starts the servers (or takes those of SDPO_SGLANG_URL), asks them, and tells the others; these
take part where weights are put together. They are published before the first sampling after a change, when nothing is
under way, so a rollout is of one version. Servers that sleep between two samplings get them before each.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from sdpo_core.backends.base import Policy
from sdpo_core.errors import CellError, DataError
from sdpo_core.records import Rollout
from sdpo_core.rendezvous import patient_group
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.publish import RESPONSE_TOKENS, canary_rows, publish
from sdpo_core.rollout.sglang_servers import Servers, visible_gpus
from sdpo_core.sglang.batch import Failure
from sdpo_core.sglang.transport import Limits
from sdpo_core.sglang.wire import GenerateAnswer, GenerateRequest
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer

# Calls for what is left, when servers fail on requests and are healthy all the same.
_TRIES = 3


def load_engine(
    spec: CellSpec,
    *,
    policy: Policy,
    folder: Path,
    device: str,
    scratch: Path | None = None,
    limits: Limits | None = None,
) -> "SglangEngine":
    """Servers that have started with the base in `folder`, and the engine that samples from them.

    `scratch`: gets the servers' logs; without it they go with the servers. `limits`: of the client's patience.

    Raises:
        SpecError: a server is not what the cell asks for.
        CellError: one did not start.
    """
    text = ChatTokenizer.load(folder)
    group = patient_group()
    gpus = visible_gpus(group) if device.startswith("cuda") else ()
    servers = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        servers = Servers(spec, text=text, folder=folder, device=device, gpus=gpus, kept=scratch, limits=limits)
    return SglangEngine(policy, spec=spec, text=text, servers=servers, group=group)


class SglangEngine:
    """Samples with the policy's weights of the moment. `servers`: of process 0; `group`: of all processes."""

    def __init__(
        self,
        policy: Policy,
        *,
        spec: CellSpec,
        text: ChatTokenizer,
        servers: Servers | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._text = text
        self.servers = servers
        self._group = group
        self._version: int | None = None

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        """One rollout a request, in order; all processes of the student call it and have all of them.

        Raises:
            DataError: a request does not fit the model, or an answer its request.
            CellError: servers hold other weights, or cannot be brought back.
        """
        if not requests:
            return ()
        self._check_lengths(requests, sampling=sampling)
        if self._version != self._policy.weights_version():
            self._follow([request.prompt_ids for request in requests])
        else:
            self._make_room()
            if self.servers is not None:
                self.servers.wake()
        found = [() if self.servers is None else self._sample(self.servers, requests, sampling=sampling)]
        if self._group is not None:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def _check_lengths(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> None:
        positions = self._spec.base.shape.max_positions
        longest = max(len(request.prompt_ids) for request in requests) + sampling.max_response_tokens
        if longest > positions:
            raise DataError(
                f"SglangEngine.generate: got a sequence of {longest} tokens, expected at most {positions}. "
                "Shorten the prompts or the responses in the profile."
            )

    def _follow(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Publish the weights as they are now: put together by all processes, sent by process 0."""
        room = self._spec.base.shape.max_positions - RESPONSE_TOKENS
        canary = canary_rows([prompt[-room:] for prompt in prompts], vocab=self._text.vocab_size)
        publication = publish(self._policy, canary=canary)
        self._make_room()
        if self.servers is not None:
            self.servers.publish(publication)
        self._version = publication.version

    def _make_room(self) -> None:
        """In every process, before servers that sleep want the memory that torch keeps on a GPU for later."""
        if self._spec.sglang.sleep:
            torch.cuda.empty_cache()
            if self._group is not None:
                dist.barrier(group=self._group)

    def _sample(
        self, servers: Servers, requests: Sequence[RolloutRequest], *, sampling: Sampling
    ) -> tuple[Rollout, ...]:
        asked = [self._request(request, sampling=sampling) for request in requests]
        answers: dict[int, GenerateAnswer] = {}
        reason, tries = "", 0
        while len(answers) < len(asked):
            left = [index for index in range(len(asked)) if index not in answers]
            for index, answer in zip(left, servers.client.generate([asked[index] for index in left]), strict=True):
                if isinstance(answer, Failure):
                    reason = answer.reason
                else:
                    answers[index] = answer
            if len(answers) == len(asked) or servers.bring_back(reason):
                continue
            if (tries := tries + 1) == _TRIES:
                raise CellError(
                    f"sglang engine: got {len(asked) - len(answers)} of {len(asked)} rollouts unanswered ({reason}), "
                    "expected all. Look at the server's log."
                )
        servers.sleep()
        return tuple(self._rollout(request, answers[index], servers.version) for index, request in enumerate(requests))

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
