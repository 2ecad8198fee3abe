"""Where the processes of one worker find each other: a store that the driver hosts, for this machine alone.

Neither the store nor gloo asks who connects, so they listen on the loopback interface, which no other machine reaches.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# torch does not declare that it exports them.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_LOOPBACK = "127.0.0.1"
# For the environment of every process, also of one that is a group by itself: gloo and NCCL read it when a group is
# made, and listen on the machine's address without it.
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Longest that a process waits for another one. They part when one alone writes a checkpoint, reads from a slow disk or
# compiles a kernel: minutes at most. A process that hangs costs its cell this long (gloo's own limit is half an hour).
TIMEOUT = timedelta(minutes=10)
# Where processes wait for one that has long work of its own, and notices by itself when that hangs.
_PATIENCE = timedelta(days=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What a process must know to join the others of worker `name`; `port` is the store's."""

    name: str
    size: int
    port: int
    timeout: timedelta


@contextmanager
def hosted_meeting(name: str, *, size: int, timeout: timedelta = TIMEOUT) -> Iterator[Meeting]:
    """Host the store of a worker of `size` processes while the block lasts."""
    # The kernel chooses a free port of a socket that is bound already: nobody can take it in between.
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    yield Meeting(name=name, size=size, port=port, timeout=timeout)
    # It listens for as long as the object lives.
    del store


def join(meeting: Meeting, *, rank: int, device: str) -> None:
    """Make this process number `rank` of the group, torch's default one: gloo on device "cpu", NCCL on "cuda"."""
    if device == "cuda":
        # The one GPU that the process sees.
        torch.cuda.set_device(0)
    store = TCPStore(_LOOPBACK, meeting.port, is_master=False, timeout=meeting.timeout)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=PrefixStore(meeting.name, store),
        rank=rank,
        world_size=meeting.size,
        timeout=meeting.timeout,
    )


def patient_group() -> dist.ProcessGroup | None:
    """A gloo group of all processes, to wait in for what one of them does alone; None where there is one process.

    Every process makes it. One that dies ends the waiting at once, for its connections close.
    """
    return dist.new_group(backend="gloo", timeout=_PATIENCE) if dist.is_initialized() else None
