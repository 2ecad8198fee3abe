"""Entry points of the plain-CPU platform: what SGLang calls to learn of it, and its hooks."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def activate() -> str | None:
    """The platform's class; None on a machine with a GPU, which has SGLang's own platform."""
    return None if torch.cuda.is_available() else "sdpo_sglang.plain_cpu.platform.PlainCpu"


def register() -> None:
    """Hooks for --enable-deterministic-inference without Triton, sgl_kernel or a compiler, for --enable-memory-saver,
    and for a quick start.

    Matrix products stay torch's own: equal up to rounding for another composition of the batch, not bit by bit.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sdpo_sglang.plain_cpu.murmur import murmur_hash32
    from sdpo_sglang.plain_cpu.sleep import Sleeper, no_memory_saver

    sleeper = Sleeper()
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        _do_nothing,
        HookType.REPLACE,
    )
    HookRegistry.register("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur_hash32, HookType.REPLACE)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _start_by_forking, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create", no_memory_saver, HookType.REPLACE
    )
    HookRegistry.register(f"{_UPDATER}.release_memory_occupation", sleeper.release, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.resume_memory_occupation", sleeper.resume, HookType.BEFORE)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", _run_uncompiled, HookType.AROUND)


def _start_by_forking(_nothing: None, *_arguments: Any) -> None:
    """Scheduler and detokenizer become copies of this process: to import SGLang takes each 6 s of a core.

    They are started before this process has a second thread. SGLang starts them anew, which only CUDA needs.
    """
    multiprocessing.set_start_method("fork", force=True)


def _do_nothing(_runner: Any) -> None:
    """It would replace matrix products by Triton's."""


def _run_uncompiled(original: Callable[..., Any], *arguments: Any) -> Any:
    return getattr(original, "_torchdynamo_orig_callable", original)(*arguments)
