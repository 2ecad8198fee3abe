"""Reads what a request asks for, one chunk of tokens at a time, into buffers that hold the logits of a chunk only.

Source: notation.md, "Fused head".
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtyping import Float, Float64, Int
from torch import Tensor

from sdpo_core.errors import DataError
from sdpo_core.objectives.chunk_gradient import FullSlope, RowGradients, write_gradient
from sdpo_core.objectives.chunks import RowStats, columns_of, combine, row_stats, scan, select_support, spare_width
from sdpo_core.objectives.full_divergence import FullStats, Side, full_stats
from sdpo_core.objectives.head import Head, compute_dtype, project
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates

# Logits held at once, of student and teacher together: docs/decisions/0007-fused-head.md.
CHUNK_NUMBERS = 128 * 152_064
# Columns of a teacher's logits held at once where only its tables are wanted.
TILE_COLUMNS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is known of a chunk's rows once its logits are gone; with the logits again, enough for the gradient.

    `support` and `own` are columns; `shift` and `teacher_shift` were taken off the logits in the buffers.
    """

    rows: slice
    ids: Int[Tensor, "row k"]
    best: Int[Tensor, "row best"] | None
    support: Int[Tensor, "row k"]
    own: Int[Tensor, "row 1"]
    stats: RowStats
    shift: Float64[Tensor, " row"]
    teacher: RowStats | None
    teacher_shift: Float64[Tensor, " row"] | None
    full: FullStats | None


class ChunkReader:
    """The buffers, and hidden states, head and (checked) request they are read with."""

    def __init__(self, hidden: Float[Tensor, "token hidden"], head: Head, request: TableRequest) -> None:
        self._hidden, self._head, self._request = hidden.detach(), head, request
        self.dtype = compute_dtype(hidden, head)
        # The share's rows and not its valid ids: all processes must cut the tokens alike.
        per_token = spare_width(len(head.weight)) * (1 if request.full is None else 2)
        self._step = max(1, min(CHUNK_NUMBERS // per_token, len(hidden)))
        self._logits = self._buffer(head.width)
        if request.teacher is not None:
            columns = head.width if request.full else min(TILE_COLUMNS, request.teacher.head.width)
            self._teacher_logits = self._buffer(columns)

    def _buffer(self, width: int) -> Float[Tensor, "row wide"]:
        return self._hidden.new_empty(self._step, spare_width(width), dtype=self.dtype)

    def chunks(self) -> Iterator[slice]:
        """Rows of each chunk; of no token one empty chunk, so that results have their shape."""
        tokens = len(self._hidden)
        return (slice(start, min(start + self._step, tokens)) for start in range(0, max(1, tokens), self._step))

    def hidden(self, rows: slice) -> Float[Tensor, "row hidden"]:
        """The chunk's hidden states in the dtype of the projection."""
        return self._hidden[rows].to(self.dtype)

    def read(self, rows: slice) -> Reading:
        """Project the chunk and read its rows; the buffers hold its shifted logits afterwards."""
        head, request = self._head, self._request
        logits = self._project(rows)
        best = self._best_ids(logits)
        ids = self._support_ids(best, rows)
        own_ids = request.own_ids[rows, None]
        support, own = (columns_of(part, first=head.first, width=head.width) for part in (ids, own_ids))
        partial, shift = scan(logits, width=head.width, support=support, own=own, has_moment=request.entropy)
        stats = row_stats(combine([partial], group=head.group), support_ids=ids)
        teacher = teacher_shift = full = None
        if request.teacher is not None:
            teacher, teacher_shift = self._read_teacher(request.teacher, rows, ids)
            if request.full is not None:
                sides = self._side(rows, stats, shift), self._teacher_side(rows, teacher, teacher_shift)
                full = full_stats(*sides, request.full, group=head.group)
        return Reading(
            rows=rows,
            ids=ids,
            best=None if request.support_ids is None else best,
            support=support,
            own=own,
            stats=stats,
            shift=shift,
            teacher=teacher,
            teacher_shift=teacher_shift,
            full=full,
        )

    def project_again(self, reading: Reading) -> None:
        """Bring the buffers back to where `read` left them; no collective."""
        self._project(reading.rows)[:, : self._head.width].sub_(reading.shift[:, None].to(self.dtype))
        if reading.full is not None and self._request.teacher is not None and reading.teacher_shift is not None:
            logits = self._project_teacher(self._request.teacher, reading.rows)
            logits[:, : self._head.width].sub_(reading.teacher_shift[:, None].to(self.dtype))

    def logit_gradient(self, reading: Reading, gradients: RowGradients) -> Float[Tensor, "row column"]:
        """The gradient on the chunk's logits, in place of them: the buffers must be as `read` left them."""
        head, rows = self._head, reading.rows
        logits = self._logits[: len(reading.ids)]
        full = None
        if self._request.full and reading.full and reading.teacher and reading.teacher_shift is not None:
            side = self._teacher_side(rows, reading.teacher, reading.teacher_shift)
            full = FullSlope(full=self._request.full, teacher=side, slope=reading.full.slope)
        write_gradient(
            logits,
            gradients,
            width=head.width,
            shift=reading.shift,
            stats=reading.stats,
            support=reading.support,
            own=reading.own,
            full=full,
            cap=None if head.soft_cap is None else head.soft_cap / head.temperature,
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

    def _project(self, rows: slice) -> Float[Tensor, "row wide"]:
        logits = self._logits[: rows.stop - rows.start]
        project(self.hidden(rows), self._head, first=0, out=logits[:, : self._head.width])
        return logits

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

    def _read_teacher(
        self, teacher: TeacherStates, rows: slice, ids: Int[Tensor, "row k"]
    ) -> tuple[RowStats, Float64[Tensor, " row"]]:
        """The teacher's rows at the ids of the support, its columns a tile at a time unless all are needed."""
        head, none = teacher.head, ids.new_empty(len(ids), 0)
        parts = []
        tile = self._teacher_logits.shape[1] - 1 if self._request.full is None else head.width
        for start in range(0, max(1, head.width), max(1, tile)):
            width = min(tile, head.width - start)
            logits = self._project_teacher(teacher, rows, start=start, width=width)
            columns = columns_of(ids, first=head.first + start, width=width)
            part, shift = scan(logits, width=width, support=columns, own=none)
            parts.append(part)
        return row_stats(combine(parts, group=head.group), support_ids=ids), shift

    def _project_teacher(
        self, teacher: TeacherStates, rows: slice, *, start: int = 0, width: int | None = None
    ) -> Float[Tensor, "row wide"]:
        width = teacher.head.width if width is None else width
        logits = self._teacher_logits[: rows.stop - rows.start]
        hidden = teacher.hidden.detach()[rows].to(self.dtype)
        project(hidden, teacher.head, first=start, out=logits[:, :width])
        return logits

    def _side(self, rows: slice, stats: RowStats, shift: Float64[Tensor, " row"]) -> Side:
        logits = self._logits[: rows.stop - rows.start]
        return Side(logits=logits, offset=stats.normaliser - shift, width=self._head.width)

    def _teacher_side(self, rows: slice, stats: RowStats, shift: Float64[Tensor, " row"]) -> Side:
        logits = self._teacher_logits[: rows.stop - rows.start]
        return Side(logits=logits, offset=stats.normaliser - shift, width=self._head.width)
