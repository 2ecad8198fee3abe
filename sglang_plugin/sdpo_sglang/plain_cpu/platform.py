"""The platform itself: device "cpu", attention and sampling by torch's own kernels."""

from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

_ATTENTION = "torch_native"


# SGLang is not installed where types are checked.
class PlainCpu(SRTPlatform):  # type: ignore[misc]
    """A CPU whose instructions SGLang has no kernels for."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups import choices

        server_args.device = "cpu"
        # Else --enable-deterministic-inference refuses torch's attention.
        if _ATTENTION not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            choices.add_deterministic_attention_backend_choices([_ATTENTION])
            choices.add_radix_supported_deterministic_attention_backend_choices([_ATTENTION])

    def get_default_attention_backend(self) -> str:
        return _ATTENTION

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: Any) -> None: ...

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"
