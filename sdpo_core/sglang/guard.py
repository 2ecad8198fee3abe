"""Runs a server and ends all of it with its owner: `python -m sdpo_core.sglang.guard --owner PID -- COMMAND ...`.

The guard is the server's parent and adopts what the server leaves behind (Linux "child subreaper"), so a whole tree has
one process to watch and one to end. Its standard input is a pipe that the owner holds and never writes to: it closes
when the owner ends, be it by SIGKILL. A child that the owner forked may hold the pipe too, so its process id counts as
well.
"""

import argparse
import os
import select
import signal
import subprocess
import sys

from sdpo_core.process_tree import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end,
    kill_descendants,
    reap,
    set_process_option,
)

POLL_SECONDS = 0.2
# SGLang takes 8.5 s to end by itself. It keeps nothing, so killing it loses nothing but the answers in flight.
GRACE_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    """Run the command to its end and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m sdpo_core.sglang.guard", description=__doc__)
    parser.add_argument("--owner", type=int, required=True, help="process id to outlive by seconds only")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    asked_to_end, signalled = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(signalled, b"x"))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_the_guard)
    status = None
    while status is None and os.getppid() == options.owner:
        if select.select([sys.stdin, asked_to_end], [], [], POLL_SECONDS)[0]:
            break
        status = reap(server.pid)
    status = end(server.pid, grace_seconds=GRACE_SECONDS) if status is None else status
    kill_descendants()
    return status


def _die_with_the_guard() -> None:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
