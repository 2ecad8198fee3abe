"""How the student's weights get to the servers of the SGLang engine."""

import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

from safetensors.torch import save_file
from torch import Tensor

from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.sglang.client import SglangClient


@runtime_checkable
class WeightPath(Protocol):
    """A way for weights. `hold` takes those to be sent from now on; `send` gives them to every server of a client.

    They are sent again when a server has started again or has slept: it holds others then, or none.
    `send` raises CellError where a server could not take them.
    """

    def hold(self, weights: Mapping[str, Tensor]) -> None: ...

    def send(self, client: SglangClient, *, version: int) -> None: ...


class FolderPath:
    """A safetensors file that the servers read: they must run on this machine and as the same user.

    The file has no name but a link to this process's open one. So no copy of a model stays on the disk, however this
    process ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] = BytesIO()

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        place = self._folder / WEIGHTS_FILE
        self._folder.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        save_file(dict(weights), place, metadata={"format": "pt"})
        self._file.close()
        self._file = place.open("rb")
        place.unlink()
        place.symlink_to(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")

    def send(self, client: SglangClient, *, version: int) -> None:
        client.update_from_folder(self._folder, version=version)
