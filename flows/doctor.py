"""What this machine can run: Python, packages, cores, memory, disk, accelerators, ports, profiles."""

import importlib.metadata
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from experiments.matrix import extras_of
from experiments.profiles import PROFILES
from flows.launch import HOST
from flows.machine import gpus, lacking
from flows.services import ServicesSpec, status
from sdpo_core.extras import Extra, missing

_PACKAGES = ("torch", "transformers", "prefect", "ray", "mlflow", "datasets", "pandas")
_NEEDED_BYTES = 4 * 2**30
_MEMORY_PER_CELL = 2 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line; `blocks` means that nothing can run before it is mended."""

    what: str
    state: str
    advice: str = ""
    blocks: bool = False


def examine(home: Path) -> tuple[Finding, ...]:
    """Every finding, whether good or bad."""
    return (*_packages(), *_machine(home), *_ports(home), *_profiles(home))


def _packages() -> Iterator[Finding]:
    yield Finding(what="python", state=sys.version.split()[0])
    for name in _PACKAGES:
        try:
            yield Finding(what=name, state=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(what=name, state="not installed", advice="make demo installs the lock", blocks=True)
    for extra in _extras():
        needing = ", ".join(profile.name for profile in PROFILES.values() if extra in extras_of(profile))
        is_there = not missing((extra,))
        advice = "" if is_there else f"{extra.install} (for {needing})"
        yield Finding(what=f"extra {extra.name}", state="installed" if is_there else "not installed", advice=advice)


def _extras() -> tuple[Extra, ...]:
    """Every extra that a profile needs."""
    return tuple(dict.fromkeys(extra for profile in PROFILES.values() for extra in extras_of(profile)))


def _machine(home: Path) -> Iterator[Finding]:
    cores = psutil.cpu_count() or 1
    yield Finding(what="cores", state=f"{cores} (as many cells at once under profile tiny)")
    memory = psutil.virtual_memory().total
    enough = memory >= _MEMORY_PER_CELL * cores
    advice = "" if enough else "2 GiB a cell: raise cpus_per_cell in experiments/profiles.py, and fewer run at once"
    yield Finding(what="memory", state=f"{memory / 2**30:.0f} GiB", advice=advice)
    place = home if home.exists() else home.parent
    free = shutil.disk_usage(place).free
    yield Finding(
        what="disk",
        state=f"{free / 2**30:.0f} GiB free at {place}",
        advice="" if free >= _NEEDED_BYTES else "free 4 GiB, or set SDPO_HOME to a larger disk",
        blocks=free < _NEEDED_BYTES,
    )
    found = gpus()
    needing = ", ".join(profile.name for profile in PROFILES.values() if profile.gpus_per_cell)
    yield Finding(
        what="accelerators", state=f"{found} NVIDIA" if found else "none", advice="" if found else f"only for {needing}"
    )


def _ports(home: Path) -> Iterator[Finding]:
    spec = ServicesSpec()
    states: dict[str, str] = {record.name: record.state for record in status(home)}
    ports = (("prefect", spec.prefect_port), ("mlflow", spec.mlflow_port), ("ray", spec.ray_port))
    for name, port in ports:
        if states.get(name) == "up":
            yield Finding(what=f"port {port} ({name})", state="our service is up")
            continue
        with socket.socket() as probe:
            taken = probe.connect_ex((HOST, port)) == 0
        advice = "`sdpo up` needs it; `sdpo run` does not" if taken else ""
        yield Finding(
            what=f"port {port} ({name})", state="taken by another program" if taken else "free", advice=advice
        )


def _profiles(home: Path) -> Iterator[Finding]:
    for profile in PROFILES.values():
        lacks = lacking(profile, home=home)
        yield Finding(
            what=f"profile {profile.name}",
            state=f"lacks {', '.join(lack.what for lack in lacks)}" if lacks else "runs here",
            advice="; ".join(lack.advice for lack in lacks if lack.advice) or profile.meaning,
        )
