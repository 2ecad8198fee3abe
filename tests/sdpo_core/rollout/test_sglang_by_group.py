"""Weights by a process group to real servers: what these score then, and that a dead or hanging one gets them again."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import CellError, DataError
from sdpo_core.records import Rollout
from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT
from sdpo_core.rollout import sglang_group as module
from sdpo_core.rollout import sglang_weights
from sdpo_core.rollout.base import Sampling
from sdpo_core.rollout.sglang import SglangEngine, load_engine
from sdpo_core.rollout.sglang_weights import FolderPath, GroupPath
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.server import ManagedServer
from sdpo_core.sglang.transport import Limits
from sdpo_core.sglang.wire import ScoreAnswer, ScoreRequest
from sdpo_core.specs import CellSpec, SglangSpec, WeightsBy
from tests.sdpo_core.micro import Base, load_model, make_spec
from tests.sdpo_core.rollout.test_local import requests
from tests.sdpo_core.rollout.test_sglang import endpoint_of, make_policy, servers, train, trained_engine
from tests.sdpo_core.sglang.asking import Ask, Oracle
from tests.sdpo_core.sglang.families import member

pytestmark = pytest.mark.sglang

SAMPLING = Sampling(temperature=1.0, max_response_tokens=12)
LIMITS = Limits(stall_seconds=2.0, health_seconds=3.0, attempts=3, retry_seconds=5.0)
# float32 sums in another order.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def client(shared_server: ManagedServer) -> SglangClient:
    return SglangClient([endpoint_of(shared_server)])


def rows() -> list[tuple[Ask, ScoreRequest]]:
    asks = [Ask(prompt=prompt, response=9, k=0, seed=prompt) for prompt in (1, 20, 100)]
    drawn = [ask.draw(259)[0] for ask in asks]
    return [
        (ask, ScoreRequest(prompt_ids=tuple(t[: ask.prompt]), response_ids=tuple(t[ask.prompt :]), temperature=1.0))
        for ask, t in zip(asks, drawn, strict=True)
    ]


def scores(client: SglangClient, *, server: int = 0) -> list[np.ndarray]:
    """Asked for one at a time, so that no row's rounding depends on another's."""
    found = [client.score([row], server=server)[0] for _, row in rows()]
    assert all(isinstance(answer, ScoreAnswer) for answer in found), found
    return [answer.logps for answer in found if isinstance(answer, ScoreAnswer)]


def moved(base: Base, *, by: float, seed: int) -> dict[str, torch.Tensor]:
    """The base's weights and some noise."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_model(base.folder).weights()
    return {name: value + by * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def send(path: Any, client: SglangClient, weights: Mapping[str, torch.Tensor], *, version: int) -> None:
    path.hold(weights)
    path.send(client, version=version)


def test_scores_are_those_of_each_update_and_nothing_stays_open(
    client: SglangClient, shared_server: ManagedServer, base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five updates, each in seven or more calls: Hugging Face's model of the same weights says the same."""
    monkeypatch.setattr(module, "_BUCKET_BYTES", 16_000)
    path, opened = GroupPath("gloo", dtype="float32"), []
    for version in range(5):
        weights = moved(base, by=0.05, seed=version)
        send(path, client, weights, version=version)
        model = load_model(base.folder)
        model.blend(weights, rate=1.0)
        model.model.save_pretrained(tmp_path / str(version))
        oracle = Oracle(tmp_path / str(version), vocab=259)
        for (ask, _), found in zip(rows(), scores(client), strict=True):
            np.testing.assert_allclose(found, oracle.columns(ask)[0][:, 1], rtol=0, atol=TOLERANCE)
        assert client.info()[0].weights.endswith(f"-{version}")
        opened.append(sum(one.num_fds() for one in (*shared_server.processes(), psutil.Process())))
    assert max(opened[1:]) - opened[1] < 3


def test_folder_and_group_lead_to_the_same_bits(client: SglangClient, base: Base, tmp_path: Path) -> None:
    weights, others = moved(base, by=0.05, seed=8), moved(base, by=0.05, seed=9)
    folder, group = FolderPath(tmp_path / "weights"), GroupPath("gloo", dtype="float32")
    found = []
    for version, path in enumerate((folder, group)):
        send(path, client, others, version=10 + version)
        before = scores(client)
        send(path, client, weights, version=20 + version)
        found.append(scores(client))
        assert not np.array_equal(before, found[-1])
    assert np.array_equal(found[0], found[1])


def spec_by(spec: CellSpec, way: WeightsBy, *, replicas: int = 1) -> CellSpec:
    return make_spec(spec).model_copy(update={"sglang": SglangSpec(weights_by=way, replicas=replicas)})


@pytest.fixture
def over(
    shared_server: ManagedServer, base: Base, cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[WeightsBy, ModelPolicy], SglangEngine]]:
    """Makes an engine over the shared server."""
    made: list[SglangEngine] = []
    monkeypatch.setenv("SDPO_SGLANG_URL", shared_server.url)
    monkeypatch.setenv("SDPO_SGLANG_TOKEN", shared_server.token)

    def make(way: WeightsBy, policy: ModelPolicy) -> SglangEngine:
        made.append(load_engine(spec_by(cell_spec, way), policy=policy, folder=base.folder, device="cpu"))
        return made[-1]

    yield make
    for engine in made:
        servers(engine).close()


def test_rollouts_are_the_same_by_folder_and_by_group(
    over: Callable[[WeightsBy, ModelPolicy], SglangEngine], base: Base
) -> None:
    """Over three versions of the weights."""
    found: list[list[Rollout]] = []
    ways: tuple[WeightsBy, ...] = ("folder", "gloo")
    for way in ways:
        policy = make_policy(base)
        engine = over(way, policy)
        found.append([])
        for _ in range(3):
            found[-1] += engine.generate(requests(), sampling=SAMPLING)
            train(policy)
    for one, other in zip(*found, strict=True):
        assert (one.response_ids, one.weights_version) == (other.response_ids, other.weights_version)
        np.testing.assert_allclose(one.sampling_logps, other.sampling_logps, rtol=0, atol=TOLERANCE)
    assert {rollout.weights_version for rollout in found[1]} == {0, 1, 2}
    assert len({rollout.response_ids for rollout in found[1]}) > len(requests())


def damaged(damage: str, weights: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> Any:
    if damage == "stale":
        return old
    if damage == "uniform":
        return {name: torch.full_like(value, 0.01) for name, value in weights.items()}
    return {name: value for name, value in weights.items() if "layers.1.mlp.down" not in name}


@pytest.mark.parametrize("damage", ["stale", "uniform", "missing tensor"])
def test_canary_catches_weights_that_did_not_arrive(
    over: Callable[[WeightsBy, ModelPolicy], SglangEngine], base: Base, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    policy = make_policy(base)
    engine = over("gloo", policy)
    engine.generate(requests(), sampling=SAMPLING)
    old, real = policy.weights(), module.send_weights
    train(policy)

    def broken(transport: Any, weights: Mapping[str, torch.Tensor], **named: Any) -> None:
        real(transport, damaged(damage, weights, old), **named)

    monkeypatch.setattr(sglang_weights, "send_weights", broken)
    with pytest.raises(CellError, match="server 0: got log-probabilities that differ from the trainer's by"):
        engine.generate(requests(), sampling=SAMPLING)


def test_refused_weights_say_why_and_the_next_ones_are_taken(client: SglangClient, base: Base) -> None:
    """A tensor of another shape; SGLang holds a part of the rest then."""
    path, weights = GroupPath("gloo", dtype="float32"), moved(base, by=0.05, seed=1)
    bad = {**weights, "model.layers.1.mlp.down_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(CellError, match=r"/update_weights_from_distributed: got HTTP 400"):
        send(path, client, bad, version=30)
    send(path, client, weights, version=31)
    assert client.info()[0].weights.endswith("-31")


def test_update_by_somebody_else_is_noticed(client: SglangClient, shared_server: ManagedServer, base: Base) -> None:
    """Also with the very same weights, under the very same number."""
    weights = load_model(base.folder).weights()
    send(GroupPath("gloo", dtype="float32"), client, weights, version=40)
    scores(client)
    send(GroupPath("gloo", dtype="float32"), SglangClient([endpoint_of(shared_server)]), weights, version=40)
    with pytest.raises(DataError, match=r"got one of weights '\w+-40', expected '\w+-40', the last ones published"):
        scores(client)


@pytest.fixture(scope="module")
def policy(base: Base) -> ModelPolicy:
    return make_policy(base)


@pytest.fixture(scope="module")
def pair(base: Base, policy: ModelPolicy, cell_spec: CellSpec) -> Iterator[SglangEngine]:
    """An engine with two servers of its own, which have its weights by a group."""
    spec = spec_by(cell_spec, "gloo", replicas=2)
    with trained_engine(spec, policy=policy, base=base, limits=LIMITS) as engine:
        yield engine


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_server_that_dies_or_hangs_in_an_update_starts_again_and_gets_it(
    pair: SglangEngine, policy: ModelPolicy, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """After the fifth tensor, the second of two servers; the first one goes on."""
    pair.generate(requests(), sampling=SAMPLING)
    train(policy)
    urls = [one.url for one in servers(pair).managed]
    real, lock, sent = module._broadcast, threading.Lock(), [0]

    def strike(group: Any, tensor: torch.Tensor) -> None:
        with lock:
            sent[0] += 1
            if sent[0] == 5:
                member(servers(pair).managed[1].processes(), "scheduler").send_signal(number)
        real(group, tensor)

    monkeypatch.setattr(module, "_broadcast", strike)
    monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=3))
    before = time.monotonic()
    found = pair.generate(requests(), sampling=SAMPLING)
    assert time.monotonic() - before < 120
    assert [one.url != url for one, url in zip(servers(pair).managed, urls, strict=True)] == [False, True]
    assert {rollout.weights_version for rollout in found} == {policy.weights_version()}
    answered = [TokenRow(prompt_ids=one.prompt_ids, response_ids=one.response_ids) for one in found]
    for one, score in zip(found, policy.score(answered, top_k=0), strict=True):
        np.testing.assert_allclose(one.sampling_logps, score.logps, rtol=0, atol=TOLERANCE)
    for first, second in zip(*(scores(servers(pair).client, server=index) for index in (0, 1)), strict=True):
        assert np.array_equal(first, second)
