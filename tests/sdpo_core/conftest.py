"""The micro base model, made once a session."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.sdpo_core.micro import Base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> "Base":
    """A random micro model in Hugging Face form, with the byte tokenizer."""
    # Imported here: the shape checker must be in place before sdpo_core is.
    from tests.sdpo_core.micro import Base, make_base

    folder = tmp_path_factory.mktemp("base")
    return Base(folder=folder, text=make_base(folder))
