"""Starts the server: `python -m sdpo_sglang.serve` with the flags of SGLang, and its key in SDPO_SGLANG_KEY.

SGLang takes the key as a flag, which every user of the machine can read, and writes all flags to its log.
"""

import gc
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Any

from sdpo_sglang.key import Key

KEY_VARIABLE = "SDPO_SGLANG_KEY"
STUBS = Path(__file__).parent / "stubs"


def prepare() -> None:
    """Stub and platform where the machine needs them, for this process and those that it starts."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(STUBS))
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(STUBS) if not path else f"{path}{os.pathsep}{STUBS}"
    import torch

    if not torch.cuda.is_available():
        os.environ["SGLANG_PLATFORM"] = "sdpo_plain_cpu"
        # When a scheduler has died, SGLang waits 5 s to dump what hangs on a GPU, and ends only then.
        os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "false")
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "false")


def require_free_port(flags: list[str]) -> None:
    """Raise OSError (address already in use) now: SGLang would bind when the model is loaded."""
    host, port = (flags[flags.index(name) + 1] for name in ("--host", "--port"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, int(port)))


def main(flags: list[str]) -> None:
    """Serve until ended; `flags` hold --host and --port."""
    require_free_port(flags)
    key = Key(os.environ.pop(KEY_VARIABLE, ""))
    # What modules allocate stays: to look for garbage in it takes 30 % of the time that importing does.
    gc.disable()
    prepare()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    import sglang.srt.entrypoints.http_server  # noqa: F401 -- so that its modules are frozen, and forked

    gc.freeze()
    gc.enable()
    settings: Any = prepare_server_args(flags)
    settings.api_key = key or None
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
