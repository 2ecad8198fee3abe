"""Records whose fields have one entry a row: tensors, records of the same kind, or None."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

Record = TypeVar("Record")


def cut(record: Record, rows: slice) -> Record:
    """Some of the rows."""
    return _mapped([record], lambda values: values[0][rows], lambda values: cut(values[0], rows))


def join(records: Sequence[Record]) -> Record:
    """The rows of all records, in order. They have the same fields set."""
    return _mapped(records, torch.cat, join)


def _mapped(records: Sequence[Record], on_tensors: Any, on_records: Any) -> Record:
    found: dict[str, Any] = {}
    for field in fields(records[0]):  # type: ignore[arg-type]
        values = [getattr(record, field.name) for record in records]
        if values[0] is None:
            found[field.name] = None
        else:
            found[field.name] = (on_tensors if isinstance(values[0], Tensor) else on_records)(values)
    return type(records[0])(**found)
