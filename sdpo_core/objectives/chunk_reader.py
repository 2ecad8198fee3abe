"""Reads what a request asks for, a chunk of tokens at a time, into buffers that hold the logits of a chunk only.

Source: notation.md, "Fused head".
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from sdpo_core.errors import DataError
from sdpo_core.objectives.chunk_gradient import FullSlope, RowGradients, write_gradient
from sdpo_core.objectives.chunks import (
    Partial,
    RowStats,
    columns_of,
    merge,
    over_group,
    row_stats,
    scan,
    select_support,
    spare_width,
)
from sdpo_core.objectives.full_divergence import FullStats, Side, full_stats
from sdpo_core.objectives.head import Head, compute_dtype, project
from sdpo_core.objectives.tables import TableRequest, Tables

# Logits held at once where whole rows are needed, of student and teacher together: 128 rows of 152k, 74 MiB in float32.
CHUNK_NUMBERS = 128 * 152_064
# Elsewhere the columns pass in tiles, 32 MiB in float32: docs/decisions/0007-fused-head.md.
TILE_COLUMNS = 8192
TILE_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is known of rows once their logits are gone; with the logits again, enough for the gradient."""

    ids: Int[Tensor, "row k"]
    best: Int[Tensor, "row best"] | None
    stats: RowStats
    teacher: RowStats | None
    full: FullStats | None


class ChunkReader:
    """The buffers, and hidden states, head and (checked) request they are read with.

    Args:
        hidden: of all tokens.
        head: the student's.
        request: what to read.
        keeps_logits: whether `logit_gradient` follows each `read`.
    """

    def __init__(
        self, hidden: Float[Tensor, "token hidden"], head: Head, request: TableRequest, *, keeps_logits: bool = False
    ) -> None:
        self._hidden, self._head, self._request = hidden.detach(), head, request
        self.dtype = compute_dtype(hidden, head)
        has_full = request.full is not None
        self._is_whole = keeps_logits or has_full or request.top_k > 0
        if self._is_whole:
            # The share's rows and not its valid ids: all processes must cut the tokens alike.
            most = CHUNK_NUMBERS // spare_width(len(head.weight)) // (2 if has_full and keeps_logits else 1)
        else:
            most = TILE_ROWS
        self._step = even_step(len(hidden), most=most)
        if self._is_whole:
            self._logits = self._buffer(head.width)
        if has_full:
            self._teacher_logits = self._buffer(head.width)
        elif request.teacher is not None or not self._is_whole:
            heads = [head] if request.teacher is None else [head, request.teacher.head]
            self._tile = self._buffer(min(TILE_COLUMNS, max(part.width for part in heads)))

    def _buffer(self, width: int) -> Float[Tensor, "row wide"]:
        return self._hidden.new_empty(self._step, spare_width(width), dtype=self.dtype)

    def chunks(self) -> Iterator[slice]:
        """Rows of each chunk."""
        return row_chunks(len(self._hidden), step=self._step)

    def hidden(self, rows: slice) -> Float[Tensor, "row hidden"]:
        """The chunk's hidden states in the dtype of the projection."""
        return self._hidden[rows].to(self.dtype)

    def read(self, rows: slice) -> Reading:
        """Project the chunk and read its rows. Kept logits stay in the buffers."""
        head, request, hidden = self._head, self._request, self.hidden(rows)
        own_ids = request.own_ids[rows, None]
        if self._is_whole:
            logits = self._logits[: len(hidden)]
            project(hidden, head, first=0, out=logits[:, : head.width])
            best = self._best_ids(logits)
            ids = self._support_ids(best, rows)
            part = self._scan(logits, head, first=0, width=head.width, ids=ids, own_ids=own_ids)
        else:
            best, ids = None, self._support_ids(None, rows)
            part = self._scan_tiles(hidden, head, ids=ids, own_ids=own_ids)
        stats = row_stats(over_group(part, group=head.group), support_ids=ids)
        teacher = self._read_teacher(rows, ids)
        full = None
        if request.full is not None and teacher is not None:
            side, other = self._side(self._logits, stats), self._side(self._teacher_logits, teacher)
            full = full_stats(side, other, request.full, group=head.group)
        best = None if request.support_ids is None else best
        return Reading(ids=ids, best=best, stats=stats, teacher=teacher, full=full)

    def logit_gradient(self, reading: Reading, gradients: RowGradients, *, rows: slice) -> Float[Tensor, "row column"]:
        """The gradient on the logits kept by the last `read`, in place of them."""
        head, request = self._head, self._request
        logits = self._logits[: len(reading.ids)]
        full = None
        if request.full is not None and reading.teacher is not None and reading.full is not None:
            side = self._side(self._teacher_logits, reading.teacher)
            full = FullSlope(full=request.full, teacher=side, slope=reading.full.slope)
        support, own = (
            columns_of(ids, first=head.first, width=head.width) for ids in (reading.ids, request.own_ids[rows, None])
        )
        write_gradient(
            logits,
            gradients,
            width=head.width,
            stats=reading.stats,
            support=support,
            own=own,
            full=full,
            cap=head.cap,
        )
        return logits[:, : head.width]

    def tables(self, reading: Reading) -> Tables:
        """What the request asked for, in the dtype of the projection."""
        request, stats, teacher = self._request, reading.stats, reading.teacher
        is_wanted = request.has_support
        return Tables(
            logp=stats.own.to(self.dtype),
            support_ids=reading.ids if is_wanted else None,
            support_logp=stats.cells.to(self.dtype) if is_wanted else None,
            teacher_logp=teacher.cells.to(self.dtype) if is_wanted and teacher else None,
            best_ids=reading.best,
            entropy=stats.entropy.to(self.dtype) if request.entropy else None,
            divergence=reading.full.divergence.to(self.dtype) if reading.full else None,
        )

    def _best_ids(self, logits: Float[Tensor, "row wide"]) -> Int[Tensor, "row best"] | None:
        head, k = self._head, self._request.top_k
        if not k:
            return None
        ids, is_nan = select_support(logits, first=head.first, width=head.width, k=k, group=head.group)
        if is_nan:
            raise DataError(
                "TableRequest.top_k: got a NaN logit, expected numbers. Look for the step where the weights diverged."
            )
        return ids

    def _support_ids(self, best: Int[Tensor, "row best"] | None, rows: slice) -> Int[Tensor, "row k"]:
        request = self._request
        if request.support_ids is not None:
            return request.support_ids[rows]
        return request.own_ids.new_empty(rows.stop - rows.start, 0) if best is None else best

    def _read_teacher(self, rows: slice, ids: Int[Tensor, "row k"]) -> RowStats | None:
        """The teacher's rows at the ids of the support."""
        teacher = self._request.teacher
        if teacher is None:
            return None
        head, hidden = teacher.head, teacher.hidden.detach()[rows].to(self.dtype)
        none = ids.new_empty(len(ids), 0)
        if self._request.full is None:
            part = self._scan_tiles(hidden, head, ids=ids, own_ids=none)
        else:
            logits = self._teacher_logits[: len(hidden)]
            project(hidden, head, first=0, out=logits[:, : head.width])
            part = self._scan(logits, head, first=0, width=head.width, ids=ids, own_ids=none)
        return row_stats(over_group(part, group=head.group), support_ids=ids)

    def _scan_tiles(
        self,
        hidden: Float[Tensor, "row hidden"],
        head: Head,
        *,
        ids: Int[Tensor, "row k"],
        own_ids: Int[Tensor, "row one"],
    ) -> Partial:
        """What this process's columns say, projected a tile at a time."""
        logits = self._tile[: len(hidden)]
        found: Partial | None = None
        for columns in row_chunks(head.width, step=TILE_COLUMNS):
            width = columns.stop - columns.start
            project(hidden, head, first=columns.start, out=logits[:, :width])
            part = self._scan(logits, head, first=columns.start, width=width, ids=ids, own_ids=own_ids)
            found = part if found is None else merge(found, part)
        assert found is not None
        return found

    def _scan(
        self,
        logits: Float[Tensor, "row wide"],
        head: Head,
        *,
        first: int,
        width: int,
        ids: Int[Tensor, "row k"],
        own_ids: Int[Tensor, "row one"],
    ) -> Partial:
        support, own = (columns_of(part, first=head.first + first, width=width) for part in (ids, own_ids))
        has_moment = self._request.entropy and own_ids.shape[1] > 0
        return scan(logits, width=width, support=support, own=own, has_moment=has_moment)

    def _side(self, logits: Float[Tensor, "row wide"], stats: RowStats) -> Side:
        return Side(logits=logits[: len(stats.normaliser)], normaliser=stats.normaliser, width=self._head.width)


def even_step(rows: int, *, most: int) -> int:
    """Rows of a chunk, at most `most` but 1, so that the last chunk is about as long as the others."""
    most = max(1, most)
    return -(-rows // -(-rows // most)) if rows else 1


def row_chunks(rows: int, *, step: int) -> Iterator[slice]:
    """Slices of `step` rows; of no row one empty slice, so that results have their shape."""
    return (slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step))
