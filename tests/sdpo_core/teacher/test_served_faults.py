"""A served teacher whose server, or the way to it, fails: a failure with its reason each, and no score in its place."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from sdpo_core.backends.base import TeacherFailure, TeacherScores
from sdpo_core.errors import CellError, DataError
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.specs import CellSpec
from sdpo_core.workers import TeacherWorker
from tests.sdpo_core.micro import Base
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, as_json, ask
from tests.sdpo_core.teacher.serving import (
    TOLERANCE,
    K,
    largest_gap,
    questions,
    scorer_of,
    static_spec,
    trainer_teacher,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

QUICK = Limits(read_seconds=3.0, attempts=2, first_wait_seconds=0.02, retry_seconds=8.0)


@contextmanager
def between(worker: TeacherWorker, spoil: Callable[[Call, Reply], Reply], *, limits: Limits) -> Iterator[Proxy]:
    """What the server answers passes through `spoil` while the block lasts."""
    scorer = scorer_of(worker)
    straight, client = ask(scorer._endpoint()), scorer._client
    with Proxy(lambda call: spoil(call, straight(call))) as proxy:
        scorer._client = SglangClient([Endpoint(url=proxy.url, token=scorer.server.token)], limits=limits)
        try:
            yield proxy
        finally:
            scorer._client = client


def is_score(call: Call) -> bool:
    return call.path == "/generate" and "custom_params" in call.body["sampling_params"]


def is_chosen(call: Call) -> bool:
    """The questions with a prompt of 2 tokens."""
    return is_score(call) and call.body["logprob_start_len"] == 1


def busy(call: Call, reply: Reply) -> Reply:
    return Reply(status=503, body=b"busy") if is_chosen(call) else reply


def late(call: Call, reply: Reply) -> Reply:
    if is_chosen(call):
        time.sleep(QUICK.read_seconds + 1)
    return reply


def damaged(call: Call, reply: Reply) -> Reply:
    """NaN in one number of a score."""
    if not is_chosen(call):
        return reply
    answer = json.loads(reply.body)
    meta = answer["meta_info"]
    values = np.frombuffer(base64.b64decode(meta["input_top_logprobs_val_flat_b64"]), "<f4").copy()
    values[3] = np.nan
    meta["input_top_logprobs_val_flat_b64"] = base64.b64encode(values.tobytes()).decode()
    return as_json(answer)


@pytest.mark.parametrize(
    ("spoil", "reason"), [(busy, "HTTP 503"), (late, "TimeoutError|timed out"), (damaged, "no numbers")]
)
def test_a_question_without_an_answer_is_a_failure_with_its_reason(
    static: TeacherWorker, cell_spec: CellSpec, base: Base, spoil: Callable[[Call, Reply], Reply], reason: str
) -> None:
    """Contract 27: of a server that is well. The other questions have their scores."""
    trainer = trainer_teacher(static_spec(cell_spec), folder=base.folder)
    asked = questions(trainer)
    wanted = trainer.score(asked, support="student", top_k=K)
    with between(static, spoil, limits=QUICK):
        found = static.score(asked, support="student", top_k=K)
    failed = [index for index, answer in enumerate(found) if isinstance(answer, TeacherFailure)]
    assert failed == [index for index, question in enumerate(asked) if len(question.row.prompt_ids) == 2]
    assert len(failed) == 3
    for index in failed:
        answer = found[index]
        assert isinstance(answer, TeacherFailure)
        assert any(part in answer.reason for part in reason.split("|")), answer.reason
    kept = [index for index in range(len(asked)) if index not in failed]
    assert largest_gap([found[index] for index in kept], [wanted[index] for index in kept]) <= TOLERANCE


def test_a_fault_that_passes_costs_no_answer(static: TeacherWorker, cell_spec: CellSpec, base: Base) -> None:
    """Every fifth request is answered 503: asked again, all have the trainer's scores."""
    trainer = trainer_teacher(static_spec(cell_spec), folder=base.folder)
    asked = questions(trainer)
    count = iter(range(1_000_000))
    limits = Limits(first_wait_seconds=0.02)
    with between(static, lambda _, reply: Reply(status=503) if next(count) % 5 == 0 else reply, limits=limits) as proxy:
        found = static.score(asked, support="union", top_k=K)
    assert largest_gap(found, trainer.score(asked, support="union", top_k=K)) <= TOLERANCE
    assert sum("rid" in body for body in proxy.bodies()) > len(asked)


def test_scores_at_other_ids_are_an_error(static: TeacherWorker, cell_spec: CellSpec, base: Base) -> None:
    """Contract 29: as a server without the hooks answers, with the ids it finds best. Not one is taken for a score."""

    def stock(call: Call, reply: Reply) -> Reply:
        if not is_score(call):
            return reply
        answer = json.loads(reply.body)
        meta = answer["meta_info"]
        ids = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), "<i4").copy()
        ids[0] = 258 if ids[0] != 258 else 257
        meta["input_top_logprobs_idx_flat_b64"] = base64.b64encode(ids.tobytes()).decode()
        return as_json(answer)

    asked = questions(trainer_teacher(static_spec(cell_spec), folder=base.folder))
    with between(static, stock, limits=QUICK), pytest.raises(DataError, match="other ids than were asked for"):
        static.score(asked, support="student", top_k=K)


def test_server_that_does_not_answer_the_canary_ends_the_cell(static: TeacherWorker) -> None:
    """Contract 28: the reason is in the message, and where the server's log is."""

    def refuse(call: Call, reply: Reply) -> Reply:
        return Reply(status=503, body=b"busy") if is_score(call) else reply

    with between(static, refuse, limits=QUICK), pytest.raises(CellError, match=r"canary .*HTTP 503.*server\.log"):
        static.facts()
    assert isinstance(static.score(questions(static)[:1], support=None, top_k=0)[0], TeacherScores)
