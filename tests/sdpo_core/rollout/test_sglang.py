"""The SGLang engine over a real server: what it samples, with whose weights, and that nothing goes on with others."""

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from sdpo_core import random_streams
from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.rollout import sglang_weights as module
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.sglang import SglangEngine, load_engine
from sdpo_core.rollout.sglang_servers import Servers, _served_folder
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.server import ManagedServer
from sdpo_core.sglang.transport import Endpoint, Limits
from sdpo_core.specs import CellSpec, OptimizerSpec
from tests.sdpo_core.backends.test_hf import WeighedSurprise, train_rows
from tests.sdpo_core.micro import Base, load_model, make_spec
from tests.sdpo_core.rollout.test_local import END, requests
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, ask

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(temperature=1.0, max_response_tokens=12)


def make_policy(base: Base) -> ModelPolicy:
    return hf_policy(load_model(base.folder), OptimizerSpec(learning_rate=1e-2), temperature=1.0, max_tokens=10_000)


def endpoint_of(server: ManagedServer) -> Endpoint:
    return Endpoint(url=server.url, token=server.token)


def train(policy: ModelPolicy) -> None:
    policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)


@pytest.fixture
def policy(base: Base) -> ModelPolicy:
    return make_policy(base)


def servers(engine: SglangEngine) -> Servers:
    """Those of an engine that is alone, or process 0 of several."""
    assert engine.servers is not None
    return engine.servers


@contextmanager
def trained_engine(spec: CellSpec, *, policy: ModelPolicy, base: Base, limits: Limits) -> Iterator[SglangEngine]:
    """An engine over servers of its own, which start with other weights than the policy has by then."""
    engine = load_engine(spec, policy=policy, folder=base.folder, device="cpu", limits=limits)
    train(policy)
    yield engine
    servers(engine).close()


@pytest.fixture
def over(
    shared_server: ManagedServer,
    policy: ModelPolicy,
    base: Base,
    cell_spec: CellSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., SglangEngine]]:
    """Makes an engine of `policy` over servers that somebody else has started, by their addresses."""
    made: list[SglangEngine] = []

    def make(*urls: str) -> SglangEngine:
        monkeypatch.setenv("SDPO_SGLANG_URL", ",".join(urls or (shared_server.url,)))
        monkeypatch.setenv("SDPO_SGLANG_TOKEN", shared_server.token)
        made.append(load_engine(make_spec(cell_spec), policy=policy, folder=base.folder, device="cpu"))
        assert servers(made[-1]).managed == ()
        return made[-1]

    yield make
    for engine in made:
        servers(engine).close()


@pytest.fixture
def engine(over: Callable[..., SglangEngine]) -> SglangEngine:
    return over()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampling_logps_are_the_policys(engine: SglangEngine, base: Base, temperature: float) -> None:
    """Engine and trainer see one distribution, at the sampling temperature: they agree to float32 rounding."""
    found = engine.generate(requests(24), sampling=replace(SAMPLING, temperature=temperature))
    trainer = hf_policy(
        load_model(base.folder), OptimizerSpec(learning_rate=1.0), temperature=temperature, max_tokens=10_000
    )
    rows = [TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids) for rollout in found]
    for rollout, score in zip(found, trainer.score(rows, top_k=0), strict=True):
        np.testing.assert_allclose(rollout.sampling_logps, score.logps, rtol=0, atol=1e-5)
    assert [rollout.prompt_ids for rollout in found] == [request.prompt_ids for request in requests(24)]


def test_rollouts_do_not_depend_on_their_neighbours(engine: SglangEngine) -> None:
    """Alone or in another order: the same ids; log-probabilities to rounding."""
    asked = requests()
    alone = [engine.generate([one], sampling=SAMPLING)[0] for one in asked[:4]]
    turned = engine.generate(asked[::-1], sampling=SAMPLING)[::-1]
    for one, other in zip(alone, turned[:4], strict=True):
        assert one.response_ids == other.response_ids
        np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, rtol=0, atol=1e-5)


def test_another_stream_key_gives_another_rollout(engine: SglangEngine) -> None:
    asked = [RolloutRequest(prompt_ids=(5, 6, 7), stream_key=key) for key in (0, 1, 2**62, 2**128 - 1)]
    found = engine.generate(asked, sampling=SAMPLING)
    assert len({rollout.response_ids for rollout in found}) == 4


def test_first_tokens_follow_the_softmax(engine: SglangEngine, base: Base) -> None:
    """2,000 draws of one token: chi-square over the cells with an expectation above 5, at 5 standard deviations."""
    prompt, count = (20, 30, 40), 2_000
    asked = [RolloutRequest(prompt_ids=prompt, stream_key=random_streams.stream_key(1, "y", i)) for i in range(count)]
    found = engine.generate(asked, sampling=Sampling(temperature=0.8, max_response_tokens=1))
    with torch.no_grad():
        logits = load_model(base.folder).model(input_ids=torch.tensor([prompt])).logits[0, -1, :259]
    expected = (logits / 0.8).softmax(dim=0).numpy().astype(np.float64) * count
    counts = np.bincount([rollout.response_ids[0] for rollout in found], minlength=259)
    large = expected > 5
    assert large.sum() > 20
    cells = np.append(expected[large], expected[~large].sum())
    observed = np.append(counts[large], counts[~large].sum())
    statistic = float(((observed - cells) ** 2 / cells).sum())
    degrees = len(cells) - 1
    assert abs(statistic - degrees) < 5 * np.sqrt(2 * degrees)


def test_padded_vocabulary_is_never_sampled(engine: SglangEngine) -> None:
    asked = [RolloutRequest(prompt_ids=(1, 2), stream_key=i) for i in range(400)]
    found = engine.generate(asked, sampling=Sampling(temperature=50.0, max_response_tokens=4))
    tokens = {token for rollout in found for token in rollout.response_ids}
    assert max(tokens) == END
    assert len(tokens) > 250


def test_end_token_closes_a_rollout_and_is_part_of_it(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the local engine: the id that stands third in one rollout, were it the end token, would end it there."""
    asked = requests(8)
    whole = engine.generate(asked, sampling=SAMPLING)
    asked = [request for request, rollout in zip(asked, whole, strict=True) if rollout.finish == "length"]
    whole = tuple(rollout for rollout in whole if rollout.finish == "length")
    assert {len(rollout.response_ids) for rollout in whole} == {12}
    end = whole[0].response_ids[2]
    monkeypatch.setattr(engine, "_text", SimpleNamespace(end_id=end, vocab_size=259))
    for before, cut in zip(whole, engine.generate(asked, sampling=SAMPLING), strict=True):
        length = before.response_ids.index(end) + 1 if end in before.response_ids else 12
        assert cut.response_ids == before.response_ids[:length]
        assert cut.finish == ("stop" if end in before.response_ids else "length")
        np.testing.assert_allclose(cut.sampling_logps, before.sampling_logps[:length], rtol=0, atol=1e-5)


def test_stop_at_the_last_possible_token_is_a_stop(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(1)
    (whole,) = engine.generate(asked, sampling=SAMPLING)
    monkeypatch.setattr(engine, "_text", SimpleNamespace(end_id=whole.response_ids[2], vocab_size=259))
    for limit in (3, 40):
        (found,) = engine.generate(asked, sampling=replace(SAMPLING, max_response_tokens=limit))
        assert (found.response_ids, found.finish) == (whole.response_ids[:3], "stop")


def test_model_with_more_end_tokens_stops_at_the_tokenizers_alone(base: Base, tmp_path: Path) -> None:
    """Published models name further ids in their generation settings, which the local engine goes on after."""
    folder = tmp_path / "published"
    folder.mkdir()
    for file in base.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("config.json", "generation_config.json"):
        text = (folder / name).read_text()
        assert f'"eos_token_id": {END}' in text
        (folder / name).write_text(text.replace(f'"eos_token_id": {END}', f'"eos_token_id": [{END}, 7]'))
    served = _served_folder(folder, tmp_path / "served", end_id=END)
    assert f'"eos_token_id": {END}' in (served / "config.json").read_text()
    assert not (served / "generation_config.json").exists()
    assert (served / "model.safetensors").read_bytes() == (base.folder / "model.safetensors").read_bytes()


def test_request_that_cannot_fit_is_refused(engine: SglangEngine) -> None:
    request = RolloutRequest(prompt_ids=(1,) * 250, stream_key=1)
    engine.generate([request], sampling=Sampling(temperature=1.0, max_response_tokens=6))
    with pytest.raises(DataError, match="a sequence of 257 tokens, expected at most 256"):
        engine.generate([request], sampling=Sampling(temperature=1.0, max_response_tokens=7))


def test_no_requests_are_answered_by_no_rollouts(engine: SglangEngine) -> None:
    assert engine.generate([], sampling=SAMPLING) == ()


def test_engine_follows_every_update(engine: SglangEngine, policy: ModelPolicy) -> None:
    """After each update rollouts name the version, and have its log-probabilities, which the one before has not."""
    for version in range(3):
        before = list(map(_row, engine.generate(requests(), sampling=SAMPLING)))
        found = engine.generate(requests(), sampling=SAMPLING)
        assert {rollout.weights_version for rollout in found} == {version}
        scores = policy.score(before, top_k=0)
        gap = max(np.abs(np.array(r.sampling_logps) - s.logps).max() for r, s in zip(found, scores, strict=True))
        assert gap < 1e-5
        train(policy)
        moved = policy.score(before, top_k=0)
        assert max(np.abs(s.logps - m.logps).max() for s, m in zip(scores, moved, strict=True)) > 1e-2


def _row(rollout: Any) -> TokenRow:
    return TokenRow(prompt_ids=rollout.prompt_ids, response_ids=rollout.response_ids)


def test_weights_stay_where_they_are_between_updates(engine: SglangEngine, policy: ModelPolicy) -> None:
    engine.generate(requests(), sampling=SAMPLING)
    policy.model.weights = None  # type: ignore[assignment, method-assign]
    engine.generate(requests(), sampling=SAMPLING)


def test_published_weights_have_no_name_on_the_disk(engine: SglangEngine, policy: ModelPolicy) -> None:
    """A link to what this process holds open is all there is."""
    for _ in range(2):
        engine.generate(requests(2), sampling=SAMPLING)
        train(policy)
    (link,) = (servers(engine).scratch / "weights").iterdir()
    assert str(link.readlink()).startswith("/proc/")
    held = [file for file in psutil.Process().open_files() if str(servers(engine).scratch) in file.path]
    assert len(held) <= 1
    servers(engine).close()
    assert not servers(engine).scratch.exists()


@pytest.mark.parametrize("damage", ["stale", "uniform", "other layer", "nan"])
def test_canary_catches_weights_that_did_not_arrive(
    engine: SglangEngine, policy: ModelPolicy, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """One update's weights left out, every weight equal, two layers exchanged, no number: the cell stops."""
    engine.generate(requests(), sampling=SAMPLING)
    old = policy.weights()
    train(policy)
    save = save_file

    def broken(weights: dict[str, torch.Tensor], path: Path, **named: Any) -> None:
        if damage == "stale":
            weights = old
        if damage == "uniform":
            weights = {name: torch.full_like(value, 0.01) for name, value in weights.items()}
        if damage == "other layer":
            weights = {re.sub(r"layers\.([01])", lambda m: f"layers.{1 - int(m[1])}", n): v for n, v in weights.items()}
        if damage == "nan":
            weights = {name: value * float("nan") for name, value in weights.items()}
        save(weights, path, **named)

    monkeypatch.setattr(module, "save_file", broken)
    reason = "no numbers" if damage == "nan" else "server 0: got log-probabilities that differ from the trainer's by"
    with pytest.raises(DataError if damage == "nan" else CellError, match=reason):
        engine.generate(requests(), sampling=SAMPLING)


def test_half_an_update_does_not_go_unnoticed(
    engine: SglangEngine, policy: ModelPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes a file that lacks tensors and reports success."""
    engine.generate(requests(), sampling=SAMPLING)
    train(policy)
    save = save_file
    monkeypatch.setattr(
        module,
        "save_file",
        lambda weights, path, **named: save({n: v for n, v in weights.items() if "layers.1" not in n}, path, **named),
    )
    with pytest.raises(CellError, match="differ from the trainer's by"):
        engine.generate(requests(), sampling=SAMPLING)


def test_update_by_somebody_else_is_noticed(engine: SglangEngine, shared_server: ManagedServer, base: Base) -> None:
    """Also with the very same weights, under the very same number."""
    engine.generate(requests(), sampling=SAMPLING)
    other = SglangClient([endpoint_of(shared_server)])
    other.update_from_folder(base.folder, version=0)
    with pytest.raises(DataError, match=r"got one of weights '\w+-0', expected '\w+-0', the last ones published"):
        engine.generate(requests(), sampling=SAMPLING)


def test_each_server_must_hold_the_weights(over: Callable[..., SglangEngine], shared_server: ManagedServer) -> None:
    """The second of two leaves out updates, and says that it has taken them."""
    through = ask(endpoint_of(shared_server))
    tags: list[str] = []

    def answer(call: Call) -> Reply:
        if call.path == "/update_weights_from_disk":
            tags.append(call.body["weight_version"])
            return Reply(body=b'{"success": true}')
        reply = through(call)
        if call.path == "/generate" and "score" in str(call.body) and tags:
            text = re.sub(rb'"input_top_logprobs_val_flat_b64": ?"[^"]{8}', _zeros, reply.body)
            return replace(reply, body=text)
        return reply

    with Proxy(answer) as proxy:
        engine = over(shared_server.url, proxy.url)
        with pytest.raises(CellError, match="sglang engine, server 1: got log-probabilities that differ"):
            engine.generate(requests(), sampling=SAMPLING)


def _zeros(found: "re.Match[bytes]") -> bytes:
    """The first float of a table, and half of the next, as 0."""
    return found.group()[:-8] + b"AAAAAAAA"


def test_two_servers_sample_what_one_does(over: Callable[..., SglangEngine], shared_server: ManagedServer) -> None:
    one = over().generate(requests(24), sampling=SAMPLING)
    through = ask(endpoint_of(shared_server))
    with Proxy(through) as proxy:
        two = over(shared_server.url, proxy.url).generate(requests(24), sampling=SAMPLING)
        assert 0 < len([body for body in proxy.bodies() if "sampling_seed" in body["sampling_params"]]) < 24
    assert [rollout.response_ids for rollout in two] == [rollout.response_ids for rollout in one]


@pytest.mark.parametrize(("name", "value"), [("enable_deterministic_inference", "false"), ("context_length", "40")])
def test_server_that_is_not_what_the_cell_asks_for_is_refused(
    over: Callable[..., SglangEngine], shared_server: ManagedServer, name: str, value: str
) -> None:
    through = ask(endpoint_of(shared_server))

    def answer(call: Call) -> Reply:
        reply = through(call)
        return replace(reply, body=re.sub(rf'"{name}": ?\w+'.encode(), f'"{name}":{value}'.encode(), reply.body))

    with Proxy(answer) as proxy, pytest.raises(SpecError, match=r"got a server of .* with deterministic"):
        over(proxy.url)


def test_server_that_samples_at_another_temperature_than_it_says_is_refused(
    over: Callable[..., SglangEngine], shared_server: ManagedServer
) -> None:
    """As SGLang does with SGLANG_RETURN_ORIGINAL_LOGPROB: its log-probabilities are those at 1."""
    through = ask(endpoint_of(shared_server))

    def answer(call: Call) -> Reply:
        reply = through(call)
        if call.path != "/generate" or "sampling_seed" not in call.body["sampling_params"]:
            return reply
        return replace(reply, body=re.sub(rb'"output_token_logprobs": ?\[\[-', _tenfold, reply.body))

    with (
        Proxy(answer) as proxy,
        pytest.raises(SpecError, match=r"server 0: got a response whose log-probabilities are"),
    ):
        over(proxy.url).generate(requests(2), sampling=SAMPLING)


def _tenfold(found: "re.Match[bytes]") -> bytes:
    """The first log-probability one digit longer."""
    return found.group() + b"1"


def test_server_that_does_not_start_leaves_nothing(
    policy: ModelPolicy, base: Base, cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", sys.executable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CellError, match="ManagedServer: got an end before it was ready"):
        load_engine(make_spec(cell_spec), policy=policy, folder=base.folder, device="cpu")
    assert list(tmp_path.glob("sdpo-sglang-*")) == []
