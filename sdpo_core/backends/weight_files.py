"""Weights by Hugging Face name from a folder: of a Hugging Face model, or of a checkpoint, whole or in shares.

A checkpoint's shares stand in `model-00000-of-00002.safetensors` and so on, one a tensor parallel process, by
megatron-core's names; `weights.json` says what model they make up. So a model loads at any layout, and in any backend.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from sdpo_core.backends.megatron.names import Kernels, to_hf
from sdpo_core.backends.megatron.shape import ModelShape
from sdpo_core.errors import DataError
from sdpo_core.journal import read_json, write_json

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "weights.json"


def share_file(rank: int, *, tensor: int) -> str:
    """Name of the file that holds the share of process `rank` of `tensor`."""
    return f"model-{rank:05d}-of-{tensor:05d}.safetensors"


def save_share(
    folder: Path, share: Mapping[str, Tensor], *, shape: ModelShape, kernels: Kernels, rank: int, tensor: int
) -> None:
    """Write one process's share; process 0 writes the manifest too."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in share.items()}, folder / share_file(rank, tensor=tensor))
    if rank == 0:
        write_json(folder / MANIFEST_FILE, {"tensor": tensor, "kernels": kernels, "shape": asdict(shape)})


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by Hugging Face name.

    Raises:
        DataError: there are none, or a file of them is missing.
    """
    if (folder / MANIFEST_FILE).is_file():
        manifest = read_json(folder / MANIFEST_FILE)
        tensor = int(manifest["tensor"])
        shares = [_load(folder / share_file(rank, tensor=tensor)) for rank in range(tensor)]
        return to_hf(shares, ModelShape(**manifest["shape"]), kernels=manifest["kernels"])
    index = folder / f"{WEIGHTS_FILE}.index.json"
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
        return {name: value for part in names for name, value in _load(folder / part).items()}
    return _load(folder / WEIGHTS_FILE)


def _load(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DataError(f"weights {path}: got no such file, expected safetensors. Place the whole folder there.")
    tensors: dict[str, Tensor] = load_file(path)
    return tensors
