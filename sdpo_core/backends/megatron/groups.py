"""The groups of processes that hold a model, made once from the processes that are there."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from sdpo_core.backends.megatron.compat import install
from sdpo_core.errors import SpecError
from sdpo_core.layout import LayoutSpec
from sdpo_core.rendezvous import TIMEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Each process is in one group of each kind; `shared_weights` holds those whose gradients are added up.

    `tensor`: one share each of a layer and the vocabulary. `context`: one share each of a sequence's positions. `data`:
    other rows. `shared_weights`: `data` x `context`, all with the same share of the weights.
    """

    tensor: ProcessGroup
    context: ProcessGroup
    data: ProcessGroup
    shared_weights: ProcessGroup


def initialise(layout: LayoutSpec, *, device: torch.device) -> Groups:
    """The groups of a layout, which all processes of the world form; made by the first call, found by later ones.

    A process alone needs no world: it gets one of its own. Neighbours in rank order share a layer.

    Raises:
        SpecError: there are more or fewer processes; they form another layout already.
    """
    install()
    if not dist.is_initialized() and layout.size == 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    found = dist.get_world_size() if dist.is_initialized() else 1
    if found != layout.size:
        raise SpecError(
            f"megatron: got {found} processes, expected {layout.size} (tensor {layout.tensor} x context "
            f"{layout.context} x data {layout.data}). Start as many as the layout names."
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor, context_parallel_size=layout.context
        )
    formed = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size())
    if formed != (layout.tensor, layout.context):
        raise SpecError(
            f"megatron: got processes that form tensor {formed[0]} x context {formed[1]}, expected tensor "
            f"{layout.tensor} x context {layout.context}. Models of two layouts live in processes of their own."
        )
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        shared_weights=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
