"""Runs a function in several processes that form a gloo group; what one raises, the caller raises."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import start_processes

# How long a process waits for the others in one call: a failing test should fail, not hang for gloo's half hour.
MEET_SECONDS = 120

Work = Callable[[ProcessGroup], None]


def run_processes(work: Work, *, size: int, folder: Path) -> None:
    """`work`, a function of a module, once in each of `size` new processes.

    They are forks of a process that has imported that module and no more: importing costs more than most tests do.
    """
    multiprocessing.set_forkserver_preload([work.func.__module__ if isinstance(work, partial) else work.__module__])
    arguments = (work, size, str(folder / f"group{size}"))
    start_processes(join_group, args=arguments, nprocs=size, start_method="forkserver")


def join_group(rank: int, work: Work, size: int, store: str) -> None:
    """The life of one process of the group."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size, timeout=timedelta(seconds=MEET_SECONDS)
    )
    try:
        group = dist.group.WORLD
        if group is None:
            raise RuntimeError("no group was formed")
        work(group)
    finally:
        dist.destroy_process_group()
