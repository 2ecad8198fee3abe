"""Where Ray puts the processes of a cell's workers: all on the driver's node, each rank on a GPU of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from sdpo_core.errors import SpecError

# Ray options of one actor.
Options = Mapping[str, Any]


@contextmanager
def placed(sizes: Mapping[str, int], *, gpus: int) -> Iterator[dict[str, list[Options]]]:
    """Options of every process of every worker, in order of ranks; `sizes` names the student first.

    Processes of one worker meet on the loopback interface, so they stay on the driver's node. Fractions of GPUs alone
    would let Ray put two ranks of a worker on one GPU: with several ranks, a placement group holds one bundle a GPU,
    and rank r of every worker gets an equal part of bundle r.

    Raises:
        SpecError: the cell has GPUs, but not one for each rank of its largest worker, or this node has not.
    """
    largest = max(sizes.values())
    if largest == 1:
        yield {name: [{"num_gpus": share}] for name, share in _shares(list(sizes), gpus=gpus).items()}
    elif gpus == 0:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        yield {name: [{"num_gpus": 0, "scheduling_strategy": here}] * size for name, size in sizes.items()}
    else:
        with _bundles(largest, gpus=gpus) as group:
            sharers = [sum(size > rank for size in sizes.values()) for rank in range(largest)]
            yield {
                name: [
                    {
                        "num_gpus": 1 / sharers[rank],
                        "scheduling_strategy": PlacementGroupSchedulingStrategy(
                            group, placement_group_bundle_index=rank
                        ),
                    }
                    for rank in range(size)
                ]
                for name, size in sizes.items()
            }


def _shares(names: list[str], *, gpus: int) -> dict[str, float]:
    """Workers of one process each have a part of one GPU; of two the student has one, the others the second."""
    student, *others = names
    own = {0: 0.0, 1: 1 / len(names), 2: 1.0}[gpus]
    rest = own if gpus < 2 else 1 / max(1, len(others))
    return {student: own, **dict.fromkeys(others, rest)}


@contextmanager
def _bundles(count: int, *, gpus: int) -> Iterator[PlacementGroup]:
    """A GPU of the driver's node a bundle."""
    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    present = next(node["Resources"].get("GPU", 0.0) for node in nodes if node["NodeID"] == here)
    for have, whose in ((gpus, "of the cell"), (int(present), "on this node")):
        if count > have:
            raise SpecError(
                f"layout: got a worker of {count} processes for {have} GPUs {whose}, expected at most one process a "
                "GPU. Choose a smaller layout in the profile, or more GPUs."
            )
    selector = {"ray.io/node-id": here}
    group = placement_group([{"GPU": 1}] * count, strategy="STRICT_PACK", bundle_label_selector=[selector] * count)
    try:
        yield group
    finally:
        remove_placement_group(group)
