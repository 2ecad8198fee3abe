"""Where the processes of a cell go, on a Ray that only says it has GPUs."""

from collections.abc import Mapping
from typing import Any

import pytest
import ray

from sdpo_core.actors.placement import Options, placed
from sdpo_core.errors import SpecError

# Actors for which Ray finds no place wait for ever.
PLACED_SECONDS = 60.0


class Probe:
    """Says which GPUs Ray has given it, and on which node it is."""

    def gpus(self) -> list[int]:
        return [int(number) for number in ray.get_gpu_ids()]

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def start(places: Mapping[str, list[Options]]) -> dict[str, list[Any]]:
    return {
        name: [ray.remote(Probe).options(num_cpus=0, **place).remote() for place in ranks]
        for name, ranks in places.items()
    }


def test_placed_gives_each_rank_of_a_worker_its_own_gpu() -> None:
    """Rank r of every worker is on the same one; the GPUs are free afterwards."""
    for _ in range(2):
        with placed({"student": 2, "teacher": 2, "anchor": 1}, gpus=2) as places:
            probes = start(places)
            gpus = {
                name: ray.get([probe.gpus.remote() for probe in ranks], timeout=PLACED_SECONDS)
                for name, ranks in probes.items()
            }
        first, second = gpus["student"]
        assert sorted([*first, *second]) == [0, 1]
        assert gpus == {"student": [first, second], "teacher": [first, second], "anchor": [first]}


def test_placed_keeps_ranks_without_gpus_on_the_drivers_node() -> None:
    here = ray.get_runtime_context().get_node_id()
    with placed({"student": 3, "teacher": 1}, gpus=0) as places:
        assert {name: len(ranks) for name, ranks in places.items()} == {"student": 3, "teacher": 1}
        assert all(
            (place["num_gpus"], place["scheduling_strategy"].node_id, place["scheduling_strategy"].soft)
            == (0, here, False)
            for ranks in places.values()
            for place in ranks
        )
        probes = start(places)
        assert ray.get([probe.node.remote() for ranks in probes.values() for probe in ranks]) == [here] * 4
        assert ray.get([probe.gpus.remote() for ranks in probes.values() for probe in ranks]) == [[]] * 4


@pytest.mark.parametrize(
    ("gpus", "names", "shares"),
    [
        (0, ["student", "teacher"], [0.0, 0.0]),
        (1, ["student"], [1.0]),
        (1, ["student", "teacher"], [0.5, 0.5]),
        (1, ["student", "teacher", "anchor"], [1 / 3, 1 / 3, 1 / 3]),
        (2, ["student"], [1.0]),
        (2, ["student", "teacher"], [1.0, 1.0]),
        (2, ["student", "teacher", "anchor"], [1.0, 0.5, 0.5]),
    ],
)
def test_placed_shares_gpus_among_workers_of_one_process(gpus: int, names: list[str], shares: list[float]) -> None:
    with placed(dict.fromkeys(names, 1), gpus=gpus) as places:
        assert places == {name: [{"num_gpus": share}] for name, share in zip(names, shares, strict=True)}


@pytest.mark.parametrize(
    ("size", "gpus", "message"),
    [
        (2, 1, "2 processes for 1 GPUs of the cell"),
        (4, 2, "4 processes for 2 GPUs of"),
        (4, 4, "for 2 GPUs on this node"),
    ],
)
def test_placed_refuses_more_ranks_than_gpus(size: int, gpus: int, message: str) -> None:
    with pytest.raises(SpecError, match=message), placed({"student": 1, "teacher": size}, gpus=gpus):
        pass
