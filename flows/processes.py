"""Starting, recognising and ending the processes of a service. Every one of them runs under `flows.guard`."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from sdpo_core.errors import SpecError

REPOSITORY = Path(__file__).resolve().parents[1]
# A guard gives its service 5 s to end and then kills; past this, something is wrong with the guard itself.
END_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process that can be recognised later: its id may by then belong to somebody else, its start time cannot."""

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str],
    owner: int,
    remove: Path | None = None,
    hold: int | None = None,
) -> ProcessIdentity:
    """Start `command` under a guard, away from this terminal's signals; its output is appended to `log`.

    `owner` 0 makes a daemon; else it must be this process. `remove` is a folder the guard deletes at the end.
    `hold` is a file descriptor the guard keeps open: a lock on it lives as long as the service.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    removal = () if remove is None else ("--remove", str(remove))
    with log.open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "flows.guard", "--owner", str(owner), *removal, "--", *command],
            cwd=REPOSITORY,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=() if hold is None else (hold,),
        )
    return ProcessIdentity.of(guard.pid)


def end(processes: Sequence[ProcessIdentity]) -> None:
    """Ask all guards to end their services and wait for it."""
    alive = [psutil.Process(process.pid) for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    for process in psutil.wait_procs(alive, timeout=END_SECONDS)[1]:
        if process.status() != psutil.STATUS_ZOMBIE:
            process.kill()


def free_ports(count: int) -> tuple[int, ...]:
    """Distinct ports nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(each.getsockname()[1] for each in sockets)


def require_free_port(port: int, *, service: str) -> int:
    """Return `port`, or raise SpecError when somebody listens on it."""
    with socket.socket() as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise SpecError(
                f"{service}: got port {port}, which another program uses, expected a free one. "
                "End that program or choose another port."
            ) from None
    return port


def answers(url: str, *, token: str = "") -> bool:
    """True when `url` answers with a success within seconds."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # Loopback only: a proxy from the environment must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=3) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(
    ready: Callable[[], bool], *, service: str, process: ProcessIdentity, log: Path, seconds: float = 120.0
) -> None:
    """Poll `ready`; raise SpecError when the service ends before or takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not ready():
        if not process.is_alive():
            raise SpecError(f"{service}: got an end before it was ready, expected a service. Read {log}{_tail(log)}")
        if time.monotonic() > deadline:
            raise SpecError(f"{service}: got no answer in {seconds:.0f} s, expected a service. Read {log}{_tail(log)}")
        time.sleep(0.2)


def run_command(command: Sequence[str], *, what: str, environment: Mapping[str, str]) -> None:
    """Run a short command in the repository; a failure is a SpecError with the end of its output."""
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=dict(environment), capture_output=True, text=True, check=False, timeout=120
    )
    if ran.returncode != 0:
        lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
        raise SpecError(f"{what}: got exit status {ran.returncode}, expected 0. It said: {' / '.join(lines[-3:])}")


def inherited_environment() -> dict[str, str]:
    """The environment without settings meant for other servers, and with the project on the import path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "RAY_", "MLFLOW_"))}
    path = kept.get("PYTHONPATH")
    return {**kept, "PYTHONPATH": str(REPOSITORY) if not path else f"{REPOSITORY}{os.pathsep}{path}"}


def _tail(log: Path) -> str:
    """The last line that says something, for the message."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f" (last line: {lines[-1][:200]})" if lines else ""
