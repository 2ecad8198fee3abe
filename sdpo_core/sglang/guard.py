"""Runs a server and ends all of it with its owner: `python -m sdpo_core.sglang.guard --owner PID -- COMMAND ...`.

The guard is the server's parent and adopts what the server leaves behind (Linux "child subreaper"), so a whole tree has
one process to watch and one to end. Its standard input is a pipe that the owner holds and never writes to: it closes
when the owner ends, be it by SIGKILL. A child that the owner forked may hold the pipe too, so its process id counts as
well.
"""

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.2
# SGLang takes 8.5 s to end by itself. It keeps nothing, so killing it loses nothing but the answers in flight.
GRACE_SECONDS = 2.0


def main(arguments: list[str]) -> int:
    """Run the command to its end and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m sdpo_core.sglang.guard", description=__doc__)
    parser.add_argument("--owner", type=int, required=True, help="process id to outlive by seconds only")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    asked_to_end, signalled = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(signalled, b"x"))
    _set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_guard)
    status = None
    while status is None and os.getppid() == options.owner:
        if select.select([sys.stdin, asked_to_end], [], [], POLL_SECONDS)[0]:
            break
        status = _reap(server.pid)
    status = _end(server.pid) if status is None else status
    _kill_descendants()
    return status


def _die_with_the_guard() -> None:
    _set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_process_option(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option}")


def _reap(server_pid: int) -> int | None:
    """Collect ended children, adopted ones included; the server's exit status once it has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1
        if pid == 0:
            return None
        if pid == server_pid:
            return os.waitstatus_to_exitcode(status)


def _end(server_pid: int) -> int:
    """Ask the server to end, for a while."""
    os.kill(server_pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        status = _reap(server_pid)
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
