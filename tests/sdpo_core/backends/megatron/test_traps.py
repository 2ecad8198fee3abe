"""What is silently wrong in megatron-core or beside it, each held off by a rule or shown to be dealt with.

Numbers of the list of traps whose tests are elsewhere: weights without the mark of a share (`test_build`, and the norm
in `test_parity`), padding of the vocabulary (`test_names`, `test_parity`), partial gradients (`test_parity`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
FOLDER = ROOT / "sdpo_core" / "backends" / "megatron"

# Name -> why it is not to be used.
BANNED = {
    "dist_checkpointing": "starts a process that outlives a worker's exit, and does not restore the step count",
    "save_pretrained": "writes on process 0 of the world alone",
    "vocab_parallel_cross_entropy": "overwrites float32 logits, and counts padding of the vocabulary",
    "all_gather_into_tensor": "gloo takes the concatenated shape alone, NCCL the stacked one too",
    "get_batch_on_this_cp_rank": "takes other arguments in later releases",
    "position_ids": "rotary positions ignore it",
}
# `position_ids=None` is what an embedding without positions is called with.
ALLOWED = {("build.py", "position_ids")}


def banned_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.keyword | ast.arg):
            names = [node.arg or ""]
        yield from (name for name in names if name in BANNED)


def test_backend_uses_nothing_that_is_silently_wrong() -> None:
    found = [(path.name, name) for path in sorted(FOLDER.glob("*.py")) for name in banned_names(path.read_text())]
    assert [pair for pair in found if pair not in ALLOWED] == []


@pytest.mark.parametrize(
    "source",
    [
        "from megatron.core import dist_checkpointing",
        "import megatron.core.dist_checkpointing.serialization",
        "from megatron.core.dist_checkpointing import load",
        "model.save_pretrained(folder)",
        "tensor_parallel.vocab_parallel_cross_entropy(logits, labels)",
        "from torch.distributed import all_gather_into_tensor",
        "model(ids, position_ids=places)",
    ],
)
def test_banned_names_are_found(source: str) -> None:
    assert len(list(banned_names(source))) == 1
