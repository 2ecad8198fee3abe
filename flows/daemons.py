"""The persistent services as `services.json` under the home folder knows them, and whether they still answer.

A daemon is recognised by its process id and start time: an id that has passed to another program is never touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.launch import ray_token_path
from flows.processes import ProcessIdentity, answers
from sdpo_core.journal import read_json, write_json

ServiceName = Literal["prefect", "mlflow", "ray", "worker"]
NAMES: tuple[ServiceName, ...] = ("prefect", "mlflow", "ray", "worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Daemon:
    """A persistent service; `url` is empty for one without a page."""

    name: ServiceName
    url: str
    process: ProcessIdentity

    def answers(self, home: Path) -> bool:
        return self.process.is_alive() and service_answers(self.name, url=self.url, home=home)


def service_answers(name: ServiceName, *, url: str, home: Path) -> bool:
    """True when the service at `url` is ready to be used. A worker only polls: being alive is all it can show."""
    match name:
        case "prefect":
            return answers(f"{url}/api/health")
        case "mlflow":
            return answers(f"{url}/health")
        case "ray":
            return answers(f"{url}/api/jobs/", token=ray_token_path(home).read_text(encoding="ascii"))
        case "worker":
            return True


def answering(home: Path) -> dict[ServiceName, Daemon]:
    """The daemons that are ready."""
    return {name: daemon for name, daemon in read_daemons(home).items() if daemon.answers(home)}


def services_path(home: Path) -> Path:
    """The file that says which daemons there are."""
    return home / "services.json"


def read_daemons(home: Path) -> dict[ServiceName, Daemon]:
    """The daemons that were started and not ended; they may have died since."""
    path = services_path(home)
    if not path.exists():
        return {}
    rows = read_json(path)
    return {
        name: Daemon(
            name=name,
            url=rows[name]["url"],
            process=ProcessIdentity(pid=rows[name]["pid"], created=rows[name]["created"]),
        )
        for name in NAMES
        if name in rows
    }


def write_daemons(home: Path, daemons: Mapping[ServiceName, Daemon]) -> None:
    """Replace `services.json`; only its owner can read it."""
    rows: dict[str, Any] = {
        name: {"url": daemon.url, "pid": daemon.process.pid, "created": daemon.process.created}
        for name, daemon in daemons.items()
    }
    write_json(services_path(home), rows)
    services_path(home).chmod(0o600)
