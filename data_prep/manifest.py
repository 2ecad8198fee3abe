"""The manifest of a prepared data set: its digest, counts, guess baselines and sources."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdpo_core.errors import DataError, SpecError
from sdpo_core.fingerprint import digest
from sdpo_core.journal import read_json

MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What `manifest.json` says.

    `digest` covers the split files alone. `rows_read` = `kept` + the sum of `quarantined` (code to rows); an API of
    ToolAlpaca counts as the rows it gives. `splits`: rows kept by split. `flagged`: kept rows by defect code.
    `baselines`: score by rule and split, None where there is nothing to choose or to score on; `baseline_choices`: what
    a rule chose on train. `source`: "files" as read, and "supplied": paths below the home folder where the user may add
    files. `tasks`: rows kept by grader. `shapes`: rows read by shape, then by code, "kept" being one. `leaks`: rows
    found on both sides of the split. `by_task`, `by_part`: rows and baselines of each task that the source names, and
    of each part of a mixture.
    """

    name: str
    digest: str
    splits: Mapping[str, int]
    rows_read: int
    kept: int
    quarantined: Mapping[str, int]
    flagged: Mapping[str, int]
    baselines: Mapping[str, Mapping[str, float | None]]
    baseline_choices: Mapping[str, str]
    files: Mapping[str, str]
    source: Mapping[str, Any]
    tasks: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    leaks: Mapping[str, int] = field(default_factory=dict)
    by_task: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_part: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the file."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str) -> "Manifest":
        """Read the JSON object; `where` opens the message of a broken one."""
        try:
            return cls(**value)
        except TypeError as error:
            raise DataError(f"{where}: got {error}, expected a manifest. Run `sdpo prepare` again.") from None


def data_digest(files: Mapping[str, str]) -> str:
    """Digest of a data set: over the SHA-256 of its split files (split to hex digits)."""
    return digest(dict(files))


def read_manifest(path: Path) -> Manifest:
    """Read `manifest.json`, given as the file or as its folder."""
    file = path / MANIFEST_NAME if path.is_dir() else path
    if not file.exists():
        raise DataError(f"{file}: got no manifest, expected a prepared data set. Run `sdpo prepare` first.")
    return Manifest.from_json(read_json(file), where=str(file))


def require_train(manifest: Manifest) -> None:
    """Refuse a data set that cannot be trained on, and say how its training rows are supplied.

    Raises:
        SpecError: no training rows.
    """
    if manifest.splits.get("train", 0):
        return
    places = " and ".join(f"$SDPO_HOME/{path}" for path in manifest.source["supplied"])
    advice = f"Place them in {places} and run `sdpo prepare {manifest.name}`" if places else "Choose another data set"
    raise SpecError(f"{manifest.name}: got 0 training rows, expected at least 1. {advice} (docs/data.md).")
