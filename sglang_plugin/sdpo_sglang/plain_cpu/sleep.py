"""Memory that a server without a GPU gives back while it sleeps: what torch_memory_saver does for one with a GPU."""

from typing import Any

from torch import UntypedStorage


class Sleeper:
    """Of the one scheduler of its process. Woken, weights and KV cache are zeros; on a GPU they may be anything."""

    def __init__(self) -> None:
        self._freed: list[tuple[UntypedStorage, int]] = []

    def release(self, _answer: Any, updater: Any, _request: Any) -> None:
        """After SGLang has kept the model's buffers, which it puts back itself, and has forgotten all prompts."""
        runner = updater.tp_worker.model_runner
        pool = runner.token_to_kv_pool
        tensors = (*runner.model.parameters(), *runner.model.buffers(), *pool.k_buffer, *pool.v_buffer)
        # Tied weights have one storage.
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._freed = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._freed:
            storage.resize_(0)

    def resume(self, _updater: Any, _request: Any) -> None:
        """Before SGLang puts the buffers back."""
        for storage, size in self._freed:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined] # torch does not declare it
        self._freed = []


def no_memory_saver(enable: bool) -> Any:  # noqa: ARG001 -- its caller names it
    """In the place of the adapter of torch_memory_saver, which --enable-memory-saver asks for."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

    return _TorchMemorySaverAdapterNoop()
