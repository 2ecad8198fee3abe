"""Processes that meet at a store: they find each other, listen to this machine alone, and do not wait for ever."""

import os
import socket
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT, Meeting, hosted_meeting, join, patient_group

LIMIT = timedelta(seconds=120)


def listeners() -> list[str]:
    """Addresses this process listens on."""
    sockets = psutil.Process().net_connections("inet")
    return sorted(s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN)


def meet(rank: int, meeting: Meeting) -> None:
    """The life of one of two processes."""
    torch.set_num_threads(1)
    join(meeting, rank=rank, device="cpu")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 2, "gloo")
    tensor = torch.tensor([1.0 + rank])
    dist.all_reduce(tensor)
    assert tensor.item() == 1.0 + 2.0
    addresses = listeners()
    assert addresses
    assert set(addresses) == {"127.0.0.1"}
    dist.destroy_process_group()


def other_interface() -> str:
    """An interface that other machines reach, where there is one: what gloo takes unless it is told."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.family is socket.AF_INET and found.address != "127.0.0.1" for found in addresses):
            return name
    return "lo"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"GLOO_SOCKET_IFNAME": other_interface()} | LOOPBACK_ENVIRONMENT).items():
        monkeypatch.setenv(name, value)


def test_processes_meet_and_nothing_listens_to_other_machines() -> None:
    before = listeners()
    with hosted_meeting("student", size=2, timeout=LIMIT) as meeting, hosted_meeting("teacher", size=2) as other:
        assert meeting.port != other.port
        assert listeners() == sorted([*before, "127.0.0.1", "127.0.0.1"])
        spawn(meet, args=(meeting,), nprocs=2)
    assert listeners() == before


def test_process_whose_others_stay_away_gives_up() -> None:
    """In a process of its own, which a group that is half made does not outlive."""
    with hosted_meeting("student", size=2, timeout=timedelta(seconds=1)) as meeting:
        spawn(meet_nobody, args=(meeting,), nprocs=1)


def meet_nobody(rank: int, meeting: Meeting) -> None:
    with pytest.raises(RuntimeError, match=r"1000ms|timed? ?out"):
        join(meeting, rank=rank, device="cpu")
    assert not dist.is_initialized(), os.getpid()


def test_patient_group_waits_beyond_the_limit_of_the_others() -> None:
    assert patient_group() is None
    with hosted_meeting("student", size=2, timeout=timedelta(seconds=10)) as meeting:
        spawn(wait_for_the_first, args=(meeting,), nprocs=2)


def wait_for_the_first(rank: int, meeting: Meeting) -> None:
    """The first comes later than the limit of the group that all of them join."""
    join(meeting, rank=rank, device="cpu")
    group = patient_group()
    found = ["late" if rank == 0 else ""]
    if rank == 0:
        time.sleep(12.0)
    dist.broadcast_object_list(found, src=0, group=group)
    assert found == ["late"]
    assert set(listeners()) == {"127.0.0.1"}
    dist.destroy_process_group()
