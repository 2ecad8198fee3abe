"""Which rows of a sequence a rank of a context-parallel group holds, and how ranks exchange rows.

The positions of a padded sequence are cut into 2 n equal chunks for n ranks; rank r holds chunks r and 2 n - 1 - r
("zigzag": every rank gets the same share of causal attention). A student and its teacher have prompts of different
lengths, so their rows of one token lie on different ranks: tables travel by `exchange_rows`, logits never.
Source: notation.md, "Context parallel".
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Int, Num
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.errors import DataError, SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class Zigzag:
    """The layout of one padded sequence over `size` ranks.

    Raises:
        SpecError: the length is not a positive multiple of 2 size.
    """

    padded_length: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.padded_length < 1 or self.padded_length % (2 * self.size):
            raise SpecError(
                f"Zigzag: got {self.padded_length} positions for {self.size} ranks, expected a positive multiple of "
                f"{2 * self.size}. Pad the sequence."
            )

    @property
    def chunk(self) -> int:
        """Positions of one chunk."""
        return self.padded_length // (2 * self.size)

    def owner(self, position: int) -> int:
        """The rank that holds a position.

        Raises:
            DataError: there is no such position.
        """
        if not 0 <= position < self.padded_length:
            raise DataError(f"Zigzag: got position {position}, expected 0 to {self.padded_length - 1}.")
        chunk = position // self.chunk
        return min(chunk, 2 * self.size - 1 - chunk)

    def positions(self, rank: int) -> Int[Tensor, " position"]:
        """Positions that a rank holds, in the order in which it holds them: ascending.

        Raises:
            SpecError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise SpecError(f"Zigzag: got rank {rank}, expected 0 to {self.size - 1}.")
        low, high = rank * self.chunk, (2 * self.size - 1 - rank) * self.chunk
        step = torch.arange(self.chunk)
        return torch.cat([low + step, high + step])


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRows:
    """Response rows a rank holds: their numbers in the response, and their places among the rank's positions."""

    rows: Int[Tensor, " row"]
    places: Int[Tensor, " row"]


def owned_rows(layout: Zigzag, *, prompt_length: int, response_length: int, rank: int) -> OwnedRows:
    """The rows of the response that a rank holds, ascending; over the ranks each row occurs once.

    Row t of the response is predicted at position prompt_length - 1 + t. A rank may hold none.

    Raises:
        DataError: no prompt, a negative length, or more tokens than positions.
    """
    first = _first_position(layout, prompt_length=prompt_length, response_length=response_length)
    held = layout.positions(rank)
    places = ((held >= first) & (held < first + response_length)).nonzero()[:, 0]
    return OwnedRows(rows=held[places] - first, places=places)


def last_row_owner(layout: Zigzag, *, prompt_length: int, response_length: int) -> int:
    """The rank that holds the response's last row, where a terminal reward belongs; not always rank 0.

    Raises:
        DataError: no prompt, no response, or more tokens than positions.
    """
    first = _first_position(layout, prompt_length=prompt_length, response_length=response_length)
    if response_length == 0:
        raise DataError("last_row_owner: got a response of 0 tokens, expected at least 1.")
    return layout.owner(first + response_length - 1)


def exchange_rows(
    local: Num[Tensor, "row column"], rows: Int[Tensor, " row"], *, total: int, group: ProcessGroup
) -> Num[Tensor, "token column"]:
    """All `total` rows of a table of which each rank of the group holds some; the same on every rank, no gradient.

    Every rank takes part, also one that holds no row, with a table of 0 rows of the same dtype and columns. Each rank
    fills its rows of a table of zeros, and the tables are added up: of disjoint rows the sum is exact, and -inf stays.

    Args:
        local: [row, column] the rows this rank holds.
        rows: [row] their numbers in the whole.
        total: rows of the whole, over all ranks.
        group: the context-parallel group.

    Raises:
        DataError: on all ranks, after the exchange, if a row is held by no rank or by several; on a rank whose number
            of a row is out of range.
    """
    rows = rows.to(local.device)
    is_inside = (rows >= 0) & (rows < total)
    # A column of ones counts the ranks that hold a row, in the one collective that runs whatever the data are.
    marked = torch.cat([local.detach(), torch.ones_like(local[:, :1])], dim=1)
    whole = marked.new_zeros(total, marked.shape[1]).index_add_(0, rows[is_inside], marked[is_inside])
    dist.all_reduce(whole, group=group)
    count = whole[:, -1]
    if not is_inside.all() or (count != 1).any():
        faulty = (count != 1).nonzero()[:, 0].tolist()
        raise DataError(
            f"exchange_rows: got rows {faulty or rows[~is_inside].tolist()} of {total} held by no rank or by several, "
            "expected each to be held once. Take the rows of `owned_rows` on every rank."
        )
    return whole[:, :-1]


def _first_position(layout: Zigzag, *, prompt_length: int, response_length: int) -> int:
    if prompt_length < 1 or response_length < 0 or prompt_length + response_length > layout.padded_length:
        raise DataError(
            f"context parallel: got a prompt of {prompt_length} and a response of {response_length} tokens for "
            f"{layout.padded_length} positions, expected a prompt of at least 1 and both to fit. Pad the sequence."
        )
    return prompt_length - 1
