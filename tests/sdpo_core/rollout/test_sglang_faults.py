"""Servers of the SGLang engine that die or hang: it goes on with the same rollouts, or says why it does not.

Rollouts depend on their seeds alone, so those that a restart interrupts are those that it would have had.
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.errors import CellError
from sdpo_core.records import Rollout
from sdpo_core.rollout import sglang_servers as module
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.sglang import SglangEngine, load_engine
from sdpo_core.sglang.transport import Limits
from sdpo_core.specs import CellSpec
from tests.sdpo_core.micro import Base, make_spec
from tests.sdpo_core.rollout.test_local import requests
from tests.sdpo_core.rollout.test_sglang import make_policy, servers, train, trained_engine
from tests.sdpo_core.sglang.families import member

pytestmark = pytest.mark.sglang

# Long enough that a fault comes in the middle.
SAMPLING = Sampling(temperature=1.0, max_response_tokens=200)
LIMITS = Limits(stall_seconds=2.0, health_seconds=3.0, attempts=3, retry_seconds=5.0)


@pytest.fixture(scope="module")
def policy(base: Base) -> ModelPolicy:
    return make_policy(base)


@pytest.fixture(scope="module")
def engine(base: Base, policy: ModelPolicy, cell_spec: CellSpec) -> Iterator[SglangEngine]:
    """Its weights are not those that its server starts with."""
    with trained_engine(make_spec(cell_spec), policy=policy, base=base, limits=LIMITS) as engine:
        yield engine


@pytest.fixture
def asked() -> list[RolloutRequest]:
    return requests(48)


def process(engine: SglangEngine, name: str) -> psutil.Process:
    return member(servers(engine).managed[0].processes(), name)


def sample_under(
    engine: SglangEngine, asked: list[RolloutRequest], fault: Callable[[], None]
) -> tuple[tuple[Rollout, ...], float]:
    """What is sampled while `fault` comes, and the seconds from the fault on."""
    times: list[float] = []

    def strike() -> None:
        time.sleep(0.4)
        times.append(time.monotonic())
        fault()

    thread = threading.Thread(target=strike)
    thread.start()
    found = engine.generate(asked, sampling=SAMPLING)
    thread.join()
    return found, time.monotonic() - times[0]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.mark.parametrize(
    ("name", "number"), [("scheduler", signal.SIGKILL), ("http", signal.SIGKILL), ("scheduler", signal.SIGSTOP)]
)
def test_rollouts_go_on_after_a_server_has_died_or_hung(
    engine: SglangEngine, asked: list[RolloutRequest], name: str, number: signal.Signals
) -> None:
    """With the weights of the moment, and no process of the old server left."""
    expected = engine.generate(asked, sampling=SAMPLING)
    pids = [one.pid for one in servers(engine).managed[0].processes()]
    victim, url = process(engine, name), servers(engine).managed[0].url
    found, seconds = sample_under(engine, asked, lambda: victim.send_signal(number))
    assert servers(engine).managed[0].url != url
    assert [rollout.response_ids for rollout in found] == [rollout.response_ids for rollout in expected]
    assert {rollout.weights_version for rollout in found} == {1}
    assert gone(pids)
    # Start of a server: 6 s here, several times as long beside other work.
    assert seconds < 120


def test_server_that_died_between_two_steps_is_started_for_the_update(
    engine: SglangEngine, policy: ModelPolicy, asked: list[RolloutRequest]
) -> None:
    """The scheduler is gone when the next weights are to be sent."""
    engine.generate(asked[:2], sampling=SAMPLING)
    process(engine, "http").kill()
    train(policy)
    found = engine.generate(asked, sampling=SAMPLING)
    assert {rollout.weights_version for rollout in found} == {policy.weights_version()}


def test_restart_holds_the_base_until_the_canary_has_agreed(
    engine: SglangEngine, asked: list[RolloutRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the weights not sent again, the cell would stop."""
    engine.generate(asked[:2], sampling=SAMPLING)
    process(engine, "http").kill()
    client = servers(engine).client
    monkeypatch.setattr(client, "update_from_folder", lambda *_, **__: setattr(client, "_weights", None))
    with pytest.raises(CellError, match="differ from the trainer's by"):
        engine.generate(asked[:2], sampling=SAMPLING)


def test_end_of_the_engine_leaves_nothing(base: Base, policy: ModelPolicy, cell_spec: CellSpec) -> None:
    engine = load_engine(make_spec(cell_spec), policy=policy, folder=base.folder, device="cpu")
    pids = [one.pid for one in servers(engine).managed[0].processes()]
    scratch: Path = servers(engine).scratch
    assert len(pids) >= 4
    assert scratch.exists()
    del engine
    gc.collect()
    assert gone(pids)
    assert not scratch.exists()


def test_server_that_keeps_dying_stops_the_cell(
    engine: SglangEngine, asked: list[RolloutRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_RESTARTS", servers(engine)._restarts)
    process(engine, "http").kill()
    with pytest.raises(CellError, match=r"servers that had died or hung, the last with: .* Read .*server\.log"):
        engine.generate(asked[:2], sampling=SAMPLING)
