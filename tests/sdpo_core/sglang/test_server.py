"""The life of a managed server: it does not start, is killed, hangs, loses its owner; nothing is ever left running.

A start takes 6 s on two quiet cores, and several times as long on busy ones: tests share one where they can.
"""

import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sdpo_core.errors import CellError, SpecError
from sdpo_core.sglang.server import ManagedServer, ServerSpec, find_python, reserve_port
from tests.sdpo_core.sglang.asking import Ask, Oracle, answer
from tests.sdpo_core.sglang.families import gone_within, member

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

# Ended by the guard within its grace; the rest is a busy machine.
END_SECONDS = 8.0
SMALL = Ask(prompt=3, response=4, k=5)

OWNER = """
import json, sys, time
from pathlib import Path
from sdpo_core.sglang.server import ManagedServer, ServerSpec

model, valid_vocab, folder = sys.argv[1:]
numbers = {"valid_vocab": int(valid_vocab), "max_total_tokens": 1024, "threads": 1}
spec = ServerSpec(model=Path(model), dtype="float32", deterministic=False, **numbers)
server = ManagedServer(spec, folder=Path(folder))
server.start()
print(*[process.pid for process in server.processes()], flush=True)
time.sleep(600)
"""


def assert_scores(server: ManagedServer, spec: ServerSpec) -> None:
    values, _ = answer(server, SMALL, vocab=spec.valid_vocab)
    wanted, _ = Oracle(spec.model, vocab=spec.valid_vocab).columns(SMALL)
    assert abs(values - wanted).max() <= 1e-5


def writers(log: Path) -> set[int]:
    """All processes of a server, whatever they call themselves and whoever has adopted them: they hold its log."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(log) in [file.path for file in process.open_files()]:
                found.add(process.pid)
    return found


def test_missing_environment_says_how_to_build_it(
    server_spec: ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(SpecError, match=r"nowhere, expected an environment with SGLang\. Run `make sglang-env`"):
        ManagedServer(server_spec, folder=tmp_path).start()


def test_named_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", sys.executable)
    assert find_python() == Path(sys.executable)


def test_environment_without_sglang_fails_with_its_last_words(server_spec: ServerSpec, tmp_path: Path) -> None:
    server = ManagedServer(dataclasses.replace(server_spec, python=Path(sys.executable)), folder=tmp_path)
    with pytest.raises(CellError, match=r"No module named .*sdpo_sglang.* Read .*server\.log"):
        server.start()
    assert not server.is_alive()


def test_folder_without_a_model_is_refused(server_spec: ServerSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"got no config\.json"):
        ManagedServer(dataclasses.replace(server_spec, model=tmp_path), folder=tmp_path).start()


def test_broken_weights_fail_with_the_last_words(server_spec: ServerSpec, tmp_path: Path) -> None:
    for file in server_spec.model.iterdir():
        (tmp_path / file.name).write_bytes(b"x" * 100 if file.suffix == ".safetensors" else file.read_bytes())
    server = ManagedServer(dataclasses.replace(server_spec, model=tmp_path), folder=tmp_path)
    with pytest.raises(CellError, match=r"got an end before it was ready.*It said: .*[Hh]eader"):
        server.start()
    assert not server.is_alive()


def test_slow_start_is_given_up_and_nothing_is_left(server_spec: ServerSpec, tmp_path: Path) -> None:
    server = ManagedServer(server_spec, folder=tmp_path, start_seconds=3.0)
    before = time.monotonic()
    with pytest.raises(CellError, match="got no answer in 3 s, expected a server"):
        server.start()
    assert time.monotonic() - before < 3 + END_SECONDS
    assert not writers(server.log_path)


def test_server_without_the_scoring_hooks_is_refused(server_spec: ServerSpec, tmp_path: Path) -> None:
    """It would answer every score with its own best ids."""
    spec = dataclasses.replace(server_spec, environment=(("SGLANG_PLUGINS", "sdpo_plain_cpu"),))
    server = ManagedServer(spec, folder=tmp_path)
    with pytest.raises(CellError, match="got another answer than the score of a token"):
        server.start()
    assert not server.is_alive()


@pytest.fixture(scope="module")
def taken() -> Iterator[socket.socket]:
    """A port that another program will listen on, which hangs up on everybody."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        yield listener


def hang_up(listener: socket.socket) -> None:
    """Until the listener is shut down."""
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


@pytest.fixture(scope="module")
def own(
    server_spec: ServerSpec, taken: socket.socket, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ManagedServer]:
    """A server to be broken; its first port is taken."""
    waiting = [taken]

    def reserve() -> socket.socket:
        if not waiting:
            return reserve_port()
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(taken.getsockname())
        listener = waiting.pop()
        listener.listen()
        threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
        return held

    with ManagedServer(server_spec, folder=tmp_path_factory.mktemp("own"), reserve=reserve) as server:
        yield server


def test_taken_port_is_left_for_another(own: ManagedServer, taken: socket.socket, server_spec: ServerSpec) -> None:
    assert own.url != f"http://127.0.0.1:{taken.getsockname()[1]}"
    assert f"--port {taken.getsockname()[1]}" not in " ".join(own.processes()[0].cmdline())
    assert_scores(own, server_spec)


def test_its_processes_are_copies_of_one(own: ManagedServer) -> None:
    """Each would import SGLang for 6 s. The log shows all of them, so a look at it shows what a server has left."""
    assert len(own.processes()) == 4
    assert {process.pid for process in own.processes()} == writers(own.log_path)


def test_only_this_machine_can_reach_it(own: ManagedServer) -> None:
    """Also what its processes find each other by, which asks nobody for a token."""
    listening = [
        connection.laddr.ip
        for process in own.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2
    assert set(listening) == {"127.0.0.1"}


def test_killed_scheduler_is_noticed_and_a_restart_serves_again(own: ManagedServer, server_spec: ServerSpec) -> None:
    pids = [process.pid for process in own.processes()]
    member(own.processes(), "scheduler").kill()
    assert gone_within(pids[:1], seconds=20) == []
    assert not own.is_alive()
    assert gone_within(pids, seconds=1) == []
    own.restart()
    assert own.is_alive()
    assert_scores(own, server_spec)


def test_hanging_scheduler_is_ended_all_the_same(own: ManagedServer) -> None:
    pids = [process.pid for process in own.processes()]
    member(own.processes(), "scheduler").send_signal(signal.SIGSTOP)
    own.stop()
    assert gone_within(pids, seconds=1) == []
    assert not own.is_alive()
    own.stop()


def test_killed_owner_leaves_no_process(server_spec: ServerSpec, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(server_spec.model), str(server_spec.valid_vocab), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) >= 4
    owner.kill()
    owner.wait()
    assert gone_within(pids, seconds=END_SECONDS) == []
