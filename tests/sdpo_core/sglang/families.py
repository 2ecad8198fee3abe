"""Processes that a test starts to be killed, and whether they are gone."""

import time
from collections.abc import Iterable, Sequence

import psutil


def gone_within(pids: Iterable[int], *, seconds: float) -> list[int]:
    """Those of `pids` that still run when the time is over; zombies count as ended."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def member(processes: Sequence[psutil.Process], name: str) -> psutil.Process:
    """Of a server's processes, its guard first: "http" is the guard's child, "scheduler" names itself."""
    _, http, *others = processes
    if name == "http":
        return http
    (found,) = [one for one in others if name in "".join(one.cmdline()[:1])]
    return found
