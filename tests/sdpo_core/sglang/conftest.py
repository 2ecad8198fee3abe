"""One running server of the micro base for all tests that only ask it something."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sdpo_core.sglang.server import ManagedServer, ServerSpec
    from tests.sdpo_core.micro import Base


@pytest.fixture(scope="session")
def server_spec(base: "Base") -> "ServerSpec":
    """Prompts above 64 tokens are prefilled in parts, and log-probabilities taken 40 rows at a time."""
    # Imported here: the shape checker must be in place before sdpo_core is.
    from sdpo_core.sglang.server import ServerSpec

    return ServerSpec(
        model=base.folder,
        dtype="float32",
        valid_vocab=base.text.vocab_size,
        max_total_tokens=8192,
        threads=1,
        deterministic=True,
        extra=("--chunked-prefill-size", "64"),
        environment=(("SGLANG_ENABLE_LOGPROB_CHUNK", "1"), ("SGLANG_LOGPROB_CHUNK_SIZE", "40")),
    )


@pytest.fixture(scope="session")
def server(server_spec: "ServerSpec", tmp_path_factory: pytest.TempPathFactory) -> Iterator["ManagedServer"]:
    """Shared: who changes its weights or ends it starts one of their own."""
    from sdpo_core.sglang.server import ManagedServer

    with ManagedServer(server_spec, folder=tmp_path_factory.mktemp("server")) as running:
        yield running
