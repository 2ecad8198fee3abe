"""The guard ends a server's whole tree with its owner, however either of them ends. The server here is a stand-in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdpo_core.sglang.guard import GRACE_SECONDS
from tests.sdpo_core.sglang.families import gone_within

# It ignores SIGTERM, has a child in a session of its own, and says its ids.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(120)
"""

OWNER = """
import os, subprocess, sys, time
read, write = os.pipe()
command = [sys.executable, "-m", "sdpo_core.sglang.guard", "--owner", str(os.getpid()), "--", *sys.argv[1:]]
guard = subprocess.Popen(command, stdin=read)
if os.fork() == 0:
    time.sleep(20)
    os._exit(0)
time.sleep(120)
"""


class Guarded:
    """A guard that this process owns."""

    def __init__(self, *command: str) -> None:
        read, self.life = os.pipe()
        guard = [sys.executable, "-m", "sdpo_core.sglang.guard", "--owner", str(os.getpid()), "--"]
        self.process = subprocess.Popen([*guard, *command], stdin=read, start_new_session=True)
        os.close(read)


@pytest.fixture
def said(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def guarded(said: Path) -> Iterator[Guarded]:
    started = Guarded(sys.executable, "-c", STUBBORN, str(said))
    yield started
    started.process.kill()
    started.process.wait()


def wait_for(said: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while not said.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(word) for word in said.read_text(encoding="ascii").split()]


def test_closing_the_pipe_ends_the_tree(guarded: Guarded, said: Path) -> None:
    pids = wait_for(said)
    os.close(guarded.life)
    assert gone_within(pids, seconds=GRACE_SECONDS + 5) == []
    assert guarded.process.wait(timeout=5) != 0


def test_sigterm_ends_the_tree(guarded: Guarded, said: Path) -> None:
    pids = wait_for(said)
    guarded.process.terminate()
    assert gone_within(pids, seconds=GRACE_SECONDS + 5) == []


def test_a_killed_guard_takes_the_server_along(guarded: Guarded, said: Path) -> None:
    """Its child in another session is left: SGLang's own end with their parent."""
    server, child = wait_for(said)
    guarded.process.kill()
    assert gone_within([server], seconds=5) == []
    os.kill(child, signal.SIGKILL)


def test_the_end_of_the_server_ends_its_children(guarded: Guarded, said: Path) -> None:
    server, child = wait_for(said)
    os.kill(server, signal.SIGKILL)
    assert gone_within([child], seconds=5) == []
    assert guarded.process.wait(timeout=5) == 256 - signal.SIGKILL


def test_the_status_of_the_server_is_handed_on() -> None:
    guarded = Guarded(sys.executable, "-c", "raise SystemExit(7)")
    assert guarded.process.wait(timeout=20) == 7


def test_a_killed_owner_takes_the_tree_along_also_when_a_fork_of_it_lives(said: Path) -> None:
    """The fork holds the owner's pipe open."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, sys.executable, "-c", STUBBORN, str(said)])
    pids = wait_for(said)
    owner.kill()
    owner.wait()
    assert gone_within(pids, seconds=GRACE_SECONDS + 5) == []
