"""What the tests of the command line share: running it in a process of its own, and reading what it left behind."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flows.processes import REPOSITORY


def environment(home: Path, *, temporary: Path | None = None) -> dict[str, str]:
    """For a process that works on `home` from any folder; Ray's files go to `temporary`, which must be short."""
    extra = {} if temporary is None else {"TMPDIR": str(temporary)}
    return {**os.environ, "SDPO_HOME": str(home), "PYTHONPATH": str(REPOSITORY), **extra}


def start(*arguments: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """`sdpo ARGUMENTS` in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sdpo(*arguments: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`sdpo ARGUMENTS` to its end."""
    process = start(*arguments, folder=folder, environment=environment)
    out, err = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def results(home: Path) -> dict[str, dict[str, Any]]:
    """`result.json` of every done cell by label, with its folder under "folder"."""
    found = {}
    for path in sorted((home / "cells").glob("*/result.json")):
        result = json.loads(path.read_text())
        found[result["label"]] = {**result, "folder": path.parent}
    return found


def cell_folders(home: Path) -> dict[str, Path]:
    """Folder of every cell by label."""
    found = {}
    for path in (home / "cells").glob("*/spec.json"):
        spec = json.loads(path.read_text())["spec"]
        found[f"{spec['dataset']}/{spec['arm']}/{spec['seed']}"] = path.parent
    return found


def steps_done(folder: Path) -> int:
    """Training steps in a cell's journal."""
    path = folder / "metrics.jsonl"
    return path.read_text().count('"moment": "step"') if path.exists() else 0


def kill_tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """SIGKILL to the process and all below it, at once; what was killed, nothing if it has ended by itself."""
    if process.poll() is not None:
        return []
    # Stopped first, so that nobody notices the others' death and cleans up.
    root = psutil.Process(process.pid)
    root.suspend()
    tree = [root, *root.children(recursive=True)]
    for member in tree:
        # Short-lived ones may have ended by themselves.
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(tree[1:], timeout=20)
    process.communicate()
    return tree
