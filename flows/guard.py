"""Runs one service and ends all of it, whatever happens: `python -m flows.guard --owner PID -- COMMAND ...`.

The guard is the service's parent and adopts whatever the service leaves behind (Linux "child subreaper"), so a whole
tree (Ray starts about twenty processes, some in sessions of their own) has one process to watch and one to end. It
ends the tree when it is asked to (SIGTERM), when the service ends, or when its owner is gone: an owner killed with
SIGKILL cannot clean up itself. Owner 0 means a daemon that outlives whoever started it.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.25
# Ray's gcs_server outlives SIGTERM by more than 3 s. Killing is safe: what matters is on disk, atomically.
GRACE_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Run the command to its end and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flows.guard", description=__doc__)
    parser.add_argument("--owner", type=int, required=True, help="process id to outlive by seconds only; 0: none")
    parser.add_argument("--remove", type=Path, help="folder to delete at the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    service = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_guard)
    status = None
    while status is None and not stop.is_set() and options.owner in (0, os.getppid()):
        stop.wait(POLL_SECONDS)
        status = _reap(service.pid)
    status = _end_tree(service.pid) if status is None else status
    _kill_descendants()
    if options.remove is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
    return status


def set_process_option(option: int, value: int) -> None:
    """prctl(2) of Linux; elsewhere nothing, and an owner killed with SIGKILL may leave grandchildren behind."""
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option}")


def _die_with_the_guard() -> None:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)


def _reap(service_pid: int) -> int | None:
    """Collect ended children, adopted ones included; the service's exit status once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == service_pid:
            return os.waitstatus_to_exitcode(status)


def _end_tree(service_pid: int) -> int:
    """Ask the service to end, for a while."""
    os.kill(service_pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        status = _reap(service_pid)
        if status is not None:
            return status
        time.sleep(0.05)
    return -signal.SIGKILL


def _kill_descendants() -> None:
    """Kill what is left until nothing is: a process may have been started while the others were being killed."""
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        while _reap(0) is None and any(process.is_running() for process in descendants):
            time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
