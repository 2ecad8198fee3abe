"""The client and a real server: what is sampled and scored equals Hugging Face, also where faults come between."""

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from sdpo_core.errors import DataError
from sdpo_core.sglang.batch import Failure
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.server import ManagedServer, ServerSpec
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.sglang.wire import GenerateAnswer, GenerateRequest, ScoreAnswer, ScoreRequest
from tests.sdpo_core.micro import Base
from tests.sdpo_core.sglang.asking import Ask, Oracle
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, ask

pytestmark = pytest.mark.sglang

END = 258  # the end token of the byte tokenizer
# float32 sums in another order; log-probabilities down to -20.
TOLERANCE = 1e-5
# Prompt, response, K, top_k; the third fills the model's 256 positions.
SHAPES = [(1, 1, 1, 1), (1, 40, 0, 3), (100, 156, 20, 20), (7, 3, 259, 5), (130, 1, 5, 0)]


@pytest.fixture(scope="module")
def oracle(server_spec: ServerSpec) -> Oracle:
    return Oracle(server_spec.model, vocab=server_spec.valid_vocab)


@pytest.fixture(scope="module")
def endpoint(server: ManagedServer) -> Endpoint:
    return Endpoint(url=server.url, token=server.token)


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> SglangClient:
    return SglangClient([endpoint])


def prompts(count: int, *, length: int = 20) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(3)
    return [tuple(generator.integers(0, 256, length + index).tolist()) for index in range(count)]


def requests(count: int, *, temperature: float = 1.0, tokens: int = 12, length: int = 20) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt_ids=prompt, seed=1000 + index, temperature=temperature, max_new_tokens=tokens, end_id=END
        )
        for index, prompt in enumerate(prompts(count, length=length))
    ]


def good(found: tuple[GenerateAnswer | Failure, ...]) -> list[GenerateAnswer]:
    assert all(isinstance(answer, GenerateAnswer) for answer in found), found
    return [answer for answer in found if isinstance(answer, GenerateAnswer)]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_scores_equal_hugging_face_whatever_their_shape(
    client: SglangClient, oracle: Oracle, temperature: float
) -> None:
    """All shapes at once: a prompt and a response of one token, no ids, all ids, a response up to the last position."""
    asks = [
        Ask(prompt=p, response=r, k=k, top_k=top, best=top > 0, temperature=temperature, seed=index)
        for index, (p, r, k, top) in enumerate(SHAPES)
    ]
    asked = []
    for one in asks:
        tokens, ids = one.draw(259)
        asked.append(
            ScoreRequest(
                prompt_ids=tuple(tokens[: one.prompt]),
                response_ids=tuple(tokens[one.prompt :]),
                temperature=temperature,
                ids=ids if one.k else None,
                top_k=one.top_k,
                best=one.best,
            )
        )
    for one, request, found in zip(asks, asked, client.score(asked), strict=True):
        assert isinstance(found, ScoreAnswer)
        values, ids = oracle.columns(one)
        np.testing.assert_allclose(found.table, values[:, : one.k], rtol=0, atol=TOLERANCE)
        for column, name in enumerate(("tails", "logps", "entropies"), start=one.k):
            np.testing.assert_allclose(getattr(found, name), values[:, column], rtol=0, atol=TOLERANCE)
        if request.best:
            assert found.best_ids is not None
            assert found.best_table is not None
            assert np.array_equal(found.best_ids, ids[:, -one.top_k :])
            np.testing.assert_allclose(found.best_table, values[:, -one.top_k :], rtol=0, atol=TOLERANCE)


def test_responses_of_one_prompt_are_scored_as_alone(client: SglangClient) -> None:
    """They share what has been run of the prompt, and nothing of the response."""
    prompt, generator = prompts(1, length=90)[0], np.random.default_rng(5)
    asked = [
        ScoreRequest(
            prompt_ids=prompt, response_ids=tuple(generator.integers(0, 259, 1 + 5 * i).tolist()), temperature=0.7
        )
        for i in range(8)
    ]
    together = client.score(asked)
    for request, found in zip(asked, together, strict=True):
        client.flush()
        (alone,) = client.score([request])
        assert isinstance(found, ScoreAnswer)
        assert isinstance(alone, ScoreAnswer)
        np.testing.assert_allclose(found.logps, alone.logps, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_logps_equal_hugging_face_at_the_sampling_temperature(
    client: SglangClient, oracle: Oracle, temperature: float
) -> None:
    asked = requests(16, temperature=temperature, tokens=40)
    for request, found in zip(asked, good(client.generate(asked)), strict=True):
        logits = oracle.logits([*request.prompt_ids, *found.response_ids])[len(request.prompt_ids) - 1 : -1]
        logps = logits / temperature - np.logaddexp.reduce(logits / temperature, axis=1, keepdims=True)
        own = np.take_along_axis(logps, np.array(found.response_ids)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(found.logps, own, rtol=0, atol=TOLERANCE)


def test_samples_of_one_prompt_differ_and_share_its_prefill(client: SglangClient) -> None:
    client.flush()
    prompt = prompts(1, length=90)[0]
    asked = [
        GenerateRequest(prompt_ids=prompt, seed=seed, temperature=1.0, max_new_tokens=8, end_id=END)
        for seed in range(8)
    ]
    found = good(client.generate(asked))
    assert len({answer.response_ids for answer in found}) == 8
    assert {answer.cached_tokens for answer in found} == {len(prompt) - 1}


def test_seeds_decide_what_is_sampled_whatever_the_order(client: SglangClient) -> None:
    asked = requests(24, tokens=30)
    together, turned = good(client.generate(asked)), good(client.generate(asked[::-1]))[::-1]
    client.flush()
    alone = [good(client.generate([request]))[0] for request in asked[:4]]
    assert [a.response_ids for a in together] == [a.response_ids for a in turned]
    assert [a.response_ids for a in together[:4]] == [a.response_ids for a in alone]
    high = [replace(asked[0], seed=2**63 - 1 - index // 2) for index in range(3)]
    first, again, other = (answer.response_ids for answer in good(client.generate(high)))
    assert first == again != other


def test_end_token_ends_a_response_and_the_limit_cuts_it(client: SglangClient) -> None:
    asked = requests(16, tokens=200)
    found = good(client.generate(asked))
    assert {answer.finish for answer in found} == {"stop", "length"}
    for answer in found:
        assert (answer.finish == "stop") == (answer.response_ids[-1] == END) == (END in answer.response_ids)
        assert answer.finish == "stop" or len(answer.response_ids) == 200


def test_stop_text_ends_a_response_and_its_tokens_stay(client: SglangClient, base: Base) -> None:
    (request,) = requests(1, tokens=40)
    (whole,) = good(client.generate([request]))
    place = next(i for i in range(5, 40) if base.text.decode(whole.response_ids[i : i + 1]).isascii())
    text = base.text.decode(whole.response_ids[place : place + 1])
    first = next(i for i in range(40) if base.text.decode(whole.response_ids[i : i + 1]) == text)
    (found,) = good(client.generate([replace(request, stop=(text,))]))
    assert (found.finish, found.matched, found.response_ids) == ("stop", text, whole.response_ids[: first + 1])


@pytest.mark.parametrize(
    ("prompt", "tokens", "reason"),
    [
        ((1, 259), 3, "got ids 1 to 259, expected 0 to 258"),
        ((1,) * 250, 7, "got 7 after 250 tokens, expected 256 at most"),
        ((1,) * 300, 1, "HTTP 400"),
    ],
)
def test_request_that_does_not_fit_is_refused_and_the_server_lives(
    client: SglangClient, prompt: tuple[int, ...], tokens: int, reason: str
) -> None:
    bad = GenerateRequest(prompt_ids=prompt, seed=1, temperature=1.0, max_new_tokens=tokens, end_id=END)
    with pytest.raises(DataError, match=reason):
        client.generate([*requests(8), bad])
    assert client.health() == (True,)
    good(client.generate(requests(2)))


def test_abort_ends_what_is_under_way(client: SglangClient) -> None:
    asked = requests(6, tokens=200, length=5)
    found: list[object] = []
    caller = threading.Thread(target=lambda: found.extend(client.generate(asked * 8)))
    caller.start()
    time.sleep(0.3)
    before = time.monotonic()
    client.abort()
    caller.join(20)
    assert time.monotonic() - before < 20
    assert any(isinstance(one, Failure) and one.reason.startswith("sglang: got an abort (") for one in found)
    assert len(found) == 48
    assert client.health() == (True,)


def test_server_says_what_it_is(client: SglangClient, server_spec: ServerSpec) -> None:
    (info,) = client.info()
    assert (info.version, info.dtype, info.is_deterministic) == ("0.5.23", "float32", True)
    assert (info.model, info.max_tokens) == (str(server_spec.model), 264)


@pytest.fixture
def faults(endpoint: Endpoint) -> Iterator[SglangClient]:
    """Every fifth answer is a 503 and every tenth is cut, at random."""
    generator, through = random.Random(1), ask(endpoint)

    def answer(call: Call) -> Reply:
        draw = generator.random()
        if draw < 0.2:
            return Reply(status=503, body=b"overloaded")
        reply = through(call)
        return Reply(body=reply.body, is_cut=True) if draw < 0.3 else reply

    with Proxy(answer) as proxy:
        limits = Limits(first_wait_seconds=0.02, retry_seconds=20.0, attempts=12)
        yield SglangClient([Endpoint(url=proxy.url, token=endpoint.token)] * 2, limits=limits)


def test_faults_between_change_no_answer(client: SglangClient, faults: SglangClient) -> None:
    asked = requests(40)
    expected, found = good(client.generate(asked)), good(faults.generate(asked))
    assert [a.response_ids for a in found] == [a.response_ids for a in expected]
    rows = [
        ScoreRequest(prompt_ids=request.prompt_ids, response_ids=answer.response_ids, temperature=1.0)
        for request, answer in zip(asked, found, strict=True)
    ]
    for answer, score in zip(found, faults.score(rows), strict=True):
        assert isinstance(score, ScoreAnswer)
        np.testing.assert_allclose(score.logps, answer.logps, rtol=0, atol=TOLERANCE)
