"""Gradients from tables that are known: the vocabulary passes in tiles, each for as many tokens as fit.

With the normalisers at hand no row is needed whole, so each tile of the head is read and its gradient written once, or
once per `TILE_ROWS` tokens. No collective is needed. Source: notation.md, "Fused head".
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sdpo_core.objectives import chunk_reader
from sdpo_core.objectives.chunk_gradient import FullSlope, RowGradients, write_gradient
from sdpo_core.objectives.chunk_reader import Reading, even_step, row_chunks
from sdpo_core.objectives.chunks import columns_of, spare_width
from sdpo_core.objectives.full_divergence import Side
from sdpo_core.objectives.head import Head, compute_dtype, project
from sdpo_core.objectives.row_records import cut
from sdpo_core.objectives.tables import TableRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Where gradients are written; None: not wanted. What they hold is overwritten."""

    hidden: Float[Tensor, "token hidden"] | None
    weight: Float[Tensor, "shard hidden"] | None
    bias: Float[Tensor, " shard"] | None


class TileBackward:
    """Hidden states, head and request, and what was read from them."""

    def __init__(
        self, hidden: Float[Tensor, "token hidden"], head: Head, request: TableRequest, reading: Reading
    ) -> None:
        self._hidden, self._head, self._request, self._reading = hidden.detach(), head, request, reading
        self._dtype = compute_dtype(hidden, head)
        self._step = even_step(len(hidden), most=chunk_reader.TILE_ROWS)
        buffers = 1 if request.full is None else 2
        wide = spare_width(min(chunk_reader.TILE_COLUMNS, head.width))
        self._logits, *self._teacher_logits = hidden.new_empty(buffers, self._step, wide, dtype=self._dtype).unbind()

    def write(self, gradients: RowGradients, *, to: Targets) -> None:
        """Write the gradients that the small ones imply."""
        head = self._head
        hidden = None if to.hidden is None else _sums(to.hidden, dtype=self._dtype).zero_()
        for target in (to.weight, to.bias):
            if target is not None:
                target[head.width :] = 0.0
        for columns in row_chunks(head.width, step=chunk_reader.TILE_COLUMNS) if head.width else ():
            tile = head.tile(columns, dtype=self._dtype)
            weight = None if to.weight is None else _sums(to.weight[columns], dtype=self._dtype)
            bias = None if to.bias is None else _sums(to.bias[columns], dtype=self._dtype).zero_()
            for rows in row_chunks(len(self._hidden), step=self._step):
                states = self._hidden[rows].to(self._dtype)
                slope = self._slope(tile, gradients, columns=columns, rows=rows)
                if hidden is not None:
                    hidden[rows].addmm_(slope, tile.weight, alpha=head.slope)
                if weight is not None:
                    weight.addmm_(slope.T, states, beta=0.0 if rows.start == 0 else 1.0, alpha=head.slope)
                if bias is not None:
                    bias.add_(slope.sum(dim=0), alpha=head.slope)
            for target, sums in ((to.weight, weight), (to.bias, bias)):
                if target is not None and sums is not None and sums.dtype != target.dtype:
                    target[columns] = sums.to(target.dtype)
        if to.hidden is not None and hidden is not None and hidden is not to.hidden:
            to.hidden.copy_(hidden)

    def _slope(
        self, tile: Head, gradients: RowGradients, *, columns: slice, rows: slice
    ) -> Float[Tensor, "row column"]:
        """The gradient on the logits of a tile."""
        reading, first = cut(self._reading, rows), self._head.first + columns.start
        logits = self._logits[: len(reading.ids)]
        project(self._hidden[rows].to(self._dtype), tile, first=0, out=logits[:, : tile.width])
        own_ids = self._request.own_ids[rows, None]
        write_gradient(
            logits,
            cut(gradients, rows),
            width=tile.width,
            stats=reading.stats,
            support=columns_of(reading.ids, first=first, width=tile.width),
            own=columns_of(own_ids, first=first, width=tile.width),
            full=self._full_slope(reading, columns=columns, rows=rows),
            cap=tile.cap,
        )
        return logits[:, : tile.width]

    def _full_slope(self, reading: Reading, *, columns: slice, rows: slice) -> FullSlope | None:
        request = self._request
        if request.full is None or request.teacher is None or reading.teacher is None or reading.full is None:
            return None
        tile = request.teacher.head.tile(columns, dtype=self._dtype)
        logits = self._teacher_logits[0][: len(reading.ids)]
        states = request.teacher.hidden.detach()[rows].to(self._dtype)
        project(states, tile, first=0, out=logits[:, : tile.width])
        side = Side(logits=logits, normaliser=reading.teacher.normaliser, width=tile.width)
        return FullSlope(full=request.full, teacher=side, slope=reading.full.slope)


def _sums(target: Float[Tensor, "*shape"], *, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """The target itself, or numbers in the dtype in which sums are taken."""
    return target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
