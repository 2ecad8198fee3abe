"""How the student's weights get to the servers of the SGLang engine."""

import os
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from sdpo_core.backends.weight_files import WEIGHTS_FILE
from sdpo_core.errors import SpecError
from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT
from sdpo_core.rollout.sglang_group import GroupBackend, send_weights
from sdpo_core.sglang.client import SglangClient
from sdpo_core.sglang.transport import Transport
from sdpo_core.specs import CellSpec, Dtype, WeightsBy


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


class GroupPath:
    """A process group with each server, which must run on this machine.

    The weights stay in memory until the next ones come: the whole model once more, in the dtype of the servers.

    Raises:
        SpecError: the group would listen on other interfaces than the loopback.
    """

    def __init__(self, backend: GroupBackend, *, dtype: Dtype) -> None:
        different = {name: os.environ.get(name) for name in LOOPBACK_ENVIRONMENT} != LOOPBACK_ENVIRONMENT
        if different:
            raise SpecError(
                f"weights by {backend}: got an environment without {LOOPBACK_ENVIRONMENT}, expected these settings: a "
                "group asks nobody who connects. Set them, or choose `weights_by` 'folder' in the profile."
            )
        self._backend = backend
        self._dtype = getattr(torch, dtype)
        self._weights: dict[str, Tensor] = {}

    def hold(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: value.to(self._dtype) for name, value in weights.items()}

    def send(self, client: SglangClient, *, version: int) -> None:
        def send(transport: Transport, tag: str) -> None:
            send_weights(transport, self._weights, tag=tag, backend=self._backend)

        client.update_by(send, version=version)


def make_weight_path(spec: CellSpec, *, folder: Path, is_managed: bool) -> WeightPath:
    """The way that `spec.sglang.weights_by` names, to servers that were started here (`is_managed`) or by others.

    Raises:
        SpecError: it cannot lead to them.
    """
    return _PATHS[spec.sglang.weights_by](spec, folder, is_managed)


def _folder(_spec: CellSpec, folder: Path, _is_managed: bool) -> WeightPath:
    return FolderPath(folder)


def _gloo(spec: CellSpec, _folder: Path, _is_managed: bool) -> WeightPath:
    return GroupPath("gloo", dtype=spec.dtype)


def _nccl(spec: CellSpec, _folder: Path, is_managed: bool) -> WeightPath:
    if is_managed or not dist.is_nccl_available():
        raise SpecError(
            "weights by nccl: got servers that share the trainer's GPU, or a torch without NCCL, expected servers of "
            "SDPO_SGLANG_URL on another GPU: NCCL takes one rank a GPU. Choose `weights_by` 'folder' or 'gloo'."
        )
    return GroupPath("nccl", dtype=spec.dtype)


_PATHS: Mapping[WeightsBy, Callable[[CellSpec, Path, bool], WeightPath]] = {
    "folder": _folder,
    "gloo": _gloo,
    "nccl": _nccl,
}
