"""How each service is started: its command line, its environment, its files under the home folder."""

import fcntl
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flows.processes import (
    REPOSITORY,
    ProcessIdentity,
    free_ports,
    inherited_environment,
    run_command,
    spawn,
)
from sdpo_core.errors import SpecError

HOST = "127.0.0.1"
POOL = "sdpo"
# Cells exchange file names and numbers, no arrays: the store only has to exist.
OBJECT_STORE_BYTES = 200 * 1024**2
# A Unix socket's path holds at most 107 bytes, and Ray adds up to 66 to its folder's.
RAY_FOLDER_BYTES = 40


def quiet_environment() -> dict[str, str]:
    """Settings that keep every part offline, silent about its use, and quick to say that a server is gone."""
    return {
        # Prefect takes 1, true and yes; MLflow takes nothing but "true".
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SCHEDULER_EVENTS": "0",
        # All cells of a matrix are queued at once; by default Ray fails a job that waits for more than 15 minutes.
        "RAY_JOB_START_TIMEOUT_SECONDS": str(365 * 24 * 3600),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The default of 7 tries blocks for 4 minutes.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }


def service_environment(home: Path) -> dict[str, str]:
    """What every process of ours sees: quiet, and all its files under `home`."""
    return {
        **inherited_environment(),
        **quiet_environment(),
        "SDPO_HOME": str(home),
        "PREFECT_HOME": str(home / "prefect"),
    }


def program(name: str) -> str:
    """A console script of this Python environment."""
    return str(Path(sys.executable).with_name(name))


def log_path(home: Path, service: str) -> Path:
    """Where a service's output goes."""
    return home / "logs" / f"{service}.log"


def tracking_file(home: Path) -> str:
    """The MLflow store as a URI that needs no server."""
    return f"sqlite:///{home / 'tracking' / 'mlflow.db'}"


def start_prefect(home: Path, *, port: int, owner: int) -> ProcessIdentity:
    """A Prefect server on its database under `home`.

    Two servers on one database disturb each other, so it is locked. A private server (one with an owner) that finds
    it taken keeps its flow runs in a database of its own and in memory: losing them loses no result.
    """
    folder = home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    api = f"http://{HOST}:{port}/api"
    environment = {**service_environment(home), "PREFECT_API_URL": api, "PREFECT_UI_API_URL": api}
    with (folder / "database.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if owner == 0:
                raise SpecError(
                    f"prefect: got {folder} in use by another Prefect server, expected a free one. "
                    "Wait for the running `sdpo run` to end."
                ) from None
            database = "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true&check_same_thread=false"
            environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
        return spawn(
            [program("prefect"), "server", "start", "--host", HOST, "--port", str(port)],
            log=log_path(home, "prefect"),
            environment=environment,
            owner=owner,
            hold=lock.fileno(),
        )


def start_ray(home: Path, *, port: int, owner: int, num_cpus: int | None) -> ProcessIdentity:
    """A Ray head with token authentication. `port` is the dashboard's (the Jobs API); all others are free ones.

    Only the dashboard can be bound to loopback; Ray's own ports listen everywhere, so the token is the guard.
    """
    gcs, agent, client, metrics = free_ports(4)
    folder = _ray_folder()
    cpus = () if num_cpus is None else (f"--num-cpus={num_cpus}",)
    return spawn(
        [
            *(program("ray"), "start", "--head", "--block", "--disable-usage-stats"),
            *(f"--temp-dir={folder}", f"--object-store-memory={OBJECT_STORE_BYTES}", *cpus),
            *(f"--port={gcs}", f"--dashboard-host={HOST}", f"--dashboard-port={port}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
            # 0 lets the system choose: with the default range Ray refuses any port of ours that lies in it.
            *(f"--metrics-export-port={metrics}", "--min-worker-port=0", "--max-worker-port=0"),
        ],
        log=log_path(home, "ray"),
        environment={**service_environment(home), **ray_authentication(home)},
        owner=owner,
        remove=folder,
    )


def start_mlflow(home: Path, *, port: int) -> ProcessIdentity:
    """An MLflow server (a daemon). Artifacts keep file paths, so that they open with and without the server."""
    artifacts = home / "tracking" / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    return spawn(
        [
            *(program("mlflow"), "server", "--host", HOST, "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", tracking_file(home)),
            *("--default-artifact-root", artifacts.as_uri(), "--no-serve-artifacts"),
        ],
        log=log_path(home, "mlflow"),
        # Its job runner adds eight processes, 1.3 GB and 15 s for features nobody uses here.
        environment={**service_environment(home), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        owner=0,
    )


def start_worker(home: Path, *, environment: Mapping[str, str]) -> ProcessIdentity:
    """A worker (a daemon) that runs deployed flows in processes of their own."""
    return spawn(
        [program("prefect"), "worker", "start", "--pool", POOL, "--type", "process", "--name", "sdpo"],
        log=log_path(home, "worker"),
        environment={**service_environment(home), **environment},
        owner=0,
    )


def deploy(home: Path, *, file: Path, environment: Mapping[str, str]) -> None:
    """Create the work pool and the deployments of `file` (a `prefect.yaml`); both may be there already."""
    settings = {**service_environment(home), **environment, "SDPO_ROOT": str(REPOSITORY)}
    prefect = (program("prefect"), "--no-prompt")
    pool = (*prefect, "work-pool", "create", POOL, "--type", "process", "--overwrite")
    run_command(pool, what="work pool", environment=settings)
    run_command((*prefect, "deploy", "--all", "--prefect-file", str(file)), what=str(file), environment=settings)


def ray_authentication(home: Path) -> dict[str, str]:
    """Settings that make Ray ask for, and Ray's clients show, the token of `home`."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(ray_token_path(home))}


def ray_token_path(home: Path) -> Path:
    """The file of Ray's token, made on first use; only its owner can read it."""
    path = home / "ray" / "token"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


def _ray_folder() -> Path:
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) + len("/ray-12345678") <= RAY_FOLDER_BYTES else "/tmp"
    return Path(tempfile.mkdtemp(prefix="ray-", dir=short))
