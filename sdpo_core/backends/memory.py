"""How much memory a worker's process has used at most."""

import os
import resource
from pathlib import Path

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of the accelerator's memory where there is one, else of this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resident_peak_bytes(os.getpid())


def resident_peak_bytes(pid: int) -> int:
    """Peak of a process's resident memory; of another one than this only where /proc tells it, else 0."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        # VmHWM starts afresh with the program; ru_maxrss is inherited from the process that forked it.
        lines = status.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if pid == os.getpid() else 0


def memory_kind(device: torch.device) -> str:
    """What `peak_memory_bytes` is the peak of."""
    return "accelerator" if device.type == "cuda" else "resident"
