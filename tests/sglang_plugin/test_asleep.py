"""Sleep without a server: what is freed and comes back as zeros, and what a server that sleeps lets through."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdpo_sglang.asleep import fall_asleep, is_asleep, wake_up
from sdpo_sglang.hooks import check_request
from sdpo_sglang.plain_cpu.sleep import Sleeper


def model_of(tied: bool) -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(7, 5), "head": torch.nn.Linear(5, 7, bias=False)})
    if tied:
        model["head"].weight = model["embedding"].weight
    model.register_buffer("angles", torch.ones(3))
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_sleeper_frees_weights_and_cache_and_brings_back_zeros(tied: bool) -> None:
    model, keys, values = model_of(tied), [torch.ones(4, 2)], [torch.ones(4, 3)]
    pool = SimpleNamespace(k_buffer=keys, v_buffer=values)
    runner = SimpleNamespace(model=model, token_to_kv_pool=pool)
    updater = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
    tensors = [*model.parameters(), *model.buffers(), *keys, *values]
    part = keys[0][2:]
    sleeper = Sleeper()
    for _ in range(2):
        sleeper.release(None, updater, None)
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
        sleeper.resume(updater, None)
        for tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
            assert not tensor.detach().any()
            tensor.detach().fill_(1.0)
        # A view that somebody else holds sees what is written now.
        assert part.tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Scheduler:
    """Counts what gets through to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def release(self, _manager: Any, _obj: Any) -> None:
        self.calls.append("release")

    async def resume(self, _manager: Any, _obj: Any) -> None:
        self.calls.append("resume")


def test_sleep_and_waking_reach_the_scheduler_once() -> None:
    """A second resume would end it: it forgets the first one's tags."""
    manager, scheduler, whole = SimpleNamespace(), Scheduler(), SimpleNamespace(tags=None)

    async def run() -> None:
        await wake_up(scheduler.resume, manager, whole)
        for _ in range(2):
            await fall_asleep(scheduler.release, manager, whole)
        for _ in range(2):
            await wake_up(scheduler.resume, manager, whole)

    asyncio.run(run())
    assert scheduler.calls == ["release", "resume"]


def test_second_call_is_answered_when_the_first_is_done() -> None:
    """A client that has asked again must not take a server that hangs for one that is awake."""
    manager, whole, gate = SimpleNamespace(), SimpleNamespace(tags=None), asyncio.Event()
    calls: list[str] = []

    async def hang(_manager: Any, _obj: Any) -> None:
        calls.append("hang")
        await gate.wait()

    async def run() -> None:
        for hook in (fall_asleep, wake_up):
            gate.clear()
            asked = [asyncio.ensure_future(hook(hang, manager, whole)) for _ in range(2)]
            done, _ = await asyncio.wait(asked, timeout=0.05)
            assert not done
            assert is_asleep(manager)
            gate.set()
            await asyncio.gather(*asked)
            assert is_asleep(manager) == (hook is fall_asleep)

    asyncio.run(run())
    assert calls == ["hang"] * 2


def test_part_of_the_memory_is_refused() -> None:
    manager, scheduler = SimpleNamespace(), Scheduler()
    with pytest.raises(ValueError, match=r"got tags \['weights'\], expected none"):
        asyncio.run(fall_asleep(scheduler.release, manager, SimpleNamespace(tags=["weights"])))
    assert scheduler.calls == []


def test_sleeping_server_takes_no_request() -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9))
    scheduler, whole = Scheduler(), SimpleNamespace(tags=None)
    request = SimpleNamespace(sampling_params={"max_new_tokens": 1})

    def taken(*_arguments: Any, **_named: Any) -> str:
        return "taken"

    asyncio.run(fall_asleep(scheduler.release, manager, whole))
    with pytest.raises(ValueError, match="expected none: the server sleeps"):
        check_request(taken, manager, request, None, [1, 2])
    asyncio.run(wake_up(scheduler.resume, manager, whole))
    assert check_request(taken, manager, request, None, [1, 2]) == "taken"
