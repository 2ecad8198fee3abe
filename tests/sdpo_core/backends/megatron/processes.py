"""Runs a function by name in several processes that form a gloo group, shapes checked there as in the tests themselves.

The name, not the function: each process puts the shape checker in place before it imports anything of ours.
"""

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import install_import_hook
from torch.multiprocessing.spawn import spawn

from tests.sdpo_core.objectives.processes import join_group

ROOT = Path(__file__).resolve().parents[4]
OPTION = "--jaxtyping-packages="


def run_in_processes(work: str, *, size: int, folder: Path) -> Any:
    """What process 0 of `size` answers to `work(folder)`, a function named `module:function`; as JSON.

    What a process raises, the caller raises, with its traceback.
    """
    place = folder / f"{work.rsplit(':', 1)[1]}-{size}"
    place.mkdir()
    spawn(_start, args=(work, size, str(place)), nprocs=size)
    return json.loads((place / "answer.json").read_text())


def _start(rank: int, work: str, size: int, folder: str) -> None:
    join_group(rank, lambda _: _answer(work, Path(folder)), size, str(Path(folder) / "store"))


def _answer(work: str, folder: Path) -> None:
    torch.use_deterministic_algorithms(mode=True)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    checked = next(option.removeprefix(OPTION) for option in options if option.startswith(OPTION))
    package, checker = checked.split(",", 1)
    with install_import_hook(package, checker):
        module, name = work.split(":")
        answer = getattr(importlib.import_module(module), name)(folder)
    if dist.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(answer))
