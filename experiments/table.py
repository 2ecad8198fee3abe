"""Experiments by name, and the reading of one that a user declares in a file."""

import runpy
from pathlib import Path

from experiments.e000_smoke import E000
from experiments.e001_first_light import E001
from sdpo_core.errors import SpecError
from sdpo_core.specs import ExperimentSpec

EXPERIMENTS: dict[str, ExperimentSpec] = {experiment.name: experiment for experiment in (E000, E001)}


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
    try:
        values = runpy.run_path(str(path)).values()
    except (ValueError, SyntaxError, ImportError, NameError) as error:
        raise SpecError(f"{path}: got {error}, expected a file that declares one ExperimentSpec. Correct it.") from None
    declared = {value.name: value for value in values if isinstance(value, ExperimentSpec)}
    if len(declared) != 1:
        raise SpecError(
            f"{path}: got {len(declared)} experiments {sorted(declared)}, expected one ExperimentSpec. Keep one a file."
        )
    (found,) = declared.values()
    if found.name in EXPERIMENTS:
        raise SpecError(f"{path}: got the name {found.name!r} of a shipped experiment, expected one of its own.")
    return found
