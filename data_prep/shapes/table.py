"""The source shapes, one line each, and how a row finds its own: by its keys, never by the name of its file."""

from collections.abc import Mapping
from typing import Any

from data_prep.shapes import (
    canonical,
    sciknoweval,
    sciknoweval_prerelease,
    sciknoweval_raw,
    spell_backward,
    toolalpaca_api,
    toolalpaca_flat,
    tooluse,
)
from data_prep.shapes.base import RowRejectedError, Shape

SHAPES: tuple[Shape, ...] = (
    sciknoweval_raw.SHAPE,
    sciknoweval_prerelease.SHAPE,
    sciknoweval.SHAPE,
    tooluse.SHAPE,
    toolalpaca_api.SHAPE,
    toolalpaca_flat.SHAPE,
    spell_backward.SHAPE,
    canonical.SHAPE,
)


def recognise(row: Mapping[str, Any]) -> Shape:
    """The one shape whose keys the row has.

    Raises:
        RowRejectedError: `shape_unknown`, where no shape fits, or more than one.
    """
    fitting = [shape for shape in SHAPES if shape.has_keys(row)]
    if len(fitting) == 1:
        return fitting[0]
    keys = ", ".join(key[:40] for key in list(row)[:20])
    found = f"those of {' and of '.join(shape.name for shape in fitting)}" if fitting else "none of the known shapes"
    raise RowRejectedError("shape_unknown", f"got the keys ({keys}), {found}")
