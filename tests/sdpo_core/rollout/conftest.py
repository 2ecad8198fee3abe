"""One running SGLang server of the micro base, whose weights the tests of a folder change in turn."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sdpo_core.sglang.server import ManagedServer
    from tests.sdpo_core.micro import Base


@pytest.fixture(scope="session")
def shared_server(base: "Base", tmp_path_factory: pytest.TempPathFactory) -> Iterator["ManagedServer"]:
    """For engines that publish before they sample; whoever breaks a server starts one of their own."""
    # Imported here: the shape checker must be in place before sdpo_core is.
    from sdpo_core.sglang.server import ManagedServer, ServerSpec

    spec = ServerSpec(
        model=base.folder,
        dtype="float32",
        valid_vocab=base.text.vocab_size,
        max_total_tokens=16384,
        threads=1,
        deterministic=True,
    )
    with ManagedServer(spec, folder=tmp_path_factory.mktemp("shared-server")) as server:
        yield server
