"""How much memory a worker's process has used at most."""

import resource
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the accelerator's memory where there is one, else of this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():
        # VmHWM starts afresh with the program; ru_maxrss is inherited from the process that forked it.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_kind(device: torch.device) -> str:
    """What `peak_memory_bytes` is the peak of."""
    return "accelerator" if device.type == "cuda" else "resident"
