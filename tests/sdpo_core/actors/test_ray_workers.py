"""Workers on real Ray actors: processes of their own, the numbers of plain workers, errors that come through."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file
from torch import Tensor

from sdpo_core.actors.ray_workers import RemoteTeacher, ray_workers
from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.hf_model import WEIGHTS_FILE
from sdpo_core.cell import Workers
from sdpo_core.checkpoint import checkpoint_folder
from sdpo_core.errors import CellError, DataError, SpecError
from sdpo_core.journal import Journal
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.base import HasWeights
from tests.sdpo_core.micro import ARMS, MAX_POSITIONS, Base, load_model, make_cell, make_spec, plain_workers
from tests.sdpo_core.test_cell import numbers, result


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """A Ray of this module's own."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class RecordingTeacher(RemoteTeacher):
    """Keeps the student's weights at every commit."""

    def __init__(self, teacher: RemoteTeacher) -> None:
        super().__init__(teacher._actor, follows=teacher._follows)
        self.seen: list[dict[str, Tensor]] = []

    def follow(self, student: HasWeights) -> bool:
        self.seen.append(student.weights())
        return super().follow(student)


def run(spec: CellSpec, folder: Path, *, base: Base, workers: Workers) -> Journal:
    journal = Journal(folder)
    make_cell(spec, journal=journal, workers=workers, text=base.text).run()
    return journal


@pytest.mark.parametrize("arm", ARMS)
def test_cell_on_actors_equals_the_cell_in_one_process(
    cell_spec: CellSpec, base: Base, tmp_path: Path, arm: str
) -> None:
    """Two steps on a student's and a teacher's process, and the same in this one: every number but time is equal."""
    spec = make_spec(cell_spec, arm=arm, training={"steps": 2})
    with ray_workers(spec, folder=base.folder, gpus=0) as (student, remote):
        teacher = None if remote is None else RecordingTeacher(remote)
        journal = run(spec, tmp_path / "ray", base=base, workers=Workers(student=student, teacher=teacher))
    plain = run(spec, tmp_path / "plain", base=base, workers=plain_workers(spec, folder=base.folder))
    assert numbers(journal) == numbers(plain)
    assert journal.read_samples() == plain.read_samples()
    found, expected = result(journal)["workers"], result(plain)["workers"]
    pids = {os.getpid(), *(facts.pop("pid") for facts in found.values())}
    assert len(pids) == (2 if arm == "grpo" else 3)
    assert {facts.pop("pid") for facts in expected.values()} == {os.getpid()}
    assert found == expected
    assert found["student"]["weights_sha256_end"] != found["student"]["weights_sha256_start"]
    if arm == "sdpo-static":
        assert found["teacher"]["weights_sha256_end"] == found["student"]["weights_sha256_start"]
    if arm == "sdpo-ema":
        assert teacher is not None
        weights = {name: value.double() for name, value in load_model(base.folder).weights().items()}
        for step in teacher.seen:
            weights = {name: 0.75 * value + 0.25 * step[name].double() for name, value in weights.items()}
        assert len(teacher.seen) == 2
        committed = load_file(checkpoint_folder(journal, 2) / "teacher" / WEIGHTS_FILE)
        for name, value in weights.items():
            torch.testing.assert_close(committed[name].double(), value, rtol=1e-6, atol=1e-7, msg=name)


def test_errors_come_through_and_a_dead_worker_is_named(cell_spec: CellSpec, base: Base) -> None:
    spec = make_spec(cell_spec, arm="grpo")
    row = TokenRow(prompt_ids=(1, 2), response_ids=(3,))
    with ray_workers(spec, folder=base.folder, gpus=0) as (student, teacher):
        assert teacher is None
        with pytest.raises(DataError, match=f"expected at most {MAX_POSITIONS}"):
            student.score([TokenRow(prompt_ids=(1,) * 300, response_ids=(1,))], top_k=0)
        with pytest.raises(SpecError, match="got k 300"):
            student.score([row], top_k=300)
        os.kill(student.facts().pid, signal.SIGKILL)
        with pytest.raises(CellError, match="expected a living worker") as caught:
            student.score([row], top_k=0)
    assert "\n" not in str(caught.value)


def test_worker_that_cannot_start_says_why(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """The reason is the worker's own, not only that it died."""
    spec = make_spec(cell_spec, arm="grpo").model_copy(update={"backend": "nonesuch"})
    with ray_workers(spec, folder=base.folder, gpus=0) as (student, _), pytest.raises(SpecError, match="nonesuch"):
        student.facts()
    with (
        ray_workers(make_spec(cell_spec, arm="grpo"), folder=tmp_path, gpus=0) as (student, _),
        pytest.raises(DataError, match=f"got no tokenizer_config.json in {tmp_path}"),
    ):
        student.facts()
