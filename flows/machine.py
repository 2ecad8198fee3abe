"""What a profile needs and this machine has not: cores, GPUs, extras, models to be placed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.matrix import extras_of
from sdpo_core.base_specs import PlacedBaseSpec
from sdpo_core.errors import SpecError
from sdpo_core.extras import missing
from sdpo_core.journal import Store
from sdpo_core.specs import ProfileSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """One thing that is not here, and how to get it; empty where that is up to the machine."""

    what: str
    advice: str = ""


def require_machine(profile: ProfileSpec) -> None:
    """Raise SpecError unless this machine can run a cell of the profile, models apart: their base's job tells of them.

    Ray would keep a job that asks for more cores or GPUs than there are in its queue for ever.
    """
    lacks = (*_hardware(profile), *_extras(profile))
    if lacks:
        listed = ", ".join(lack.what + (f" (install it: {lack.advice})" if lack.advice else "") for lack in lacks)
        raise SpecError(
            f"profile {profile.name}: got a machine without {listed}, expected all that its cells need. "
            "Choose another profile, or another machine; `sdpo doctor` compares them."
        )


def lacking(profile: ProfileSpec, *, home: Path) -> tuple[Lack, ...]:
    """All that a run of the profile from the store at `home` lacks here."""
    return (*_hardware(profile), *_extras(profile), *_models(profile, home=home))


def gpus() -> int:
    """NVIDIA's driver lists each of them, also where no torch can use them."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _hardware(profile: ProfileSpec) -> Iterator[Lack]:
    cores = psutil.cpu_count() or 1
    for count, present, what in ((profile.cpus_per_cell, cores, "cores"), (profile.gpus_per_cell, gpus(), "GPUs")):
        if count > present:
            yield Lack(what=f"{count} {what}")


def _extras(profile: ProfileSpec) -> Iterator[Lack]:
    for extra in missing(extras_of(profile)):
        yield Lack(what=f"extra {extra.name}", advice=extra.install)


def _models(profile: ProfileSpec, *, home: Path) -> Iterator[Lack]:
    bases = (base for task in profile.tasks.values() for base in (task.base, task.teacher_base))
    for base in dict.fromkeys(base for base in bases if isinstance(base, PlacedBaseSpec)):
        place = Store(home).models / base.folder
        if not place.is_dir():
            yield Lack(what=f"model {base.name}", advice=f"place the model at {place}")
