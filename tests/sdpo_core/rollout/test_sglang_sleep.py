"""Servers that sleep between two samplings: memory comes back with weights, or nothing goes on."""

import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import Sampling
from sdpo_core.rollout.publish import canary_rows
from sdpo_core.rollout.sglang import SglangEngine, load_engine
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Limits
from sdpo_core.sglang.wire import GenerateRequest, ScoreRequest
from sdpo_core.specs import CellSpec, SglangSpec
from tests.sdpo_core.micro import Base, make_spec
from tests.sdpo_core.rollout.test_local import END, requests
from tests.sdpo_core.rollout.test_sglang import endpoint_of, make_policy, servers, train, trained_engine
from tests.sdpo_core.sglang.families import member
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, ask

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(temperature=1.0, max_response_tokens=12)
LIMITS = Limits(stall_seconds=2.0, health_seconds=2.5, attempts=2)
# Of 256 bytes each in two layers: 64 MiB, beside which the micro model is nothing.
TOKENS = 262_144
MEBIBYTE = 2**20


def sleeping(spec: CellSpec) -> CellSpec:
    return make_spec(spec).model_copy(update={"sglang": SglangSpec(sleep=True, max_total_tokens=TOKENS)})


@pytest.fixture(scope="module")
def policy(base: Base) -> ModelPolicy:
    return make_policy(base)


@pytest.fixture(scope="module")
def engine(base: Base, policy: ModelPolicy, cell_spec: CellSpec) -> Iterator[SglangEngine]:
    """Its weights are not those that its server starts with."""
    with trained_engine(sleeping(cell_spec), policy=policy, base=base, limits=LIMITS) as engine:
        yield engine


def process(engine: SglangEngine, name: str) -> psutil.Process:
    return member(servers(engine).managed[0].processes(), name)


def memory(engine: SglangEngine) -> int:
    return int(process(engine, "scheduler").memory_info().rss)


def ids(rollouts: tuple[Rollout, ...]) -> list[tuple[int, ...]]:
    return [rollout.response_ids for rollout in rollouts]


@pytest.fixture
def sendings(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions in the order in which they are sent."""
    sent: list[int] = []
    path = servers(engine)._path
    send = path.send

    def record(client: SglangClient, *, version: int) -> None:
        sent.append(version)
        send(client, version=version)

    monkeypatch.setattr(path, "send", record)
    return sent


def test_memory_is_given_back_while_nothing_is_sampled(engine: SglangEngine) -> None:
    """From the start on, again and again: the KV cache of 64 MiB, and nothing is left behind."""
    asleep = [memory(engine)]
    for _ in range(3):
        engine.generate(requests(), sampling=SAMPLING)
        asleep.append(memory(engine))
        servers(engine).wake()
        assert memory(engine) - asleep[-1] > 56 * MEBIBYTE
        servers(engine).sleep()
        asleep.append(memory(engine))
    # The first sampling leaves what torch allocates once.
    assert max(asleep[1:]) - min(asleep[1:]) < 8 * MEBIBYTE
    assert 0 <= asleep[1] - asleep[0] < 32 * MEBIBYTE


def test_rollouts_are_those_of_servers_that_stay_awake(
    engine: SglangEngine, policy: ModelPolicy, sendings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samplings with one version, as of a step and an evaluation; weights are sent once for each waking."""
    train(policy)
    slept = [engine.generate(requests(24), sampling=SAMPLING) for _ in range(2)]
    version = policy.weights_version()
    assert sendings == [version] * 2
    with monkeypatch.context() as patch:
        patch.setattr(servers(engine), "sleep", lambda: None)
        awake = [engine.generate(requests(24), sampling=SAMPLING) for _ in range(3)]
    # The first of them has woken the server.
    assert sendings == [version] * 3
    servers(engine).sleep()
    for found in (*slept, *awake):
        assert ids(found) == ids(awake[-1])
        assert {rollout.weights_version for rollout in found} == {version}
        for one, other in zip(found, awake[-1], strict=True):
            np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, rtol=0, atol=1e-5)


def test_each_waking_has_the_policys_weights(engine: SglangEngine, policy: ModelPolicy, sendings: list[int]) -> None:
    for _ in range(2):
        train(policy)
        found = engine.generate(requests(), sampling=SAMPLING)
        rows = [TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids) for rollout in found]
        for rollout, score in zip(found, policy.score(rows, top_k=0), strict=True):
            np.testing.assert_allclose(rollout.sampling_logps, score.logps, rtol=0, atol=1e-5)
    assert sendings == [policy.weights_version() - 1, policy.weights_version()]


def test_room_is_made_on_the_gpu_before_each_waking(
    engine: SglangEngine, policy: ModelPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch keeps what training has used; a server that wakes beside it would find no memory."""
    happened: list[str] = []
    client, wake = servers(engine).client, servers(engine).client.wake

    def record() -> None:
        happened.append("wake")
        wake()

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("room"))
    monkeypatch.setattr(client, "wake", record)
    train(policy)
    for _ in range(2):
        engine.generate(requests(), sampling=SAMPLING)
    assert happened == ["room", "wake"] * 2


def test_weights_left_out_after_a_waking_stop_the_cell(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server holds zeros and still the tag of the weights that it had: it would sample uniformly."""
    expected = engine.generate(requests(), sampling=SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(servers(engine)._path, "send", lambda *_, **__: None)
        for _ in range(2):
            with pytest.raises(CellError, match="server 0: got log-probabilities that differ from the trainer's by"):
                engine.generate(requests(), sampling=SAMPLING)
        # That it was uniform indeed.
        (row, _) = canary_rows([(1, 2)], vocab=END + 1)
        request = ScoreRequest(prompt_ids=row.prompt_ids, response_ids=row.response_ids, temperature=1.0)
        (score,) = servers(engine).client.score([request])
        assert np.ptp(score.logps) < 1e-6  # type: ignore[union-attr]
        assert score.logps[0] == pytest.approx(-np.log(END + 1), abs=1e-5)  # type: ignore[union-attr]
    assert ids(engine.generate(requests(), sampling=SAMPLING)) == ids(expected)


def test_stale_weights_after_a_waking_stop_the_cell(
    engine: SglangEngine, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the base, under the number of the newest."""
    expected = engine.generate(requests(), sampling=SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(
            servers(engine)._path,
            "send",
            lambda client, *, version: client.update_from_folder(base.folder, version=version),
        )
        with pytest.raises(CellError, match="server 0: got log-probabilities that differ from the trainer's by"):
            engine.generate(requests(), sampling=SAMPLING)
    assert ids(engine.generate(requests(), sampling=SAMPLING)) == ids(expected)


def test_sleeping_server_answers_no_request(engine: SglangEngine) -> None:
    engine.generate(requests(2), sampling=SAMPLING)
    client = servers(engine).client
    for _ in range(2):
        with pytest.raises(DataError, match=r"HTTP 400 .*the server sleeps"):
            client.generate([GenerateRequest(prompt_ids=(1, 2), seed=1, temperature=1.0, max_new_tokens=2, end_id=END)])
        with pytest.raises(DataError, match=r"HTTP 400 .*the server sleeps"):
            client.score([ScoreRequest(prompt_ids=(1, 2), response_ids=(3,), temperature=1.0)])
        # Told twice, as by a client that got no answer.
        client.sleep()


def test_error_while_sampling_leaves_an_engine_that_goes_on(
    engine: SglangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays awake: what was under way is not waited for."""
    expected = engine.generate(requests(), sampling=SAMPLING)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_request", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(requests(), sampling=SAMPLING)
    assert ids(engine.generate(requests(), sampling=SAMPLING)) == ids(expected)


def test_server_that_keeps_its_memory_is_refused(
    engine: SglangEngine, policy: ModelPolicy, base: Base, cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of somebody else, who has not started it with the flag."""
    server = servers(engine).managed[0]
    through = ask(endpoint_of(server))

    def answer(call: Call) -> Reply:
        reply = through(call)
        return Reply(
            status=reply.status, body=reply.body.replace(b'"enable_memory_saver":true', b'"enable_memory_saver":false')
        )

    with Proxy(answer) as proxy:
        monkeypatch.setenv("SDPO_SGLANG_URL", proxy.url)
        monkeypatch.setenv("SDPO_SGLANG_TOKEN", server.token)
        with pytest.raises(SpecError, match="that keeps its memory, expected one that can sleep"):
            load_engine(sleeping(cell_spec), policy=policy, folder=base.folder, device="cpu")
        assert {call.path for call in proxy.calls} == {"/server_info", "/model_info"}


@pytest.mark.parametrize(("name", "number"), [("http", signal.SIGKILL), ("scheduler", signal.SIGSTOP)])
def test_server_that_died_or_hung_asleep_is_started_again(
    engine: SglangEngine, name: str, number: signal.Signals
) -> None:
    expected = engine.generate(requests(), sampling=SAMPLING)
    url = servers(engine).managed[0].url
    process(engine, name).send_signal(number)
    found = engine.generate(requests(), sampling=SAMPLING)
    assert servers(engine).managed[0].url != url
    assert ids(found) == ids(expected)
    assert {rollout.weights_version for rollout in found} == {rollout.weights_version for rollout in expected}


def test_server_that_does_not_fall_asleep_is_ended_and_started_again(engine: SglangEngine) -> None:
    """Its memory is free all the same, and the restart is none of those that a cell may have."""
    expected, counted = engine.generate(requests(), sampling=SAMPLING), servers(engine)._restarts
    servers(engine).wake()
    process(engine, "scheduler").send_signal(signal.SIGSTOP)
    servers(engine).sleep()
    assert servers(engine).managed[0].processes() == ()
    assert ids(engine.generate(requests(), sampling=SAMPLING)) == ids(expected)
    assert servers(engine)._restarts == counted
