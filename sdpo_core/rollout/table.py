"""Rollout engines by name: the module that holds `load_engine`. Looking at the table loads no torch."""

import importlib
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sdpo_core.errors import SpecError
from sdpo_core.specs import CellSpec

if TYPE_CHECKING:
    from sdpo_core.backends.base import Policy
    from sdpo_core.rollout.base import RolloutEngine

ENGINES = {"local": "sdpo_core.rollout.local"}


@runtime_checkable
class EngineModule(Protocol):
    """What an engine module offers; `policy` is the student whose weights it samples with."""

    def load_engine(self, spec: CellSpec, *, policy: "Policy", end_id: int) -> "RolloutEngine": ...


def engine(name: str) -> EngineModule:
    """The module of engine `name`."""
    if name not in ENGINES:
        raise SpecError(f"engine: got {name!r}, expected one of {sorted(ENGINES)}. Choose one in the profile.")
    module: EngineModule = importlib.import_module(ENGINES[name])
    return module
