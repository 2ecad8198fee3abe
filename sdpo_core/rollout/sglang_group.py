"""Weights to one SGLang server by a process group: this process is rank 0, the server rank 1.

The group is apart from torch's default one, which need not be there. It lives for one update, so that a server that has
started again, at another address, is like any other. Store and group are on the loopback interface: the server must run
on this machine.
"""

import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

# torch does not declare that it exports them.
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from sdpo_core.errors import CellError, DataError
from sdpo_core.rendezvous import hosted_meeting
from sdpo_core.sglang.server import HOST
from sdpo_core.sglang.transport import Transport, UnreachableError

GroupBackend = Literal["gloo", "nccl"]

# Longest without a step forward: an answer to a call, the server at the meeting, a tensor gone out.
_PATIENCE = timedelta(seconds=60)
# A server holds what one call brings beside its own weights.
_BUCKET_BYTES = 2**28
_DEVICES: Mapping[GroupBackend, str] = {"gloo": "cpu", "nccl": "cuda"}


def send_weights(transport: Transport, weights: Mapping[str, Tensor], *, tag: str, backend: GroupBackend) -> None:
    """Give the server `weights`, in the order of their names, and have it forget what it has run under others.

    `transport`: one that asks once, since no part of an update can be asked for again. `tag`: of the weights.

    Raises:
        CellError: the server refuses them, ends, or hangs. It may hold a part of them then, under the new tag.
    """
    server = _Server(transport)
    with server.call("/begin_weight_update", {}):
        pass
    with server.closed_by("/end_weight_update", {}), _joined(server, backend) as (name, group):
        for names in _buckets(weights):
            body = {
                "names": names,
                "dtypes": [str(weights[one].dtype).removeprefix("torch.") for one in names],
                "shapes": [list(weights[one].shape) for one in names],
                "group_name": name,
                "weight_version": tag,
                "flush_cache": True,
            }
            with server.call("/update_weights_from_distributed", body):
                for one in names:
                    _broadcast(group, weights[one].to(_DEVICES[backend]).contiguous())


class _Server:
    """Calls that a server answers when both sides have done their part."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @contextmanager
    def call(self, path: str, body: Mapping[str, Any]) -> Iterator[None]:
        """A call that is under way while the block does this side's part.

        Raises:
            CellError: one of the two failed or took too long.
        """
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._transport.call, path, body=body)
            try:
                yield
                answer.result(_PATIENCE.total_seconds())
            # torch's errors of a group are RuntimeErrors.
            except (RuntimeError, TimeoutError, UnreachableError, DataError) as error:
                # What the server says tells more than what became of the group by it.
                if answer.done() and answer.exception() is not None:
                    raise CellError(f"update of weights: {answer.exception()}") from None
                reason = str(error) or f"nothing in {_PATIENCE.total_seconds():.0f} s"
                raise CellError(
                    f"update of weights: sglang server {self._transport.endpoint.url}{path}: got {reason}, expected it "
                    "to take them. Look at the server's log."
                ) from None
            finally:
                if not answer.done():
                    self._transport.give_up("an update that has failed")

    @contextmanager
    def closed_by(self, path: str, body: Mapping[str, Any]) -> Iterator[None]:
        """`path` is called after the block; should both fail, the block's error is the one to be seen."""
        try:
            yield
        except BaseException:
            with suppress(CellError), self.call(path, body):
                pass
            raise
        with self.call(path, body):
            pass


@contextmanager
def _joined(server: _Server, backend: GroupBackend) -> Iterator[tuple[str, Backend]]:
    """A group with the server, and its name there."""
    name = f"sdpo-{secrets.token_hex(4)}"
    with hosted_meeting(name, size=2, timeout=_PATIENCE) as meeting:
        body = {"master_address": HOST, "master_port": meeting.port, "rank_offset": 1, "world_size": meeting.size}
        with server.call("/init_weights_update_group", {**body, "group_name": name, "backend": backend}):
            store = PrefixStore(name, TCPStore(HOST, meeting.port, is_master=False, timeout=_PATIENCE))
            # Where the server's torch looks for a group of this name.
            group = _MAKERS[backend](PrefixStore(f"{_DEVICES[backend]}/", PrefixStore(f"{name}/", store)))
        with server.closed_by("/destroy_weights_update_group", {"group_name": name}):
            yield name, group


def _gloo(store: PrefixStore) -> Backend:
    return ProcessGroupGloo(store, 0, 2, _PATIENCE)


def _nccl(store: PrefixStore) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _PATIENCE
    return dist.ProcessGroupNCCL(store, 0, 2, options)


_MAKERS = {"gloo": _gloo, "nccl": _nccl}


def _broadcast(group: Backend, tensor: Tensor) -> None:
    group.broadcast(tensor, 0).wait()  # type: ignore[attr-defined] # torch does not declare it


def _buckets(weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, cut where more than `_BUCKET_BYTES` would go in one call."""
    names: list[str] = []
    room = _BUCKET_BYTES
    for name in sorted(weights):
        room -= weights[name].nbytes
        if room < 0 and names:
            yield names
            names, room = [], _BUCKET_BYTES - weights[name].nbytes
        names.append(name)
    yield names
