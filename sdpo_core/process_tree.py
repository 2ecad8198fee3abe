"""Ending a command with all that it has started, from the parent that adopts what the command leaves behind."""

import ctypes
import os
import signal
import sys
import time

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def set_process_option(option: int, value: int) -> None:
    """prctl(2) of Linux; elsewhere nothing, and an owner killed with SIGKILL may leave grandchildren behind."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option}")


def reap(command_pid: int) -> int | None:
    """Collect ended children, adopted ones included; the command's exit status once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == command_pid:
            return os.waitstatus_to_exitcode(status)


def end(command_pid: int, *, grace_seconds: float) -> int:
    """Ask the command to end, for a while."""
    os.kill(command_pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline:
        status = reap(command_pid)
        if status is not None:
            return status
        time.sleep(0.05)
    return -signal.SIGKILL


def kill_descendants() -> None:
    """Kill what is left until nothing is: a process may have been started while the others were being killed."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        while reap(0) is None and any(process.is_running() for process in descendants):
            time.sleep(0.02)
