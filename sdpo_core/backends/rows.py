"""From rows to the flattened tokens of a micro-batch, and back."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sdpo_core.backends.base import TokenBatch, TokenRow, TrainRow

# Field of `TrainRow` to field of `TokenBatch`.
_COLUMNS = {
    "advantages": "advantage",
    "old_logps": "old_logp",
    "sampling_logps": "sampling_logp",
    "teacher_logps": "teacher_logp",
    "teacher_own_logps": "teacher_own_logp",
    "anchor_logps": "anchor_logp",
    "old_values": "old_value",
    "returns": "returns",
}


def own_ids(rows: Sequence[TokenRow], *, device: torch.device) -> Int[Tensor, " token"]:
    """The responses' own tokens, flattened."""
    return torch.tensor([token for row in rows for token in row.response_ids], dtype=torch.long, device=device)


def token_numbers(rows: Sequence[TokenRow], chosen: Sequence[int], *, device: torch.device) -> Int[Tensor, " token"]:
    """Numbers of the `chosen` rows' tokens among the tokens of all `rows`."""
    starts = np.cumsum([0, *(len(row.response_ids) for row in rows)])
    numbers = [np.arange(starts[index], starts[index + 1]) for index in chosen]
    return torch.from_numpy(np.concatenate([np.arange(0), *numbers])).to(device)


def split_rows(columns: Mapping[str, Tensor], rows: Sequence[TokenRow]) -> Iterator[dict[str, np.ndarray]]:
    """Columns of all tokens as the arrays of each row; floats leave as float32."""
    cuts = np.cumsum([len(row.response_ids) for row in rows])[:-1]
    parts = {
        name: np.split((column.float() if column.is_floating_point() else column).cpu().numpy(), cuts)
        for name, column in columns.items()
    }
    for index in range(len(rows)):
        yield {name: arrays[index] for name, arrays in parts.items()}


def kinds(rows: Sequence[TrainRow]) -> Iterator[list[TrainRow]]:
    """Rows that have the same fields, so that each field is there for all of their tokens or for none."""
    alike: dict[tuple[str, ...], list[TrainRow]] = {}
    for row in rows:
        alike.setdefault(tuple(sorted(row.arrays())), []).append(row)
    return (alike[kind] for kind in sorted(alike))


def stacked(rows: Sequence[TrainRow], name: str) -> Tensor | None:
    """One field of all rows, token after token; None where rows of this kind do not have it."""
    arrays = [row.arrays()[name] for row in rows if name in row.arrays()]
    return torch.cat([torch.from_numpy(array) for array in arrays]) if arrays else None


def constant_columns(rows: Sequence[TrainRow]) -> dict[str, Tensor]:
    """The fields of a `TokenBatch` that carry no gradient, on the CPU."""
    lengths = torch.tensor([len(row.row.response_ids) for row in rows])

    def spread(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths)

    columns = {
        "weight": spread([row.weight for row in rows]),
        "distill_weight": spread([row.distill_weight for row in rows]),
        "sequence": torch.arange(len(rows)).repeat_interleave(lengths),
    }
    for field, column in _COLUMNS.items():
        values = stacked(rows, field)
        if values is not None:
            columns[column] = values
    task = [row.task_advantage for row in rows if row.task_advantage is not None]
    if task:
        columns["task_advantage"] = spread(task)
    return columns


def token_batch(constants: Mapping[str, Tensor], found: Mapping[str, Tensor], *, part: slice) -> TokenBatch:
    """Some tokens as an objective sees them. `found`: by field of `Tables`, and "value"."""
    fields = {name: column[part] for name, column in constants.items()}
    fields.setdefault("old_logp", found["logp"].detach())
    return TokenBatch(
        logp=found["logp"],
        entropy=found["entropy"].detach(),
        student_logp=found.get("support_logp"),
        divergence=found.get("divergence"),
        value=found.get("value"),
        **fields,
    )
