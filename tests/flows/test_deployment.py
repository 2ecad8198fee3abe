"""The shipped deployment: a flow run started through Prefect trains a small selection; a bad parameter starts none."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from flows.processes import REPOSITORY, free_ports
from flows.services import ServicesSpec, down, status, up
from tests.flows.store import results

PREFECT = str(Path(sys.executable).with_name("prefect"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Persistent:
    """Services that are up, the folder the deployed flow works in, and the environment that leads to them."""

    home: Path
    folder: Path
    environment: dict[str, str]

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PREFECT, *arguments], env=self.environment, capture_output=True, text=True, check=False, timeout=240
        )


@pytest.fixture(scope="module")
def persistent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Persistent]:
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("folder")
    # The shipped file, but for the folder it works in: a test writes no page into the checkout.
    text = (REPOSITORY / "prefect.yaml").read_text()
    for shipped, here in (
        ("{{ $SDPO_ROOT }}", str(folder)),
        ("flows/sdpo_matrix.py:", f"{REPOSITORY}/flows/sdpo_matrix.py:"),
    ):
        assert text.count(shipped) == 1
        text = text.replace(shipped, here)
    (folder / "prefect.yaml").write_text(text)
    prefect, mlflow, ray = free_ports(3)
    ports = {"prefect_port": prefect, "mlflow_port": mlflow, "ray_port": ray}
    up(home, spec=ServicesSpec(**ports, num_cpus=1, deployments=folder / "prefect.yaml"))
    # All that the README asks of a user.
    api = {"PREFECT_API_URL": f"http://127.0.0.1:{prefect}/api"}
    yield Persistent(home=home, folder=folder, environment={**os.environ, **api})
    down(home)


@pytest.mark.parametrize(
    ("parameter", "part"),
    [
        ("experiment=nope", "nope"),
        ('arms=["dpo"]', "dpo"),
        ('datasets=["spelling"]', "spelling"),
        ("seeds=42", "42"),
        ("profile=huge", "huge"),
    ],
)
def test_bad_parameter_is_refused_before_a_run_exists(persistent: Persistent, parameter: str, part: str) -> None:
    good = () if parameter.startswith("experiment") else ("-p", "experiment=e000")
    ran = persistent.prefect("deployment", "run", "sdpo-matrix/matrix", *good, "-p", parameter)
    assert ran.returncode == 1
    assert part in ran.stdout + ran.stderr
    listed = persistent.prefect("flow-run", "ls", "-o", "json")
    assert listed.stdout.strip() == "[]", listed.stdout + listed.stderr


def test_deployment_trains_a_selection_and_down_leaves_no_process(persistent: Persistent) -> None:
    selection = ("-p", "experiment=e000", "-p", 'datasets=["spell_backward"]', "-p", 'arms=["grpo"]')
    ran = persistent.prefect("deployment", "run", "sdpo-matrix/matrix", *selection, "--watch")
    assert ran.returncode == 0, ran.stdout + ran.stderr + (persistent.home / "logs" / "worker.log").read_text()
    assert list(results(persistent.home)) == ["spell_backward/grpo/42"]
    assert "1 done" in (persistent.folder / "results" / "e000" / "results.md").read_text()
    guards = [psutil.Process(record.pid) for record in status(persistent.home) if record.pid is not None]
    tree = [*guards, *(child for guard in guards for child in guard.children(recursive=True))]
    assert len(guards) == 4
    down(persistent.home)
    assert psutil.wait_procs(tree, timeout=5)[1] == []
