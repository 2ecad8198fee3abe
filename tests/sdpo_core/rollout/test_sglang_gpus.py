"""Where the servers of a student on GPUs start, on a machine without any."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from sdpo_core.errors import CellError
from sdpo_core.rollout.sglang import load_engine
from sdpo_core.rollout.sglang_servers import gpu_environment, visible_gpus
from sdpo_core.specs import CellSpec, SglangSpec
from tests.sdpo_core.backends.megatron.processes import run_in_processes
from tests.sdpo_core.micro import Base, make_spec
from tests.sdpo_core.rollout.test_sglang import make_policy


def test_servers_take_turns_on_the_gpus() -> None:
    assert [gpu_environment(index, gpus=("3", "GPU-a")) for index in range(3)] == [
        (("CUDA_VISIBLE_DEVICES", "3"),),
        (("CUDA_VISIBLE_DEVICES", "GPU-a"),),
        (("CUDA_VISIBLE_DEVICES", "3"),),
    ]
    assert gpu_environment(1, gpus=()) == ()


@pytest.mark.sglang
def test_gpus_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in_processes(f"{__name__}:see_gpus", size=2, folder=tmp_path) == [["5", "6"], []]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert visible_gpus(None) == ("7",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(None) == ()


def see_gpus(_folder: Path) -> list[tuple[str, ...]]:
    """Each restricted to its own, then one of them to none."""
    rank = dist.get_rank()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", str(5 + rank))
        seen.append(visible_gpus(dist.group.WORLD))
        if rank == 1:
            patch.delenv("CUDA_VISIBLE_DEVICES")
        seen.append(visible_gpus(dist.group.WORLD))
    return seen


FAKE_PYTHON = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >> "{lines}"
while [ "$(wc -l < "{lines}")" -lt 2 ]; do sleep 0.1; done
exit 1
"""


def test_servers_of_a_gpu_start_where_the_student_is(
    base: Base,
    cell_spec: CellSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of them beside a student of one process: what they would be started with, on a machine without a GPU.

    They are not deterministic there: with one seed for both, they would draw the same numbers.
    """
    lines, python = tmp_path / "lines", tmp_path / "python"
    lines.touch()
    python.write_text(FAKE_PYTHON.format(lines=lines))
    python.chmod(0o755)
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(python))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    sglang = SglangSpec(replicas=2, sleep=True, concurrency=100, memory_fraction=0.4)
    spec = make_spec(cell_spec).model_copy(update={"sglang": sglang})
    with pytest.raises(CellError, match="got an end before it was ready"):
        load_engine(spec, policy=make_policy(base), folder=base.folder, device="cuda")
    found = lines.read_text().splitlines()
    assert len(found) == 2
    for line in found:
        assert line.startswith("4 -m sdpo_sglang.serve ")
        for flags in (
            "--device cuda",
            "--enable-memory-saver",
            "--max-running-requests 100",
            "--mem-fraction-static 0.4",
        ):
            assert f" {flags}" in line
    assert len({re.findall(r" --random-seed (\d+) ", line)[0] for line in found}) == 2
