"""Runs one service and ends all of it, whatever happens: `python -m flows.guard --owner PID -- COMMAND ...`.

The guard is the service's parent and adopts whatever the service leaves behind (Linux "child subreaper"), so a whole
tree (Ray starts about twenty processes, some in sessions of their own) has one process to watch and one to end. It
ends the tree when it is asked to (SIGTERM), when the service ends, or when its owner is gone: an owner killed with
SIGKILL cannot clean up itself. Owner 0 means a daemon that outlives whoever started it.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from sdpo_core.process_tree import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    end,
    kill_descendants,
    reap,
    set_process_option,
)

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
        status = reap(service.pid)
    status = end(service.pid, grace_seconds=GRACE_SECONDS) if status is None else status
    kill_descendants()
    if options.remove is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
    return status


def _die_with_the_guard() -> None:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
