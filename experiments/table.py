"""Experiments by name, and the reading of one that a user declares in a file."""

import re
import runpy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from experiments.e000_smoke import E000
from experiments.e001_first_light import E001
from experiments.e010_variants import E010
from experiments.e020_qwen3_4b import E020
from sdpo_core.errors import SpecError
from sdpo_core.specs import ExperimentSpec

# A name becomes a folder of results, an experiment of MLflow and the key of a Prefect artifact.
_NAME = r"[a-z0-9]+([_-][a-z0-9]+)*"

EXPERIMENTS: dict[str, ExperimentSpec] = {experiment.name: experiment for experiment in (E000, E001, E010, E020)}


def experiment(name: str) -> ExperimentSpec:
    """The experiment of that name, or the one that the file at that path declares.

    Raises:
        SpecError: no such name or file, or a file without exactly one ExperimentSpec.
    """
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if not name.endswith(".py"):
        raise SpecError(
            f"experiment: got {name!r}, expected one of {', '.join(EXPERIMENTS)} or the path of a .py file. "
            "Correct the name, or declare it as CONTRIBUTING.md says."
        )
    return _declared_in(Path(name))


def _declared_in(path: Path) -> ExperimentSpec:
    if not path.is_file():
        raise SpecError(f"experiment: got {path}, expected a file. Correct the path.")
    # The shipped experiments that a file imports, to derive its own from, are not declared in it.
    values = [value for value in _run(path).values() if isinstance(value, ExperimentSpec)]
    declared = list(dict.fromkeys(value for value in values if value not in EXPERIMENTS.values()))
    if len(declared) != 1:
        names = ", ".join(value.name for value in declared) or "none"
        raise SpecError(
            f"{path}: got {len(declared)} experiments ({names}), expected one ExperimentSpec a file. "
            "Declare one, or write a file for each."
        )
    (found,) = declared
    if found.name in EXPERIMENTS:
        raise SpecError(
            f"{path}: got the name {found.name!r} of a shipped experiment, expected one of its own. Rename it."
        )
    if not re.fullmatch(_NAME, found.name):
        raise SpecError(
            f"{path}: got the name {found.name!r}, expected lower-case letters and digits, with "
            "single - or _ between. Rename it."
        )
    return found


def _run(path: Path) -> dict[str, Any]:
    """The names a file defines; whatever goes wrong in it becomes one line."""
    try:
        return runpy.run_path(str(path))
    except ValidationError as error:
        why = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise SpecError(
            f"{path}: got a faulty declaration ({why}), expected one ExperimentSpec. Correct it."
        ) from error
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"{path}: got {why}, expected a file that declares one ExperimentSpec. Correct it.") from error
