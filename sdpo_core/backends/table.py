"""Backends by name: the module that holds `load_policy` and `load_scorer`. Looking at the table loads no torch."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sdpo_core.errors import SpecError
from sdpo_core.specs import CellSpec

if TYPE_CHECKING:
    from sdpo_core.backends.base import Policy, ScoringModel, WeightsAt

BACKENDS = {"hf": "sdpo_core.backends.hf"}


@runtime_checkable
class Backend(Protocol):
    """What a backend module offers. `folder` holds the base weights in Hugging Face form, `device` is torch's name.

    A scoring model mixes the logits of as many copies of its weights as there are `shares`.
    """

    def load_policy(self, spec: CellSpec, *, folder: Path, device: str) -> "Policy": ...

    def load_scorer(
        self, spec: CellSpec, *, at: "WeightsAt", device: str, shares: Sequence[float]
    ) -> "ScoringModel": ...


def backend(name: str) -> Backend:
    """The module of backend `name`."""
    if name not in BACKENDS:
        raise SpecError(f"backend: got {name!r}, expected one of {sorted(BACKENDS)}. Choose one in the profile.")
    module: Backend = importlib.import_module(BACKENDS[name])
    return module
