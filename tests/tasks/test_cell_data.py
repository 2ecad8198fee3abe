"""What a cell's result says of where it ran."""

import torch

from sdpo_core.specs import CellSpec, SglangSpec
from tasks.cell_data import environment


def test_environment_names_versions_threads_and_how_far_rollouts_repeat(cell_spec: CellSpec) -> None:
    spec = cell_spec.model_copy(update={"engine": "sglang", "sglang": SglangSpec(), "threads_per_worker": 3})
    found = environment(spec, gpus=0)
    assert (found["threads"], found["torch"], found["rollouts"]) == (3, torch.__version__, "up to rounding")
    assert environment(spec, gpus=2)["rollouts"] == "not repeatable"
