"""The services a run needs: Prefect server, Ray head, MLflow. Persistent (`up`, `down`, `status`) or private to a run.

A run uses the persistent ones that answer and starts the rest for itself; what it started ends with it, also when it
is killed. Without a server, MLflow's store is written to directly. Start-up on 2 cores: Prefect 5 to 10 s, Ray 6 to
20 s, MLflow 6 to 9 s, all at once.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.daemons import (
    NAMES,
    Daemon,
    ServiceName,
    answering,
    read_daemons,
    service_answers,
    services_path,
    write_daemons,
)
from flows.launch import (
    HOST,
    deploy,
    log_path,
    quiet_environment,
    ray_authentication,
    ray_token_path,
    start_mlflow,
    start_prefect,
    start_ray,
    start_worker,
    tracking_file,
)
from flows.processes import REPOSITORY, ProcessIdentity, end, free_ports, require_free_port, wait_until_ready
from sdpo_core.errors import SpecError

ServiceState = Literal["up", "not answering", "down"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicesSpec:
    """The persistent services. `num_cpus` is what Ray hands out (None: the cores of this machine)."""

    prefect_port: int = 4200
    mlflow_port: int = 5000
    ray_port: int = 8265
    num_cpus: int | None = None
    deployments: Path = REPOSITORY / "prefect.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceRecord:
    """A line of `sdpo status`. `url` is for a browser and empty for a service without a page."""

    name: ServiceName
    state: ServiceState
    url: str
    pid: int | None
    log: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEndpoint:
    """Where Ray's Jobs API answers, and the file of the token it asks for."""

    address: str
    token_path: Path


class RayHead:
    """A Ray head that may not be needed: `start` returns at once, `endpoint` waits. Safe from several threads."""

    def __init__(self, home: Path, *, address: str | None = None, num_cpus: int | None = None) -> None:
        self._home = home
        self._address = address
        self._num_cpus = num_cpus
        self._process: ProcessIdentity | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to start a private head, unless there is one already."""
        with self._lock:
            if self._address is None:
                (port,) = free_ports(1)
                self._process = start_ray(self._home, port=port, owner=os.getpid(), num_cpus=self._num_cpus)
                self._address = f"http://{HOST}:{port}"

    def endpoint(self) -> RayEndpoint:
        """Wait until jobs can be submitted; SpecError when the head does not come up."""
        self.start()
        address = self._address
        assert address is not None
        if self._process is not None:
            wait_until_ready(
                lambda: service_answers("ray", url=address, home=self._home),
                service="ray",
                process=self._process,
                log=log_path(self._home, "ray"),
            )
        return RayEndpoint(address=address, token_path=ray_token_path(self._home))

    def close(self) -> None:
        """End the head if it is private; its jobs end with it."""
        with self._lock:
            if self._process is not None:
                end([self._process])
                self._process = self._address = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What a run talks to."""

    home: Path
    prefect_api_url: str
    mlflow_uri: str
    ray: RayHead

    def environment(self) -> dict[str, str]:
        """Variables that lead Prefect, MLflow and our own code here; to be set before `prefect` is imported."""
        return {
            **quiet_environment(),
            "SDPO_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": self.prefect_api_url,
            "MLFLOW_TRACKING_URI": self.mlflow_uri,
            # Our own lines of progress on the page of the flow run.
            "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,tasks",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        }


def mlflow_uri(home: Path) -> str:
    """The MLflow server if it answers, else the store's file."""
    server = answering(home.absolute()).get("mlflow")
    return tracking_file(home.absolute()) if server is None else server.url


@contextmanager
def ray_head(home: Path, *, num_cpus: int | None = None) -> Iterator[RayHead]:
    """The persistent Ray head, or one that is started when asked for and ends with the block."""
    home = home.absolute()
    persistent = answering(home).get("ray")
    head = RayHead(home, address=None if persistent is None else persistent.url, num_cpus=num_cpus)
    try:
        yield head
    finally:
        head.close()


@contextmanager
def private(home: Path, *, need_ray: bool = False, num_cpus: int | None = None) -> Iterator[Services]:
    """The services that are up, and private ones for the rest until the block ends.

    `need_ray` begins to start Ray at once, beside Prefect; else `services.ray.start()` does, whenever it is known.
    """
    home = home.absolute()
    persistent = answering(home).get("prefect")
    with ray_head(home, num_cpus=num_cpus) as ray:
        if need_ray:
            ray.start()
        with _prefect(home, url=None if persistent is None else persistent.url) as url:
            yield Services(home=home, prefect_api_url=f"{url}/api", mlflow_uri=mlflow_uri(home), ray=ray)


def running(home: Path) -> Services | None:
    """The persistent services, when all of them answer."""
    home = home.absolute()
    daemons = answering(home)
    if not daemons.keys() >= {"prefect", "mlflow", "ray"}:
        return None
    return _services(home, daemons)


def up(home: Path, *, spec: ServicesSpec | None = None) -> tuple[ServiceRecord, ...]:
    """Start what is not up yet as daemons, deploy the flow, start a worker. SpecError leaves nothing half started."""
    home = home.absolute()
    spec = ServicesSpec() if spec is None else spec
    daemons = {name: daemon for name, daemon in read_daemons(home).items() if daemon.process.is_alive()}
    started: list[ProcessIdentity] = []
    try:
        ports: dict[ServiceName, int] = {
            "prefect": spec.prefect_port,
            "mlflow": spec.mlflow_port,
            "ray": spec.ray_port,
        }
        for name, port in ports.items():
            if name not in daemons:
                daemons[name] = _start(home, name=name, port=port, num_cpus=spec.num_cpus)
                started.append(daemons[name].process)
                write_daemons(home, daemons)
        for daemon in daemons.values():
            _wait(home, daemon)
        environment = {**_services(home, daemons).environment(), **ray_authentication(home)}
        deploy(home, file=spec.deployments, environment=environment)
        if "worker" not in daemons:
            process = start_worker(home, environment=environment)
            started.append(process)
            daemons["worker"] = Daemon(name="worker", url="", process=process)
            write_daemons(home, daemons)
    except BaseException:
        end(started)
        write_daemons(home, {name: daemon for name, daemon in daemons.items() if daemon.process not in started})
        raise
    return status(home)


def down(home: Path) -> tuple[ServiceName, ...]:
    """End the daemons `up` started, and nothing else; their names."""
    home = home.absolute()
    alive = {name: daemon for name, daemon in read_daemons(home).items() if daemon.process.is_alive()}
    # The worker first: its flows still need the others to say that they were ended.
    end([daemon.process for name, daemon in alive.items() if name == "worker"])
    end([daemon.process for name, daemon in alive.items() if name != "worker"])
    services_path(home).unlink(missing_ok=True)
    return tuple(alive)


def status(home: Path) -> tuple[ServiceRecord, ...]:
    """One record a service, for people."""
    home = home.absolute()
    daemons = read_daemons(home)
    return tuple(_record(home, name=name, daemon=daemons.get(name)) for name in NAMES)


def _record(home: Path, *, name: ServiceName, daemon: Daemon | None) -> ServiceRecord:
    log = log_path(home, name)
    if daemon is None or not daemon.process.is_alive():
        return ServiceRecord(name=name, state="down", url="", pid=None, log=log)
    state: ServiceState = "up" if daemon.answers(home) else "not answering"
    return ServiceRecord(name=name, state=state, url=daemon.url, pid=daemon.process.pid, log=log)


def _services(home: Path, daemons: Mapping[ServiceName, Daemon]) -> Services:
    return Services(
        home=home,
        prefect_api_url=f"{daemons['prefect'].url}/api",
        mlflow_uri=daemons["mlflow"].url,
        ray=RayHead(home, address=daemons["ray"].url),
    )


@contextmanager
def _prefect(home: Path, *, url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    (port,) = free_ports(1)
    process = start_prefect(home, port=port, owner=os.getpid())
    try:
        daemon = Daemon(name="prefect", url=f"http://{HOST}:{port}", process=process)
        _wait(home, daemon)
        yield daemon.url
    finally:
        end([process])


def _start(home: Path, *, name: ServiceName, port: int, num_cpus: int | None) -> Daemon:
    require_free_port(port, service=name)
    match name:
        case "prefect":
            process = start_prefect(home, port=port, owner=0)
        case "mlflow":
            process = start_mlflow(home, port=port)
        case "ray":
            process = start_ray(home, port=port, owner=0, num_cpus=num_cpus)
        case "worker":
            raise SpecError("worker: got a port, expected none.")
    return Daemon(name=name, url=f"http://{HOST}:{port}", process=process)


def _wait(home: Path, daemon: Daemon) -> None:
    wait_until_ready(
        lambda: service_answers(daemon.name, url=daemon.url, home=home),
        service=daemon.name,
        process=daemon.process,
        log=log_path(home, daemon.name),
    )
