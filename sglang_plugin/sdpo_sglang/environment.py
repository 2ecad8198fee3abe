"""Says whether this environment can serve: `python -m sdpo_sglang.environment LOCK`, the last step of installing it."""

import importlib.metadata
import sys
from pathlib import Path

from sdpo_sglang.serve import prepare


def main(lock: Path) -> None:
    """Compare what is installed with the lock and load the hooks.

    Raises:
        SystemExit: something differs, or SGLang has other functions than the hooks expect.
    """
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    wanted = dict(line.split("==") for line in lines)
    found = {name: importlib.metadata.version(name).split("+")[0] for name in wanted}
    if found != wanted:
        moved = {name: version for name, version in found.items() if version != wanted[name]}
        raise SystemExit(
            f"sdpo_sglang.environment: got {moved}, expected {lock}. Remove .venv-sglang and build it again."
        )
    if _torch_wants_cuda():
        raise SystemExit(
            "sdpo_sglang.environment: got a CUDA build of torch, expected a CPU build: the lock has no CUDA packages. "
            "For a GPU, install SGLang by its own instructions, add sglang_plugin, and set SDPO_SGLANG_PYTHON."
        )
    prepare()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sdpo_sglang.hooks import HOOKS

    load_plugins()
    missing = {target for target, *_ in HOOKS} - HookRegistry._patched
    if missing:
        raise SystemExit(
            f"sdpo_sglang.environment: got no hook at {sorted(missing)}, expected them all. Read the lines above."
        )


def _torch_wants_cuda() -> bool:
    try:
        import torch
    except OSError:
        # Its libraries are missing.
        return True
    return torch.version.cuda is not None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
