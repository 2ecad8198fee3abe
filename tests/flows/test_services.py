"""Services on real processes: private ones end with their owner, persistent ones are started and ended as a set."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from flows.processes import REPOSITORY, ProcessIdentity, answers, end, free_ports, spawn
from flows.services import ServicesSpec, down, mlflow_uri, private, running, status, up
from sdpo_core.errors import SpecError

FLOW = """
from pathlib import Path
from prefect import flow

@flow(name="sdpo-matrix")
def stub(text: str = "default"):
    import os
    from flows.services import running
    services = running(Path(os.environ["SDPO_HOME"]))
    Path(os.environ["SDPO_HOME"], "seen.txt").write_text(f"{text} {services.ray.endpoint().address} {os.getcwd()}")
"""

DEPLOYMENT = """
pull:
  - prefect.deployments.steps.set_working_directory:
      directory: "{{{{ $SDPO_ROOT }}}}"
deployments:
  - name: matrix
    entrypoint: {flow}:stub
    work_pool: {{name: sdpo}}
"""

# An owner as `sdpo run` is one: it holds private services and says which processes they are.
OWNER = """
import json, sys, time
from pathlib import Path
import psutil
from flows.services import private

with private(Path(sys.argv[1]), need_ray=True) as services:
    services.ray.endpoint()
    print(json.dumps([[p.pid, p.create_time()] for p in psutil.Process().children(recursive=True)]), flush=True)
    time.sleep(600)
"""

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""

# What a crashed service leaves: a process without its parent, in a session of its own.
CRASHED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
sys.exit(3)
"""


def test_private_services_are_up_in_the_block_and_gone_after_it(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with private(tmp_path, need_ray=True, num_cpus=1) as services:
        assert answers(f"{services.prefect_api_url}/health")
        endpoint = services.ray.endpoint()
        token = endpoint.token_path.read_text()
        assert answers(f"{endpoint.address}/api/jobs/", token=token)
        assert not answers(f"{endpoint.address}/api/jobs/")
        assert endpoint.token_path.stat().st_mode & 0o777 == 0o600
        assert services.mlflow_uri == f"sqlite:///{tmp_path}/tracking/mlflow.db"
        ours = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        assert any("gcs_server" in process.name() for process in ours)
    assert [process for process in ours if process.is_running()] == []
    assert running(tmp_path) is None


def test_private_services_end_with_an_owner_that_is_killed_and_leave_a_second_run_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with (
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner,
        private(tmp_path) as second,
    ):
        assert owner.stdout is not None
        ours = [ProcessIdentity(pid=pid, created=created) for pid, created in json.loads(owner.stdout.readline())]
        assert len(ours) > 10
        owner.kill()
        assert _ended(ours, seconds=10)
        assert answers(f"{second.prefect_api_url}/health")


def test_guard_kills_what_ignores_sigterm_and_hides_in_another_session(tmp_path: Path) -> None:
    log = tmp_path / "stubborn.log"
    guard = spawn([sys.executable, "-c", STUBBORN], log=log, environment=os.environ, owner=os.getpid())
    deadline = time.monotonic() + 20
    while "ready" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    ours = [ProcessIdentity.of(process.pid) for process in psutil.Process(guard.pid).children(recursive=True)]
    assert len(ours) == 2
    end([guard])
    assert _ended(ours, seconds=1)


def test_guard_ends_the_orphans_of_a_service_that_crashed(tmp_path: Path) -> None:
    log, owned = tmp_path / "crashed.log", tmp_path / "owned"
    owned.mkdir()
    command = [sys.executable, "-c", CRASHED]
    guard = spawn(command, log=log, environment=os.environ, owner=os.getpid(), remove=owned)
    assert _ended([guard], seconds=20)
    assert not psutil.pid_exists(int(log.read_text()))
    assert not owned.exists()


def test_process_identity_differs_for_a_recycled_pid() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me.is_alive()
    assert not ProcessIdentity(pid=me.pid, created=me.created - 60).is_alive()


@pytest.fixture(scope="module")
def persistent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServicesSpec]]:
    """A home with services that are up, under a deployment whose flow only says what it sees."""
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "stub_flow.py").write_text(FLOW)
    (folder / "prefect.yaml").write_text(DEPLOYMENT.format(flow=folder / "stub_flow.py"))
    prefect, mlflow, ray = free_ports(3)
    spec = ServicesSpec(
        prefect_port=prefect, mlflow_port=mlflow, ray_port=ray, num_cpus=1, deployments=folder / "prefect.yaml"
    )
    up(home, spec=spec)
    yield home, spec
    down(home)


def test_up_starts_all_services_and_runs_use_them(persistent: tuple[Path, ServicesSpec]) -> None:
    home, spec = persistent
    records = status(home)
    assert [(record.name, record.state) for record in records] == [
        ("prefect", "up"),
        ("mlflow", "up"),
        ("ray", "up"),
        ("worker", "up"),
    ]
    assert (home / "services.json").stat().st_mode & 0o777 == 0o600
    assert [record.pid for record in up(home, spec=spec)] == [record.pid for record in records]
    with private(home, need_ray=True) as services:
        assert services.prefect_api_url == f"http://127.0.0.1:{spec.prefect_port}/api"
        assert services.mlflow_uri == f"http://127.0.0.1:{spec.mlflow_port}"
        assert services.ray.endpoint().address == f"http://127.0.0.1:{spec.ray_port}"
    assert running(home) is not None


def test_up_deploys_a_flow_that_finds_home_and_services(persistent: tuple[Path, ServicesSpec]) -> None:
    home, spec = persistent
    services = running(home)
    assert services is not None
    ran = _prefect("deployment", "run", "sdpo-matrix/matrix", "-p", "text=hello", environment=services.environment())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    deadline = time.monotonic() + 60
    while not (home / "seen.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (home / "seen.txt").read_text() == f"hello http://127.0.0.1:{spec.ray_port} {REPOSITORY}"


def test_up_refuses_a_port_in_use(persistent: tuple[Path, ServicesSpec], tmp_path: Path) -> None:
    _, spec = persistent
    with pytest.raises(SpecError, match=f"got port {spec.prefect_port}, which another program uses"):
        up(tmp_path, spec=spec)
    assert not any(record.pid for record in status(tmp_path))


def test_down_ends_what_up_started(persistent: tuple[Path, ServicesSpec]) -> None:
    """Runs last in this file: the fixture's services are gone after it."""
    home, _ = persistent
    guards = [psutil.Process(record.pid) for record in status(home) if record.pid is not None]
    ours = [ProcessIdentity.of(child.pid) for guard in guards for child in guard.children(recursive=True)]
    assert down(home) == ("prefect", "mlflow", "ray", "worker")
    assert _ended(ours, seconds=1)
    assert {record.state for record in status(home)} == {"down"}
    assert mlflow_uri(home).startswith("sqlite:///")
    assert down(home) == ()


def _ended(processes: list[ProcessIdentity], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(process.is_alive() for process in processes):
            return True
        time.sleep(0.1)
    return not any(process.is_alive() for process in processes)


def _prefect(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("prefect")), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )
