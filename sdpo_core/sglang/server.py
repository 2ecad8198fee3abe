"""A managed SGLang server: started in its own environment, watched, started again, and ended with whoever started it.

SGLang's requirements contradict this project's, so it runs under another Python (docs/decisions/0010-sglang-apart.md).
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Literal

import psutil

from sdpo_core.errors import CellError, SpecError
from sdpo_core.sglang.probe import is_ready

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON_VARIABLE = "SDPO_SGLANG_PYTHON"
HOST = "127.0.0.1"

# The guard gives the server its grace and then kills.
_END_SECONDS = 10.0
_POLL_SECONDS = 0.2
# On a GPU weights come from a cold disk, kernels are compiled and graphs captured. One that ends is noticed at once.
_START_SECONDS = {"cpu": 180.0, "cuda": 1200.0}
_PORT_TRIES = 3
_SHOWN_LINES = 4
# SGLang takes no input within 6 tokens of its context; one that fills the model's positions can be scored all the same.
_RESERVED_POSITIONS = 8
# Settings of this process that mean something else, or the wrong thing, to the server.
_NOT_INHERITED = ("PYTHON", "SGLANG_", "RAY_", "PREFECT_", "MLFLOW_", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What to serve and how.

    `model`: a folder in Hugging Face form. `valid_vocab`: ids of its tokenizer; ids from there on get no probability.
    `threads`: for one core's worth of operators each. `deterministic`: the seed of a request decides what it samples.
    `sleep`: it can give its memory back. `max_requests`: run at once; others wait. `memory_fraction`: share of the
    device's memory for weights and prompts (None: SGLang's choice). `python`: of an environment with SGLang (None:
    `find_python`). `extra`: flags that come last and so win.
    """

    model: Path
    dtype: Literal["float32", "bfloat16"]
    valid_vocab: int
    max_total_tokens: int
    threads: int
    deterministic: bool
    sleep: bool = False
    max_requests: int = 64
    memory_fraction: float | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    python: Path | None = None
    extra: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def find_python() -> Path:
    """The Python of SGLang's environment: of SDPO_SGLANG_PYTHON, or what `make sglang-env` has built.

    Raises:
        SpecError: there is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else REPOSITORY / ".venv-sglang" / "bin" / "python"
    if not python.is_file():
        source = f"{PYTHON_VARIABLE}={named}" if named else str(python)
        raise SpecError(
            f"find_python: got no Python at {source}, expected an environment with SGLang. "
            f"Run `make sglang-env`, or set {PYTHON_VARIABLE} to the Python of one that has sglang_plugin too."
        )
    return python


def reserve_port() -> socket.socket:
    """A free port of this machine, held: bound, but not listened on, so that the server can bind it too.

    The kernel gives it to nobody else while the socket is open.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held


class ManagedServer:
    """One server. A context manager: entering waits until it serves, leaving ends all of its processes.

    `url` changes with every start, `token` does not; every request carries it as bearer. `log_path` gets the output of
    all starts. `start_seconds`: longest that one takes (None: 3 minutes on a CPU, 20 on a GPU). Not for several threads
    at once.
    """

    def __init__(
        self,
        spec: ServerSpec,
        *,
        folder: Path,
        start_seconds: float | None = None,
        reserve: Callable[[], socket.socket] = reserve_port,
    ) -> None:
        self._spec = spec
        self._start_seconds = _START_SECONDS[spec.device] if start_seconds is None else start_seconds
        self._reserve = reserve
        self.log_path = folder / "server.log"
        self.token = secrets.token_hex(16)
        self.url = ""
        self._guard: subprocess.Popen[bytes] | None = None
        self._life: int | None = None
        self._log_start = 0

    def __enter__(self) -> "ManagedServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers.

        Raises:
            SpecError: no environment, or no model.
            CellError: it ended, took longer than `start_seconds`, or serves without the hooks of sglang_plugin.
        """
        if self.is_alive():
            raise CellError("ManagedServer.start: got a running server, expected none. Call `restart`.")
        self.stop()
        deadline = time.monotonic() + self._start_seconds
        try:
            for _ in range(_PORT_TRIES):
                with self._reserve() as held:
                    self._launch(held.getsockname()[1])
                    if self._wait_until_ready(deadline):
                        return
                self.stop()
            raise CellError(f"ManagedServer: got {_PORT_TRIES} ports that were taken, expected a free one. Try again.")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all of its processes; nothing happens when there are none."""
        if self._guard is None:
            return
        if self._life is not None:
            os.close(self._life)
            self._life = None
        deadline = time.monotonic() + _END_SECONDS
        while not _has_ended(self._guard) and time.monotonic() < deadline:
            time.sleep(0.05)
        # What a guard that was killed or hangs has left: the server shares its process group.
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, SIGKILL)
        self._guard.wait()
        self._guard = None

    def restart(self) -> None:
        """End what is left and start again, with the weights of the folder: newer ones must be sent again."""
        self.stop()
        self.start()

    def is_alive(self) -> bool:
        """Whether it runs. It may hang all the same, and takes up to 6 s to end when its scheduler has died."""
        return self._guard is not None and not _has_ended(self._guard)

    def processes(self) -> tuple[psutil.Process, ...]:
        """The guard and all of the server's processes."""
        if not self.is_alive() or self._guard is None:
            return ()
        guard = psutil.Process(self._guard.pid)
        return (guard, *guard.children(recursive=True))

    def last_words(self) -> str:
        """The last lines of this start's log, for a message."""
        text = self._log_text()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(line[:200] for line in lines[-_SHOWN_LINES:])

    def _launch(self, port: int) -> None:
        python = find_python() if self._spec.python is None else self._spec.python
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.url = f"http://{HOST}:{port}"
        read, self._life = os.pipe()
        guard = [sys.executable, "-m", "sdpo_core.sglang.guard", "--owner", str(os.getpid()), "--"]
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._guard = subprocess.Popen(
                    [*guard, str(python), "-m", "sdpo_sglang.serve", *_flags(self._spec, port=port)],
                    cwd=REPOSITORY,
                    env=_environment(self._spec, token=self.token),
                    stdin=read,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            os.close(read)

    def _wait_until_ready(self, deadline: float) -> bool:
        """False when the port was taken by another program."""
        while not is_ready(self.url, token=self.token):
            if not self.is_alive():
                if "address already in use" in self._log_text().lower():
                    return False
                raise CellError(
                    f"ManagedServer: got an end before it was ready, expected a server. It said: {self.last_words()}. "
                    f"Read {self.log_path}."
                )
            if time.monotonic() > deadline:
                raise CellError(
                    f"ManagedServer: got no answer in {self._start_seconds:.0f} s, expected a server. "
                    f"It said: {self.last_words()}. Read {self.log_path}."
                )
            time.sleep(_POLL_SECONDS)
        return True

    def _log_text(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without collecting it, so that its id, which is that of its group, passes to nobody else."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _flags(spec: ServerSpec, *, port: int) -> list[str]:
    flags = ["--model-path", str(spec.model), "--host", HOST, "--port", str(port), "--device", spec.device]
    flags += ["--dtype", spec.dtype, "--max-total-tokens", str(spec.max_total_tokens)]
    # Not deterministic, it draws from one stream of its own, which neither servers nor cells nor starts may share.
    flags += ["--random-seed", str(secrets.randbelow(2**31))]
    flags += ["--context-length", str(_num_positions(spec.model) + _RESERVED_POSITIONS)]
    # No grammar is ever asked for, an idle scheduler would take most of a core, and a line a request fills the log.
    flags += ["--grammar-backend", "none", "--sleep-on-idle", "--skip-server-warmup", "--log-level-http", "warning"]
    flags += ["--max-running-requests", str(spec.max_requests)]
    if spec.device == "cpu":
        flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    if spec.dtype != "float32":
        # As the trainer does: log-probabilities of bfloat16 logits are off by 0.01 and more.
        flags += ["--enable-fp32-lm-head"]
    if spec.deterministic:
        flags += ["--enable-deterministic-inference"]
    if spec.sleep:
        flags += ["--enable-memory-saver"]
    if spec.memory_fraction is not None:
        flags += ["--mem-fraction-static", str(spec.memory_fraction)]
    return [*flags, *spec.extra]


def _num_positions(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            f"ManagedServer: got no config.json with max_position_embeddings in {model} ({error}), expected a model's "
            "folder in Hugging Face form. Publish the weights there first."
        ) from error


def _environment(spec: ServerSpec, *, token: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(spec.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # Neither gloo nor NCCL asks who connects.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "SDPO_SGLANG_KEY": token,
        "SDPO_SGLANG_VALID_VOCAB": str(spec.valid_vocab),
        "SDPO_SGLANG_POSITIONS": str(_num_positions(spec.model)),
        **dict(spec.environment),
    }
