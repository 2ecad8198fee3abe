"""Where a teacher scores, by name: what each place can do, the module that holds it. Looking at it loads no torch."""

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from sdpo_core.algorithm_specs import Support, TeacherSpec
from sdpo_core.extras import Extra
from sdpo_core.sglang.address import has_environment

if TYPE_CHECKING:
    from sdpo_core.backends.base import ScoringModel, WeightsAt
    from sdpo_core.specs import CellSpec

TeacherPlacement = Literal["trainer", "sglang"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementEntry:
    """`lacks_support`, `lacks_schedule`: what it cannot do, each with the reason.

    `is_on_backend`: scores with the cell's backend, on its layout; else in one process.
    """

    module: str
    lacks_support: Mapping[Support, str]
    lacks_schedule: Mapping[str, str]
    is_on_backend: bool
    extra: Extra | None = None


PLACEMENTS: Mapping[TeacherPlacement, PlacementEntry] = {
    "trainer": PlacementEntry(
        module="sdpo_core.teacher.in_trainer", lacks_support={}, lacks_schedule={}, is_on_backend=True
    ),
    "sglang": PlacementEntry(
        module="sdpo_core.teacher.served",
        lacks_support={"full": "the server gives no hidden states"},
        lacks_schedule={"trust_region": "the server holds one model, not a mixture of two"},
        is_on_backend=False,
        extra=Extra(name="sglang-teacher", module="sglang", install="make sglang-env", is_there=has_environment),
    ),
}


@runtime_checkable
class PlacementModule(Protocol):
    """What the module of a placement offers. `device` is torch's name, `scratch` a folder for its files."""

    def load_scorer(
        self, spec: "CellSpec", *, life: TeacherSpec, at: "WeightsAt", device: str, scratch: Path | None
    ) -> "ScoringModel": ...


def placement(name: TeacherPlacement) -> PlacementModule:
    """The module of a placement."""
    module: PlacementModule = importlib.import_module(PLACEMENTS[name].module)
    return module


def placement_extras(name: TeacherPlacement) -> tuple[Extra, ...]:
    """What placement `name` needs."""
    extra = PLACEMENTS[name].extra
    return () if extra is None else (extra,)


def placement_faults(
    name: TeacherPlacement, *, life: TeacherSpec | None, support: Support | None, temperature: float
) -> Iterator[str]:
    """What a teacher cannot do at `name`, as parts of a sentence; `life` None: there is no teacher."""
    entry = PLACEMENTS[name]
    if not math.isfinite(temperature):
        yield f"teacher_placement {name!r} at temperature {temperature}: scores are taken at a finite one"
    if life is None:
        if name != "trainer":
            yield f"teacher_placement {name!r} for an arm without a teacher"
        return
    if support is not None and support in entry.lacks_support:
        yield f"teacher_placement {name!r} with support {support!r}: {entry.lacks_support[support]}"
    if life.schedule in entry.lacks_schedule:
        yield f"teacher_placement {name!r} with schedule {life.schedule!r}: {entry.lacks_schedule[life.schedule]}"
