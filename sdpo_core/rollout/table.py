"""Rollout engines by name: whose weights each samples with, the module that holds it. Looking at it loads no torch."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra, lacks, missing
from sdpo_core.sglang.address import is_available
from sdpo_core.specs import CellSpec

if TYPE_CHECKING:
    from sdpo_core.backends.base import Policy
    from sdpo_core.rollout.base import RolloutEngine

# A folder of an engine's scratch that goes with the cell.
LIVE = "live"

# How far the same weights and seeds give the same rollouts again.
Repeatability = Literal["exact", "up to rounding", "not repeatable"]


def _exact(_spec: CellSpec) -> Repeatability:
    return "exact"


def _as_served(spec: CellSpec) -> Repeatability:
    return "up to rounding" if spec.sglang.deterministic else "not repeatable"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """`backends`: those whose students it can sample from; None: any. `repeats`: on a CPU."""

    module: str
    backends: tuple[str, ...] | None = None
    extra: Extra | None = None
    repeats: Callable[[CellSpec], Repeatability] = _exact


SGLANG = Extra(name="sglang", module="sglang", install="make sglang-env", is_there=is_available)

ENGINES: Mapping[str, EngineEntry] = {
    "local": EngineEntry(module="sdpo_core.rollout.local", backends=("hf",)),
    "replica": EngineEntry(module="sdpo_core.rollout.replica"),
    "sglang": EngineEntry(module="sdpo_core.rollout.sglang", extra=SGLANG, repeats=_as_served),
}


@runtime_checkable
class EngineModule(Protocol):
    """What an engine module offers.

    `policy` is the student whose weights it samples with, `folder` the base it started from, `device` torch's name,
    `scratch` a folder for logs that stay; what the engine puts below LIVE there is removed when the cell ends.
    """

    def load_engine(
        self, spec: CellSpec, *, policy: "Policy", folder: Path, device: str, scratch: Path | None
    ) -> "RolloutEngine": ...


def engine(spec: CellSpec) -> EngineModule:
    """The module of a cell's engine.

    Raises:
        SpecError: as `check_engine`.
    """
    check_engine(spec.engine, backend=spec.backend)
    module: EngineModule = importlib.import_module(ENGINES[spec.engine].module)
    return module


def repeatability(spec: CellSpec, *, gpus: int) -> Repeatability:
    """Of a cell's rollouts, as its result names it: sums on a GPU need not be taken in one order."""
    return "not repeatable" if gpus else ENGINES[spec.engine].repeats(spec)


def check_engine(name: str, *, backend: str) -> None:
    """Raise SpecError with all that engine `name` cannot do, and what it needs and is not installed."""
    faults = [*engine_faults(name, backend=backend), *map(lacks, missing(engine_extras(name)))]
    if faults:
        raise SpecError(f"engine: {'; '.join(faults)}. Choose another engine, or change the profile.")


def engine_faults(name: str, *, backend: str) -> Iterator[str]:
    """What engine `name` cannot do, installed or not, as parts of a sentence."""
    if name not in ENGINES:
        yield f"got engine {name!r}, expected one of {', '.join(ENGINES)}"
        return
    backends = ENGINES[name].backends
    if backends is not None and backend not in backends:
        yield f"got engine {name!r} for backend {backend!r}, expected backend {' or '.join(backends)}"


def engine_extras(name: str) -> tuple[Extra, ...]:
    """What engine `name` needs; nothing for an unknown one."""
    extra = ENGINES[name].extra if name in ENGINES else None
    return () if extra is None else (extra,)
