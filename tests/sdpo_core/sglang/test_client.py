"""The client against servers that misbehave as a test says; what a real one does is in `test_running_client`."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.sglang.batch import Failure
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Endpoint, Limits, Transport
from sdpo_core.sglang.wire import GenerateAnswer, GenerateRequest, ScoreRequest
from tests.sdpo_core.sglang.proxy import Answerer, Call, Proxy, Reply, as_json, sampled

TOKEN = "bearer-of-tests"
QUICK = Limits(
    read_seconds=20.0, stall_seconds=0.3, health_seconds=0.3, attempts=4, first_wait_seconds=0.02, retry_seconds=2.0
)


def ask_for(count: int, *, tokens: int = 3, prompts: int | None = None) -> list[GenerateRequest]:
    """Requests with `prompts` different prompts (None: each its own), told apart by their seeds."""
    return [
        GenerateRequest(
            prompt_ids=(1, index % (prompts or count)), seed=index, temperature=1.0, max_new_tokens=tokens, end_id=9
        )
        for index in range(count)
    ]


def client_of(*proxies: Proxy, limits: Limits = QUICK, concurrency: int = 8) -> SglangClient:
    endpoints = [Endpoint(url=proxy.url, token=TOKEN) for proxy in proxies]
    return SglangClient(endpoints, limits=limits, concurrency=concurrency)


def right(call: Call) -> Reply:
    return as_json(sampled(call)) if call.path == "/generate" else Reply()


def seeds(proxy: Proxy) -> list[int]:
    """Of the requests for a response, in the order they came in."""
    return [body["sampling_params"]["sampling_seed"] for body in proxy.bodies() if "rid" in body]


def failing_first(times: int, fault: Reply) -> Answerer:
    """`fault` for the first attempts of every request."""
    lock, seen = threading.Lock(), dict[int, int]()

    def answer(call: Call) -> Reply:
        if call.path != "/generate" or "rid" not in call.body:
            return right(call)
        seed = call.body["sampling_params"]["sampling_seed"]
        with lock:
            seen[seed] = seen.get(seed, 0) + 1
            count = seen[seed]
        return fault if count <= times else right(call)

    return answer


@pytest.mark.parametrize(
    "fault",
    [
        Reply(status=503, body=b"busy"),
        Reply(status=429),
        Reply(status=500),
        Reply(body=b'{"output_ids": [7, 7, 7], "meta_info": {}}', is_cut=True),
        Reply(body=b'{"output_ids": [7, 7'),
    ],
)
def test_passing_fault_is_asked_again_under_another_name(fault: Reply) -> None:
    """The server may still hold the first name, and refuses one that is taken."""
    with Proxy(failing_first(3, fault)) as proxy:
        found = client_of(proxy).generate(ask_for(5))
        names = [body["rid"] for body in proxy.bodies() if "rid" in body]
    assert all(isinstance(answer, GenerateAnswer) for answer in found)
    assert len(set(names)) == len(names) == 20


def test_lasting_fault_is_a_failure_and_the_other_answers_are_kept() -> None:
    def answer(call: Call) -> Reply:
        is_bad = call.path == "/generate" and call.body["sampling_params"].get("sampling_seed") == 2
        return Reply(status=503, body=b"busy") if is_bad else right(call)

    with Proxy(answer) as proxy:
        found = client_of(proxy).generate(ask_for(5))
        assert seeds(proxy).count(2) == QUICK.attempts
    assert [isinstance(one, GenerateAnswer) for one in found] == [True, True, False, True, True]
    assert isinstance(found[2], Failure)
    assert found[2].reason.endswith("got HTTP 503 (busy) after 4 attempts, expected an answer")


def test_server_that_is_gone_fails_all_at_once_and_soon() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = Endpoint(url=f"http://127.0.0.1:{held.getsockname()[1]}")
        before = time.monotonic()
        found = SglangClient([endpoint], limits=QUICK).generate(ask_for(40))
    assert time.monotonic() - before < 3
    assert all(isinstance(answer, Failure) and "refused" in answer.reason for answer in found)


def test_waits_grow_are_bounded_and_come_from_the_seed() -> None:
    limits = Limits(first_wait_seconds=1.0, longest_wait_seconds=6.0)

    def waits(seed: int) -> list[float]:
        transport = Transport(Endpoint(url="http://127.0.0.1:1"), limits=limits, seed=seed)
        return [transport._wait_seconds(attempt) for attempt in range(1, 6)]

    assert waits(1) == waits(1) != waits(2)
    for wait, most in zip(waits(1), [1.0, 2.0, 4.0, 6.0, 6.0], strict=True):
        assert most / 2 <= wait <= most


def test_retries_end_in_time() -> None:
    limits = replace(QUICK, attempts=100, first_wait_seconds=0.2, retry_seconds=0.5)
    with Proxy(failing_first(100, Reply(status=503))) as proxy:
        before = time.monotonic()
        (found,) = client_of(proxy, limits=limits).generate(ask_for(1))
        assert time.monotonic() - before < 1.5
    assert isinstance(found, Failure)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Requests that wait for it are let go when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def test_hanging_server_is_given_up_in_time(gate: threading.Event) -> None:
    """Neither answers nor health: two checks of 0.3 s after 0.3 s of silence, not the 20 s that an answer may take."""

    def answer(call: Call) -> Reply:
        gate.wait(15)
        return right(call)

    with Proxy(answer, is_well=False) as proxy:
        before = time.monotonic()
        found = client_of(proxy).generate(ask_for(6))
        assert time.monotonic() - before < 4
        gate.set()
    assert all(isinstance(one, Failure) and "no answer in 0 s, and no health" in one.reason for one in found)


def test_server_that_hangs_while_it_runs_prompts_is_given_up_in_time(gate: threading.Event) -> None:
    """Then no request for a response is under way yet."""

    def answer(_: Call) -> Reply:
        gate.wait(15)
        return Reply(status=503)

    with Proxy(answer, is_well=False) as proxy:
        before = time.monotonic()
        found = client_of(proxy).generate(ask_for(6, prompts=2))
        assert time.monotonic() - before < 4
        gate.set()
    assert all(isinstance(one, Failure) and "no health" in one.reason for one in found)


def test_server_that_hangs_in_the_middle_of_an_answer_is_given_up_in_time(gate: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        return replace(right(call), rest=gate) if call.path == "/generate" else Reply(status=503)

    with Proxy(answer, is_well=False) as proxy:
        before = time.monotonic()
        found = client_of(proxy).generate(ask_for(3))
        assert time.monotonic() - before < 4
        gate.set()
    assert all(isinstance(one, Failure) and "no health" in one.reason for one in found)


def test_slow_server_that_is_well_is_waited_for(gate: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        if call.path == "/generate":
            gate.wait(1.5)
        return right(call)

    with Proxy(answer) as proxy:
        (found,) = client_of(proxy).generate(ask_for(1))
        assert any(call.path == "/health" for call in proxy.calls)
    assert isinstance(found, GenerateAnswer)


def test_other_server_takes_over_from_one_that_hangs(gate: threading.Event) -> None:
    def hanging(call: Call) -> Reply:
        gate.wait(15)
        return right(call)

    with Proxy(hanging, is_well=False) as bad, Proxy(right) as good:
        found = client_of(bad, good).generate(ask_for(12))
        assert len(seeds(good)) == 12
        gate.set()
    assert all(isinstance(one, GenerateAnswer) for one in found)


def test_requests_go_where_fewest_tokens_are_outstanding(gate: threading.Event) -> None:
    """One of 100 new tokens on one server, four of 20 on the other."""
    arrived = threading.Semaphore(0)

    def answer(call: Call) -> Reply:
        arrived.release()
        gate.wait(10)
        return right(call)

    with Proxy(answer) as one, Proxy(answer) as other:
        client = client_of(one, other, limits=replace(QUICK, stall_seconds=20.0))
        asked = [replace(request, max_new_tokens=100 if i == 0 else 20) for i, request in enumerate(ask_for(5))]
        found: list[object] = []
        caller = threading.Thread(target=lambda: found.extend(client.generate(asked)))
        caller.start()
        for _ in range(5):
            assert arrived.acquire(timeout=5)
        counts = sorted(len(proxy.bodies()) for proxy in (one, other))
        gate.set()
        caller.join(10)
    assert counts == [1, 4]
    assert len(found) == 5


def test_prompt_is_run_once_before_those_that_share_it() -> None:
    with Proxy(right) as one, Proxy(right) as other:
        client_of(one, other).generate(ask_for(12, prompts=3))
        for proxy in (one, other):
            prefilled = set()
            for body in proxy.bodies():
                if "rid" not in body:
                    assert body["sampling_params"]["max_new_tokens"] == 0
                    prefilled.add(tuple(body["input_ids"]))
                assert tuple(body["input_ids"]) in prefilled
        assert len(one.bodies()) + len(other.bodies()) == 12 + 3


def test_answers_stand_in_the_order_of_the_requests(gate: threading.Event) -> None:
    def answer(call: Call) -> Reply:
        gate.wait(0.05 * (call.body["sampling_params"].get("sampling_seed", 0) % 3))
        found = sampled(call)
        found["output_ids"][0] = found["meta_info"]["output_token_logprobs"][0][1] = 100 + call.body["input_ids"][1]
        return as_json(found)

    with Proxy(answer) as proxy:
        found = client_of(proxy).generate(ask_for(9))
    assert [one.response_ids[0] for one in found if isinstance(one, GenerateAnswer)] == [100 + i for i in range(9)]


def test_refused_request_ends_the_call_and_aborts_the_others(gate: threading.Event) -> None:
    held = threading.Semaphore(0)

    def answer(call: Call) -> Reply:
        if call.path == "/abort_request":
            gate.set()
            return Reply()
        if call.body["sampling_params"].get("sampling_seed") == 3:
            for _ in range(3):
                held.acquire(timeout=5)
            return Reply(status=400, body=f"too long, {call.token}".encode())
        held.release()
        gate.wait(10)
        return right(call)

    with Proxy(answer) as proxy:
        before = time.monotonic()
        with pytest.raises(DataError, match=r"got HTTP 400 \(too long, \(token\)\), expected an answer") as caught:
            client_of(proxy, limits=replace(QUICK, stall_seconds=20.0)).generate(ask_for(4))
        assert time.monotonic() - before < 5
        names = {body["rid"] for body in proxy.bodies() if body["sampling_params"]["sampling_seed"] != 3}
        assert {body["rid"] for body in proxy.bodies("/abort_request")} <= names
        assert proxy.bodies("/abort_request")
    assert TOKEN not in str(caught.value)


def test_token_is_sent_and_never_shown() -> None:
    with Proxy(lambda call: Reply(status=503, body=f"no, {call.token}".encode())) as proxy:
        (found,) = client_of(proxy).generate(ask_for(1))
        assert {call.token for call in proxy.calls} == {TOKEN}
    assert isinstance(found, Failure)
    assert "no, (token)" in found.reason
    assert TOKEN not in repr(Endpoint(url=proxy.url, token=TOKEN))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("count", [1, 3])
def test_refused_token_says_what_to_set(count: int) -> None:
    """Of one request, and of several that have their prompt run first."""
    with Proxy(lambda _: Reply(status=401)) as proxy, pytest.raises(SpecError, match="Set SDPO_SGLANG_TOKEN"):
        client_of(proxy).generate(ask_for(count, prompts=1))


@pytest.mark.timeout(20)
def test_server_whose_health_is_refused_is_not_well() -> None:
    """What stands between may fail on one path and want another token on the other."""
    with Proxy(lambda call: Reply(status=401 if call.path == "/health" else 503), is_well=False) as proxy:
        (found,) = client_of(proxy).generate(ask_for(1))
    assert isinstance(found, Failure)
    assert "HTTP 503" in found.reason


def test_answer_that_does_not_fit_ends_the_call() -> None:
    with Proxy(lambda call: as_json(sampled(call) | {"output_ids": [7]})) as proxy, pytest.raises(DataError):
        client_of(proxy).generate(ask_for(3))


def test_aborted_request_is_a_failure_with_its_reason() -> None:
    """Of a response as of scores: the table of these is not there then."""

    def answer(call: Call) -> Reply:
        found = sampled(call)
        found["meta_info"]["finish_reason"] = {"type": "abort", "message": "no room"}
        return as_json(found)

    with Proxy(answer) as proxy:
        client = client_of(proxy)
        assert client.generate(ask_for(1)) == (Failure(reason="sglang: got an abort (no room)"),)
        asked = ScoreRequest(prompt_ids=(1,), response_ids=(2, 3), temperature=1.0)
        assert client.score([asked]) == (Failure(reason="sglang: got an abort (no room)"),)


class Weights:
    """Takes updates; its answers name the last one, or `shown`."""

    def __init__(self, *, shown: str | None = None, refused: str | None = None) -> None:
        self.last = "default"
        self.shown = shown
        self.refused = refused

    def __call__(self, call: Call) -> Reply:
        if call.path != "/update_weights_from_disk":
            return as_json(sampled(call, weights=self.shown or self.last))
        if self.refused is not None:
            return Reply(status=400, body=self.refused.encode())
        self.last = call.body["weight_version"]
        return as_json({"success": True, "message": ""})


def test_answers_after_an_update_name_it(tmp_path) -> None:
    with Proxy(Weights()) as one, Proxy(Weights()) as other:
        client = client_of(one, other)
        for version in (4, 5):
            client.update_from_folder(tmp_path, version=version)
            found = client.generate(ask_for(6))
            assert {answer.weights.split("-")[1] for answer in found if isinstance(answer, GenerateAnswer)} == {
                str(version)
            }
        for proxy in (one, other):
            (body, _) = proxy.bodies("/update_weights_from_disk")
            assert (body["model_path"], body["flush_cache"]) == (str(tmp_path), True)


@pytest.mark.parametrize("shown", ["default", "00000000-4"])
def test_answer_of_other_weights_is_refused(tmp_path, shown: str) -> None:
    """Of a server that was started again, or that another run has updated: the number alone would not tell."""
    with Proxy(Weights(shown=shown)) as proxy:
        client = client_of(proxy)
        client.update_from_folder(tmp_path, version=4)
        with pytest.raises(DataError, match=f"got one of weights '{shown}', expected '.*-4'"):
            client.generate(ask_for(1))


def test_update_that_one_server_refuses_fails(tmp_path) -> None:
    with Proxy(Weights()) as one, Proxy(Weights(refused="no such file")) as other:
        client = client_of(one, other)
        with pytest.raises(CellError, match=r"HTTP 400 \(no such file"):
            client.update_from_folder(tmp_path, version=1)


def test_update_of_a_hanging_server_ends_in_time(tmp_path, gate: threading.Event) -> None:
    """Not after the 20 s that a response may take; a second attempt would start too late."""

    def answer(_: Call) -> Reply:
        gate.wait(15)
        return as_json({"success": True})

    with Proxy(answer) as proxy:
        client = client_of(proxy, limits=replace(QUICK, update_seconds=0.6, retry_seconds=0.3))
        before = time.monotonic()
        with pytest.raises(CellError, match=r"update_weights_from_disk.*Look at the server's log"):
            client.update_from_folder(tmp_path, version=1)
        assert 0.5 < time.monotonic() - before < 4
        gate.set()


def test_flush_is_asked_again_while_the_server_is_busy() -> None:
    replies = iter([Reply(status=400), Reply(status=400), Reply(body=b"Cache flushed.")])
    with Proxy(lambda _: next(replies)) as proxy:
        client_of(proxy).flush()
        assert len(proxy.calls) == 3


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://"])
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="expected http://HOST:PORT"):
        Endpoint(url=url)
