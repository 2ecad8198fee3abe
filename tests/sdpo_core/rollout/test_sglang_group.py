"""A process group with a peer that behaves as SGLang does, or does not: what arrives, and how an update fails."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from sdpo_core.errors import CellError, SpecError
from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT
from sdpo_core.rollout import sglang_group as module
from sdpo_core.rollout.sglang_group import send_weights
from sdpo_core.rollout.sglang_weights import GroupPath, make_weight_path
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Endpoint, Limits, Transport
from sdpo_core.specs import CellSpec, SglangSpec
from tests.sdpo_core.sglang.proxy import Call, Proxy, Reply, as_json

GENERATOR = torch.Generator().manual_seed(3)
# Out of order, one of them a view of every second column.
WEIGHTS: Mapping[str, torch.Tensor] = {
    "b.weight": torch.randn(5, 3, generator=GENERATOR),
    "a.weight": torch.randn(4, 6, generator=GENERATOR)[:, ::2],
    "c": torch.randn(1, generator=GENERATOR).to(torch.bfloat16),
    "a.bias": torch.randn(7, generator=GENERATOR),
}
PATHS = ["begin_weight_update", "init_weights_update_group", "update_weights_from_distributed"]
PATHS += ["destroy_weights_update_group", "end_weight_update"]


class Peer:
    """Rank 1. `faults`: what to do in the place of a call's work, by its path's last part."""

    def __init__(self, faults: Mapping[str, Callable[[], Reply]] | None = None) -> None:
        self.received: list[tuple[str, torch.Tensor]] = []
        self.groups: dict[str, Any] = {}
        self.faults = faults or {}

    def __call__(self, call: Call) -> Reply:
        name = call.path.removeprefix("/")
        if name in self.faults:
            return self.faults[name]()
        if name == "init_weights_update_group":
            self._join(call.body)
        if name == "update_weights_from_distributed":
            self._receive(call.body)
        if name == "destroy_weights_update_group":
            del self.groups[call.body["group_name"]]
        return as_json({"success": True, "message": ""})

    def _join(self, body: Any) -> None:
        name = body["group_name"]
        store = TCPStore(body["master_address"], body["master_port"], is_master=False)
        inner = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self.groups[name] = ProcessGroupGloo(inner, body["rank_offset"], body["world_size"], timedelta(seconds=20))

    def _receive(self, body: Any) -> None:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.groups[body["group_name"]].broadcast(tensor, 0).wait()
            self.received.append((name, tensor))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOOPBACK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=1))


def send(proxy: Proxy, weights: Mapping[str, torch.Tensor] = WEIGHTS) -> None:
    transport = Transport(Endpoint(url=proxy.url), limits=Limits(attempts=1), seed=0)
    send_weights(transport, weights, tag="run-3", backend="gloo")


def called(proxy: Proxy) -> list[str]:
    return [call.path.removeprefix("/") for call in proxy.calls]


@pytest.fixture(params=[False, True], ids=["alone", "beside a default group"])
def _default_group(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_default_group")
def test_weights_arrive_by_name_bit_by_bit() -> None:
    peer = Peer()
    with Proxy(peer) as proxy:
        send(proxy)
        (body,) = proxy.bodies("/update_weights_from_distributed")
        assert called(proxy) == PATHS
    assert [name for name, _ in peer.received] == ["a.bias", "a.weight", "b.weight", "c"]
    for name, tensor in peer.received:
        assert tensor.dtype == WEIGHTS[name].dtype
        assert torch.equal(tensor, WEIGHTS[name])
    assert (body["weight_version"], body["flush_cache"]) == ("run-3", True)
    assert peer.groups == {}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (27, [["a.bias"], ["a.weight"], ["b.weight"], ["c"]]),
        (76, [["a.bias", "a.weight"], ["b.weight", "c"]]),
        (138, [["a.bias", "a.weight", "b.weight", "c"]]),
    ],
)
def test_calls_bring_no_more_than_a_bucket(
    monkeypatch: pytest.MonkeyPatch, limit: int, expected: list[list[str]]
) -> None:
    """28, 48, 60 and 2 bytes: one larger than a bucket has a call to itself, and every call names the new tag."""
    monkeypatch.setattr(module, "_BUCKET_BYTES", limit)
    peer = Peer()
    with Proxy(peer) as proxy:
        send(proxy)
        bodies = proxy.bodies("/update_weights_from_distributed")
    assert [body["names"] for body in bodies] == expected
    assert {body["weight_version"] for body in bodies} == {"run-3"}
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in peer.received)


def test_every_server_gets_the_weights_and_the_tag() -> None:
    peers = [Peer(), Peer()]
    with Proxy(peers[0]) as one, Proxy(peers[1]) as two:
        client = SglangClient([Endpoint(url=one.url), Endpoint(url=two.url)])
        path = GroupPath("gloo", dtype="bfloat16")
        path.hold(WEIGHTS)
        path.send(client, version=5)
        tags = [proxy.bodies("/update_weights_from_distributed")[0]["weight_version"] for proxy in (one, two)]
    assert tags[0] == tags[1]
    assert tags[0].endswith("-5")
    for peer in peers:
        assert [name for name, _ in peer.received] == sorted(WEIGHTS)
        assert all(torch.equal(tensor, WEIGHTS[name].bfloat16()) for name, tensor in peer.received)


@pytest.mark.parametrize("path", PATHS)
def test_no_part_of_an_update_is_asked_for_twice(path: str) -> None:
    """Unlike other calls, which a busy server gets again."""
    with Proxy(Peer({path: lambda: Reply(status=503)})) as proxy:
        group = GroupPath("gloo", dtype="float32")
        group.hold(WEIGHTS)
        with pytest.raises(CellError, match="HTTP 503"):
            group.send(SglangClient([Endpoint(url=proxy.url)]), version=1)
        assert called(proxy).count(path) == 1


def refuse() -> Reply:
    return Reply(status=400, body=b'{"success": false, "message": "no room"}')


@pytest.mark.parametrize("path", PATHS)
def test_refusal_names_the_server_and_its_reason(path: str) -> None:
    """Whatever has begun by then is ended."""
    with Proxy(Peer({path: refuse})) as proxy:
        with pytest.raises(CellError, match=rf"of weights: sglang server {proxy.url}/{path}: got HTTP 400 .*no room"):
            send(proxy)
        begun = called(proxy)
    assert begun[-1] == ("begin_weight_update" if path == PATHS[0] else "end_weight_update")
    assert ("destroy_weights_update_group" in begun) == (path not in PATHS[:2])


@pytest.mark.parametrize("path", PATHS)
def test_hanging_server_costs_a_bounded_time(path: str) -> None:
    """Its calls are given up, and no thread goes on waiting for it."""
    freed = threading.Event()

    def hang() -> Reply:
        freed.wait(30)
        return Reply()

    with Proxy(Peer({path: hang})) as proxy:
        threads, before = threading.enumerate(), time.monotonic()
        with pytest.raises(
            CellError, match=rf"of weights: sglang server {proxy.url}/{path}: got .* expected it to take"
        ):
            send(proxy)
        # A second of patience, and what a busy machine adds.
        assert time.monotonic() - before < 10
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert not [name for name in left if "ThreadPool" in name]
        freed.set()


def test_server_that_leaves_in_the_middle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection closes: the tensors say so before any time is up, and before its call does."""
    peer, freed = Peer(), threading.Event()

    def leave() -> Reply:
        peer.groups.clear()
        freed.wait(30)
        return Reply()

    peer.faults = {"update_weights_from_distributed": leave}
    monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=20))
    with Proxy(peer) as proxy:
        before = time.monotonic()
        with pytest.raises(CellError, match=r"got .* (closed|reset) by peer"):
            send(proxy)
        assert time.monotonic() - before < 10
        freed.set()


def test_updates_leave_nothing_open() -> None:
    with Proxy(Peer()) as proxy:
        send(proxy)
        before = psutil.Process().num_fds(), psutil.Process().num_threads()
        for _ in range(3):
            send(proxy)
        found = psutil.Process().num_fds(), psutil.Process().num_threads()
    # The peer's thread may still be closing its side of the last one.
    assert all(one - other < 3 for one, other in zip(found, before, strict=True)), (before, found)


def by(cell_spec: CellSpec, way: str) -> CellSpec:
    return cell_spec.model_copy(update={"sglang": SglangSpec.model_validate({"weights_by": way})})


@pytest.mark.parametrize("name", sorted(LOOPBACK_ENVIRONMENT))
def test_group_that_others_could_join_is_refused(
    cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    make_weight_path(by(cell_spec, "gloo"), folder=tmp_path, is_managed=True)
    monkeypatch.delenv(name)
    with pytest.raises(SpecError, match="expected these settings: a group asks nobody who connects"):
        make_weight_path(by(cell_spec, "gloo"), folder=tmp_path, is_managed=True)
    make_weight_path(by(cell_spec, "folder"), folder=tmp_path, is_managed=True)


@pytest.mark.parametrize("is_managed", [True, False])
def test_nccl_takes_servers_on_another_gpu(
    cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch, is_managed: bool, tmp_path: Path
) -> None:
    """Refused for servers that share the trainer's GPU, and where torch has no NCCL."""
    spec = by(cell_spec, "nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: is_managed)
    with pytest.raises(SpecError, match="NCCL takes one rank a GPU"):
        make_weight_path(spec, folder=tmp_path, is_managed=is_managed)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    make_weight_path(spec, folder=tmp_path, is_managed=False)
