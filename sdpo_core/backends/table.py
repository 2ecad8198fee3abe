"""Backends by name: what each can do, what it needs, the module that holds it. Looking at the table loads no torch."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra, lacks, missing
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import CellSpec, Dtype

if TYPE_CHECKING:
    from sdpo_core.backends.base import Policy, ScoringModel, WeightsAt

MEGATRON = Extra(name="megatron", module="megatron.core", install=".venv/bin/pip install -e '.[megatron]'")
TRANSFORMER_ENGINE = Extra(
    name="transformer_engine",
    module="transformer_engine",
    install=".venv/bin/pip install --no-build-isolation 'transformer_engine[pytorch]', beside a CUDA build of torch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendEntry:
    """`kernels`: those that it has, with what each needs. `switches`: those of `LayoutSpec` that it knows.

    `has_one_architecture`: its teachers are of the student's.
    """

    module: str
    dtypes: tuple[Dtype, ...]
    kernels: Mapping[str, Extra | None]
    is_on_several_processes: bool = False
    switches: tuple[str, ...] = ()
    has_one_architecture: bool = False
    extra: Extra | None = None


BACKENDS: Mapping[str, BackendEntry] = {
    "hf": BackendEntry(module="sdpo_core.backends.hf", dtypes=("float32",), kernels={"torch": None}),
    "megatron": BackendEntry(
        module="sdpo_core.backends.megatron.backend",
        dtypes=("float32", "bfloat16"),
        kernels={"torch": None, "transformer_engine": TRANSFORMER_ENGINE},
        is_on_several_processes=True,
        switches=("sequence", "distributed_optimizer", "recompute", "packed"),
        has_one_architecture=True,
        extra=MEGATRON,
    ),
}


@runtime_checkable
class Backend(Protocol):
    """What a backend module offers. `folder` holds the base weights in Hugging Face form, `device` is torch's name.

    A scoring model mixes the logits of as many copies of its weights as there are `shares`.
    """

    def load_policy(self, spec: CellSpec, *, folder: Path, device: str) -> "Policy": ...

    def load_scorer(
        self, spec: CellSpec, *, at: "WeightsAt", device: str, shares: Sequence[float]
    ) -> "ScoringModel": ...


def backend(spec: CellSpec) -> Backend:
    """The module of a cell's backend.

    Raises:
        SpecError: as `check_backend`.
    """
    check_backend(spec.backend, layouts=(spec.layout, spec.scorer_layout), dtype=spec.dtype)
    module: Backend = importlib.import_module(BACKENDS[spec.backend].module)
    return module


def check_backend(name: str, *, layouts: Sequence[LayoutSpec], dtype: Dtype) -> None:
    """Raise SpecError with all that backend `name` cannot do, and all that it needs and is not installed."""
    faults = [
        *backend_faults(name, layouts=layouts, dtype=dtype),
        *map(lacks, missing(backend_extras(name, layouts=layouts))),
    ]
    if faults:
        raise SpecError(f"backend: {'; '.join(faults)}. Choose another backend, or change the profile.")


def backend_faults(name: str, *, layouts: Sequence[LayoutSpec], dtype: Dtype) -> Iterator[str]:
    """What backend `name` cannot do, installed or not, as parts of a sentence."""
    if name not in BACKENDS:
        yield f"got backend {name!r}, expected one of {', '.join(BACKENDS)}"
        return
    entry = BACKENDS[name]
    largest = max(layout.size for layout in layouts)
    if largest > 1 and not entry.is_on_several_processes:
        yield f"got a layout of {largest} processes for backend {name!r}, expected one process"
    if dtype not in entry.dtypes:
        yield f"got dtype {dtype!r} for backend {name!r}, expected {' or '.join(entry.dtypes)}"
    for kernels in dict.fromkeys(layout.kernels for layout in layouts):
        if kernels not in entry.kernels:
            yield f"got kernels {kernels!r} for backend {name!r}, expected {' or '.join(entry.kernels)}"
    declared = (key for layout in layouts for key, value in layout.model_dump().items() if value is True)
    unknown = [switch for switch in dict.fromkeys(declared) if switch not in entry.switches]
    if unknown:
        yield f"got {', '.join(unknown)} for backend {name!r}, expected {' or '.join(entry.switches) or 'no switch'}"


def backend_extras(name: str, *, layouts: Sequence[LayoutSpec]) -> tuple[Extra, ...]:
    """What backend `name` needs for these layouts; nothing for an unknown one."""
    if name not in BACKENDS:
        return ()
    entry = BACKENDS[name]
    wanted = (entry.extra, *(entry.kernels.get(layout.kernels) for layout in layouts))
    return tuple(dict.fromkeys(extra for extra in wanted if extra is not None))
