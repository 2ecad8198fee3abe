"""Several ranks of one worker: who gets what, who is heard, and how a call ends when one of them does not answer."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from sdpo_core.actors.placement import placed
from sdpo_core.actors.process_group import WorkerProcesses, worker_processes
from sdpo_core.errors import CellError, DataError
from sdpo_core.rendezvous import TIMEOUT
from tests.sdpo_core.test_rendezvous import other_interface

# What the ranks hold in the place of a model. What they do is a function of the tests', which travels as source.
Held = dict[str, Any]
# Much less than the ranks' limit for each other: whoever waits for that fails.
SOON_SECONDS = 60.0
assert TIMEOUT.total_seconds() > 2 * SOON_SECONDS


@contextmanager
def ranks(
    size: int, *, name: str = "student", make: Callable[[], Held] = dict, timeout: timedelta = TIMEOUT
) -> Iterator[WorkerProcesses[Held]]:
    with (
        placed({name: size}, gpus=0) as places,
        worker_processes(
            name,
            make,
            places=places[name],
            device="cpu",
            environment={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": other_interface()},
            timeout=timeout,
        ) as processes,
    ):
        yield processes


def pids(processes: WorkerProcesses[Held]) -> list[int]:
    return processes.call_each(lambda _held: os.getpid())


def assert_gone(numbers: list[int]) -> None:
    """Ray has ended and reaped the processes, or does within a while."""
    deadline = time.monotonic() + SOON_SECONDS
    while alive := [pid for pid in numbers if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def total(value: float) -> float:
    """The sum of `value` over the ranks; whoever calls it waits for the others."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


class Counted:
    """Arrives as 3.0; counts how often it is packed."""

    def __init__(self) -> None:
        self.packed = 0

    def __float__(self) -> float:
        raise AssertionError("not packed")

    def __reduce__(self) -> tuple[Any, ...]:
        self.packed += 1
        return float, ("3.0",)


class Footprint:
    """Leaves a new folder wherever it is unpacked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return tempfile.mkdtemp, ("", "", str(self._folder))


def open_listeners(pid: int) -> list[str]:
    """Addresses that a process listens on, loopback aside."""
    sockets = psutil.Process(pid).net_connections("inet")
    return [s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.ip not in {"127.0.0.1", "::1"}]


def test_ranks_share_calls_and_the_first_one_answers() -> None:
    counted = Counted()
    before = open_listeners(os.getpid())
    with ranks(1, name="alone") as alone, ranks(2) as processes:
        numbers = pids(processes)
        assert len({os.getpid(), *pids(alone), *numbers}) == 4
        assert processes.call_each(lambda _held: (dist.get_rank(), dist.get_world_size())) == [(0, 2), (1, 2)]
        # (0 + 1) * 3 + (1 + 1) * 3 = 9
        assert processes.call(lambda _held: total((dist.get_rank() + 1) * float(counted))) == 9.0
        assert counted.packed == 1
        # Rank 1's answer stays where it is.
        assert processes.call(lambda held: held.setdefault("answer", Counted())) == 3.0
        assert processes.call_each(lambda held: held["answer"].packed) == [1, 0]
        assert alone.call(lambda _held: dist.is_initialized()) is False
        # On the device "cpu" no GPU of the machine is in sight, which Ray alone does not see to.
        assert processes.call_each(lambda _held: os.environ.get("CUDA_VISIBLE_DEVICES")) == ["", ""]
        # Ray listens for itself in every process, as many times in one without a group; the group adds nothing, nor
        # does the driver's store.
        gloo = [open_listeners(pid) for pid in (*pids(alone), *numbers)]
        assert len({len(addresses) for addresses in gloo}) == 1
        assert open_listeners(os.getpid()) == before
    assert_gone(numbers)


def test_error_of_one_rank_ends_the_call_and_the_worker() -> None:
    """Rank 0 waits for rank 1, which has failed and lives."""

    def work(_held: Held) -> float:
        if dist.get_rank() == 1:
            raise DataError("row 3: got 2, expected 1.")
        return total(1.0)

    with ranks(2) as processes:
        numbers = pids(processes)
        start = time.monotonic()
        with pytest.raises(DataError, match=r"^row 3: got 2, expected 1\.$"):
            processes.call(work)
        assert time.monotonic() - start < SOON_SECONDS
        assert_gone(numbers)
        with pytest.raises(CellError, match="expected a living worker"):
            processes.call(len)


def test_worker_of_one_process_goes_on_after_an_error() -> None:
    def work(held: Held) -> NoReturn:
        held["seen"] = True
        raise DataError("row 3: got 2, expected 1.")

    with ranks(1) as processes:
        with pytest.raises(DataError):
            processes.call(work)
        assert processes.call(lambda held: held["seen"]) is True


def test_killed_rank_is_named_while_another_waits_for_it() -> None:
    def work(_held: Held) -> float:
        if dist.get_rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return total(1.0)

    with ranks(2) as processes:
        numbers = pids(processes)
        start = time.monotonic()
        with pytest.raises(CellError, match=r"^student, rank 1 of 2: got ActorDiedError .*Run the experiment again"):
            processes.call(work)
        assert time.monotonic() - start < SOON_SECONDS
    assert_gone(numbers)


def test_later_error_of_ours_is_a_better_reason_than_a_broken_connection() -> None:
    def work(_held: Held) -> NoReturn:
        if dist.get_rank() == 1:
            time.sleep(1.0)
            raise DataError("row 3: got 2, expected 1.")
        raise RuntimeError("connection closed by peer")

    with ranks(2) as processes, pytest.raises(DataError, match="row 3"):
        processes.call(work)


def test_error_that_is_not_ours_comes_as_it_is() -> None:
    def work(held: Held) -> Any:
        return held["absent"]

    with ranks(2) as processes, pytest.raises(KeyError, match="absent"):
        processes.call(work)


def test_rank_that_cannot_start_says_why() -> None:
    def make() -> Held:
        if dist.get_rank() == 1:
            raise DataError("base: got no weights, expected some.")
        return {"total": total(1.0)}

    with ranks(2, make=make) as processes, pytest.raises(DataError, match=r"^base: got no weights"):
        pids(processes)


def test_rank_that_hangs_is_bounded_by_the_limit_of_the_others() -> None:
    """A stopped process answers nobody, not even Ray; it ends with the block all the same."""

    def work(_held: Held) -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return total(1.0)

    with ranks(2, timeout=timedelta(seconds=8)) as processes:
        numbers = pids(processes)
        with pytest.raises(CellError, match=r"rank 0 of 2: got RuntimeError .*no answer from student, rank 1 of 2"):
            processes.call(work)
    assert_gone(numbers)


def test_answer_goes_to_all_ranks_of_another_worker_and_not_to_the_driver(tmp_path: Path) -> None:
    def take(_held: Held) -> Any:
        return Footprint(tmp_path), total(1.0)

    def give(held: Held, answer: Any) -> None:
        held["total"] = answer[1] + dist.get_rank()

    def fail(_held: Held, _answer: Any) -> None:
        if dist.get_rank() == 1:
            raise DataError("weights: got 2 names, expected 3.")
        total(1.0)

    with ranks(2) as student, ranks(2, name="teacher") as teacher:
        student.hand_over(take, to=teacher, give=give)
        assert teacher.call_each(lambda held: held["total"]) == [2.0, 3.0]
        assert len(list(tmp_path.iterdir())) == 2
        with pytest.raises(DataError, match=r"^weights: got 2 names"):
            student.hand_over(take, to=teacher, give=fail)


def test_worker_that_dies_before_it_hands_over_is_named() -> None:
    """Those that wait for its answer fail with it, and are not to blame."""

    def take(_held: Held) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with ranks(1) as student, ranks(1, name="teacher") as teacher:
        with pytest.raises(CellError, match=r"^student: got ActorDiedError"):
            student.hand_over(take, to=teacher, give=lambda _held, _answer: None)
        assert teacher.call(len) == 0
