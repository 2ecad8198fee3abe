"""A small experiment in a store of its own, planned and not trained."""

from pathlib import Path

import pytest

from experiments.matrix import Selection
from flows.matrix import Matrix, load_matrix
from sdpo_core.journal import write_json


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The store that every command of a test works on."""
    return tmp_path / "home"


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A file with one half of e000, the quicker one to prepare."""
    path = tmp_path / "small.py"
    path.write_text(
        "from experiments.e000_smoke import E000\n"
        'SMALL = E000.model_copy(update={"name": "small", "datasets": ("sciknoweval-physics",)})\n'
    )
    return str(path)


@pytest.fixture
def matrix(small: str, home: Path) -> Matrix:
    """The small experiment with base records, so that its cells have fingerprints; nothing is trained."""
    matrix = load_matrix(small, Selection(), home=home)
    for base in matrix.bases():
        write_json(matrix.store.bases / base.fingerprint / "base.json", {"weights_digest": f"w-{base.spec.name}"})
    matrix.write_specs()
    return matrix
