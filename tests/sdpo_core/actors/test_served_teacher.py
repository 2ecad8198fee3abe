"""A served teacher on a Ray actor: the cell of one process, and a server that ends with its actor, in whatever way."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from sdpo_core.actors.ray_workers import RemoteTeacher, ray_workers
from sdpo_core.errors import CellError
from sdpo_core.journal import Journal
from sdpo_core.specs import CellSpec
from tests.sdpo_core.micro import Base, make_cell, make_spec, plain_workers
from tests.sdpo_core.teacher.serving import TOLERANCE, largest_change, running, scorer_of, served_spec
from tests.sdpo_core.test_cell import result

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def server_of(teacher: RemoteTeacher) -> list[psutil.Process]:
    pids = teacher.processes.call(lambda worker: [process.pid for process in scorer_of(worker).server.processes()])
    return [psutil.Process(pid) for pid in pids]


def test_cell_on_actors_has_a_server_that_ends_with_its_actor(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    plain = make_spec(cell_spec, arm="sdpo-ema", training={"steps": 2})
    spec = served_spec(plain)
    scratch = tmp_path / "scratch"
    with ray_workers(spec, folder=base.folder, gpus=0, scratch=scratch) as workers:
        teacher = workers.teacher
        assert isinstance(teacher, RemoteTeacher)
        processes = server_of(teacher)
        assert len(processes) >= 4
        journal = Journal(tmp_path / "ray")
        make_cell(spec, journal=journal, workers=workers, text=base.text).run()
        assert server_of(teacher) == processes
        # As Ray ends an actor, too.
        os.kill(teacher.facts().pid, signal.SIGKILL)
        with pytest.raises(CellError, match="expected a living worker"):
            teacher.facts()
        assert running(processes) == []
    # The weights of the last commit are gone, the log is not.
    assert [path.name for path in (scratch / "teacher").iterdir()] == ["server.log"]
    alone = Journal(tmp_path / "plain")
    make_cell(plain, journal=alone, workers=plain_workers(plain, folder=base.folder), text=base.text).run()
    change, where = largest_change(journal, alone)
    assert change <= TOLERANCE, where
    pids = {facts["pid"] for facts in result(journal)["workers"].values()}
    assert len({*pids, os.getpid()}) == 3
