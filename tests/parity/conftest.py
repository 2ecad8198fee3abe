"""The model folder that the peer's trainer wants."""

import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The peer's warnings: its interface may change (its version is pinned), and so may that of what it calls."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    config.addinivalue_line("filterwarnings", r"ignore:.(is_)?gradient_checkpointing. is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A micro model in Hugging Face form."""
    # Imported here: the shape checker must be in place before sdpo_core is, and the peer takes seconds.
    from tests.parity.peer import make_folder

    path = tmp_path_factory.mktemp("peer")
    make_folder(path, seed=1)
    return path
