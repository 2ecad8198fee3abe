"""How a model lies on the processes of a worker. Torch-free."""

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveInt, model_validator

from sdpo_core.spec_base import Spec, refuse


class LayoutSpec(Spec):
    """`tensor` x `context` x `data` processes hold one model.

    `sequence`: what lies between the parts that `tensor` cuts is cut along the sequence. `distributed_optimizer`: its
    state is shared out over the `data` and `context` processes. `recompute`: activations are computed a second time in
    the backward pass instead of kept. `packed`: the rows of a micro-batch stand one behind another, without padding.
    `kernels`: whose layers the model is made of.
    """

    tensor: PositiveInt = 1
    context: PositiveInt = 1
    data: PositiveInt = 1
    pipeline: PositiveInt = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    recompute: bool = False
    packed: bool = False
    kernels: Literal["torch", "transformer_engine"] = "torch"

    @property
    def size(self) -> int:
        """Processes of the worker."""
        return self.tensor * self.context * self.data

    @property
    def position_multiple(self) -> int:
        """What the length of a padded sequence is divisible by."""
        return 2 * self.context * (self.tensor if self.sequence else 1)

    @model_validator(mode="after")
    def _parts_go_together(self) -> "LayoutSpec":
        refuse(list(self._faults()))
        return self

    def _faults(self) -> Iterator[str]:
        if self.pipeline > 1:
            yield f"pipeline {self.pipeline}: there is no pipeline parallelism; use tensor, context or data"
        if self.sequence and self.tensor == 1:
            yield "sequence belongs to tensor above 1: it cuts what tensor leaves whole"
