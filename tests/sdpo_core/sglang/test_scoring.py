"""A real server's scores at given ids against Hugging Face and float64, and what it does with wrong questions.

Tolerance: both run the model in float32, with sums in another order; 4.1e-6 is the most that was measured here.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sdpo_core.sglang.server import ManagedServer
from tests.sdpo_core.micro import Base
from tests.sdpo_core.sglang.asking import Ask, Oracle, answer, body_of, post

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
VOCAB = 259

CASES = {
    "shortest": Ask(prompt=2, response=1, k=1),
    "shortest prompt of one token": Ask(prompt=1, response=1, k=20),
    "no ids": Ask(prompt=7, response=9, k=0, temperature=0.5),
    "one id": Ask(prompt=30, response=11, k=1, temperature=2.0),
    "twenty ids": Ask(prompt=13, response=40, k=20, temperature=0.5, seed=1),
    "all ids": Ask(prompt=5, response=6, k=VOCAB, temperature=2.0),
    "prefilled in parts": Ask(prompt=100, response=156, k=20, temperature=0.5, seed=2),
    "as long as the model reads": Ask(prompt=255, response=1, k=20, top_k=20, seed=10),
    "parts end within the prompt": Ask(prompt=200, response=3, k=20, seed=3),
    "overlap": Ask(prompt=9, response=50, k=20, top_k=20, seed=4),
    "overlap of fewer": Ask(prompt=9, response=50, k=30, top_k=8, temperature=2.0, seed=5),
    "overlap of more": Ask(prompt=9, response=20, k=3, top_k=100, seed=6),
    "own best ids": Ask(prompt=20, response=100, k=0, top_k=20, best=True, temperature=0.5, seed=7),
    "both sides' ids": Ask(prompt=20, response=30, k=20, top_k=20, best=True, temperature=2.0, seed=8),
    "all of its ids": Ask(prompt=20, response=3, k=2, top_k=VOCAB, best=True, seed=9),
}


@pytest.fixture(scope="module")
def oracle(base: Base) -> Oracle:
    return Oracle(base.folder, vocab=base.text.vocab_size)


def largest_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Equal infinities differ by 0; an infinity and a number by infinity."""
    assert found.shape == wanted.shape
    with np.errstate(invalid="ignore"):
        return float(np.where(found == wanted, 0.0, np.abs(found - wanted)).max())


@pytest.mark.parametrize("name", CASES)
def test_scores_equal_hugging_face(server: ManagedServer, oracle: Oracle, name: str) -> None:
    values, ids = answer(server, CASES[name], vocab=VOCAB)
    wanted, wanted_ids = oracle.columns(CASES[name])
    np.testing.assert_array_equal(ids, wanted_ids)
    assert largest_difference(values, wanted) <= TOLERANCE


def test_scores_do_not_depend_on_what_runs_beside(server: ManagedServer, oracle: Oracle) -> None:
    """Of all lengths, widths and temperatures at once, beside requests that sample and that want stock top ids."""
    asks = [
        Ask(
            prompt=2 + 9 * i, response=1 + 13 * (9 - i), k=(0, 1, 20)[i % 3], temperature=(0.5, 1.0, 2.0)[i % 3], seed=i
        )
        for i in range(10)
    ]
    tokens = asks[5].draw(VOCAB)[0]
    sampled = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 30, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 3,
        "top_logprobs_num": 4,
    }
    with ThreadPoolExecutor(12) as pool:
        others = [pool.submit(post, server, sampled) for _ in range(2)]
        found = list(pool.map(lambda ask: answer(server, ask, vocab=VOCAB), asks))
    for ask, (values, ids) in zip(asks, found, strict=True):
        wanted, wanted_ids = oracle.columns(ask)
        np.testing.assert_array_equal(ids, wanted_ids)
        assert largest_difference(values, wanted) <= TOLERANCE
    best = np.argsort(-oracle.logits(tokens)[4])[:4].tolist()
    for other in others:
        status, reply = other.result()
        assert status == 200
        assert [entry[1] for entry in reply["meta_info"]["input_top_logprobs"][2]] == best


def test_padding_of_the_vocabulary_has_no_probability(server: ManagedServer, oracle: Oracle) -> None:
    """Log-probabilities of sampled tokens are over the ids of the tokenizer, at the temperature."""
    tokens = Ask(prompt=10, response=1, k=0).draw(VOCAB)[0]
    parameters = {"max_new_tokens": 20, "temperature": 2.0, "ignore_eos": True, "sampling_seed": 5}
    status, reply = post(server, {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True})
    assert status == 200
    logps, sampled = zip(*[entry[:2] for entry in reply["meta_info"]["output_token_logprobs"]], strict=True)
    logits = oracle.logits([*tokens, *sampled])[len(tokens) - 1 : -1] / 2.0
    wanted = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert largest_difference(np.array(logps), wanted[np.arange(len(sampled)), list(sampled)]) <= TOLERANCE
    assert max(sampled) < VOCAB


def test_seed_decides_whatever_runs_beside(server: ManagedServer) -> None:
    def sample(seed: int) -> list[int]:
        parameters = {"max_new_tokens": 25, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
        status, reply = post(server, {"input_ids": [5, 6, 7], "sampling_params": parameters})
        assert status == 200
        ids: list[int] = reply["output_ids"]
        return ids

    alone = [sample(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(sample, range(6))) == alone
    assert len({tuple(ids) for ids in alone}) == 6


def _changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(fields)


def _score(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["sampling_params"]["custom_params"]["score"].update(fields)


def _without_best(body: dict[str, Any]) -> None:
    del body["sampling_params"]["custom_params"]["score"]["best"]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "id beyond the tokenizer": (_score(ids="AwEAAAAAAAA="), "got id 259, expected 0 to 258"),
    "negative id": (_score(ids="//////////8="), "got id -1"),
    "no base64": (_score(ids="a"), "no base64"),
    "ids as a list": (_score(ids=[1, 2]), "type list"),
    "fewer rows": (_score(ids="AAAAAA=="), "got 4 bytes of ids, expected 8"),
    "other width": (_score(k=2), "got 8 bytes of ids, expected 16"),
    "negative width": (_score(k=-1), "got k -1"),
    "temperature 0": (_score(temperature=0), "got temperature 0"),
    "temperature as text": (_score(temperature="1"), "got temperature '1'"),
    "best of none": (_score(best=True), "got top_k 0 with best True"),
    "more best ids than there are": (_score(top_k=260), "got top_k 260"),
    "other start": (_score(start=0), "got 8 bytes of ids, expected 12"),
    "start behind the end": (_score(start=9), "got start 9 for 4 tokens"),
    "unknown field": (_score(alpha=1), "'alpha'"),
    "missing field": (_without_best, "got fields"),
    "other number of columns": (_changed(top_logprobs_num=5), "'top_logprobs_num': 5"),
    "other first row": (_changed(logprob_start_len=0), "'logprob_start_len': 0"),
    "no log-probabilities": (_changed(return_logprob=False), "'return_logprob': False"),
    "token beyond the tokenizer": (_changed(input_ids=[1, 2, 3, 259]), "got ids 1 to 259, expected 0 to 258"),
    "text of another length": (_changed(input_ids=None, text="abcdefghi"), "got 8 bytes of ids, expected 28"),
    "score is no object": (lambda body: body["sampling_params"]["custom_params"].update(score=3), "got int"),
    "also samples": (lambda body: body["sampling_params"].update(max_new_tokens=2), "max_new_tokens 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_questions_are_refused_and_the_server_lives(server: ManagedServer, name: str) -> None:
    change, reason = WRONG[name]
    ask = Ask(prompt=2, response=2, k=1)
    body = body_of(ask, *ask.draw(VOCAB))
    assert post(server, body)[0] == 200
    change(body)
    status, text = post(server, body)
    assert status == 400, text
    assert reason in text
    assert server.is_alive()


@pytest.mark.parametrize(
    ("tokens", "new", "reason"),
    [
        ([1, 261], 1, "got ids 1 to 261, expected 0 to 258"),
        ([1] * 200, 57, "got 57 after 200 tokens, expected 256"),
        ([1] * 257, 0, "got 0 after 257 tokens, expected 256"),
        ([1], None, "got None after 1 tokens, expected 256"),
    ],
)
def test_ordinary_requests_are_checked_too(
    server: ManagedServer, tokens: list[int], new: int | None, reason: str
) -> None:
    status, text = post(server, {"input_ids": tokens, "sampling_params": {"max_new_tokens": new}})
    assert status == 400
    assert reason in text


def test_a_response_may_fill_the_positions(server: ManagedServer) -> None:
    parameters = {"max_new_tokens": 56, "ignore_eos": True}
    status, reply = post(server, {"input_ids": [1] * 200, "sampling_params": parameters})
    assert status == 200
    assert len(reply["output_ids"]) == 56


def test_only_the_token_opens_it_and_nothing_shows_it(server: ManagedServer) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
    assert post(server, body, token="other")[0] == 401
    assert post(server, body)[0] == 200
    shown = [" ".join(process.cmdline()) for process in server.processes()]
    assert len(shown) >= 4
    assert not [text for text in [*shown, server.log_path.read_text(encoding="utf-8")] if server.token in text]
