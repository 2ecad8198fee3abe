"""The groups of a layout: formed once, by as many processes as it names."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")

from megatron.core import parallel_state
from torch.distributed import HashStore  # type: ignore[attr-defined]

from sdpo_core.backends.megatron.groups import initialise
from sdpo_core.errors import SpecError
from sdpo_core.layout import LayoutSpec
from tests.sdpo_core.backends.megatron.processes import run_in_processes

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No group before a test, and none after it."""
    yield
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_process_alone_gets_a_group_of_its_own() -> None:
    groups = initialise(LayoutSpec(), device=CPU)
    assert [group.size() for group in (groups.tensor, groups.context, groups.data, groups.shared_weights)] == [1] * 4
    assert initialise(LayoutSpec(recompute=True), device=CPU).tensor.size() == 1


def test_other_number_of_processes_is_refused() -> None:
    with pytest.raises(SpecError, match=r"got 1 processes, expected 4 \(tensor 2 x context 2 x data 1\)"):
        initialise(LayoutSpec(tensor=2, context=2), device=CPU)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(SpecError, match="got 1 processes, expected 2"):
        initialise(LayoutSpec(data=2), device=CPU)


def test_second_layout_of_the_same_processes_is_refused(tmp_path: Path) -> None:
    message = run_in_processes(f"{__name__}:form_two_layouts", size=2, folder=tmp_path)
    assert "got processes that form tensor 2 x context 1, expected tensor 1 x context 2" in message


def form_two_layouts(_: Path) -> str:
    initialise(LayoutSpec(tensor=2), device=CPU)
    try:
        initialise(LayoutSpec(context=2), device=CPU)
    except SpecError as error:
        return str(error)
    return "nothing was refused"
