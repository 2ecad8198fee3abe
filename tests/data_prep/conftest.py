"""All shipped data sets, prepared once for the folder's tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.manifest import Manifest
from data_prep.prepare import prepare_dataset
from data_prep.table import DATASETS
from sdpo_core.records import Problem, read_problems


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prepared data set: its manifest and its problems by split."""

    manifest: Manifest
    folder: Path
    problems: Mapping[str, tuple[Problem, ...]]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    home = tmp_path_factory.mktemp("home")
    found = {}
    for name in DATASETS:
        manifest = prepare_dataset(name, home=home)
        folder = home / "data" / name
        problems = {split: read_problems(folder / f"{split}.jsonl") for split in manifest.splits}
        found[name] = Prepared(manifest=manifest, folder=folder, problems=problems)
    return found
