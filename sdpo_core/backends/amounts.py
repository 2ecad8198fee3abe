"""Amounts by name that tokens, micro-batches and processes put together: sums, and the largest of `largest_*`."""

import math
from collections.abc import Mapping

_LARGEST = "largest_"


def put_together(total: dict[str, float], amounts: Mapping[str, float]) -> None:
    """Add `amounts` to `total`; of a name that begins with `largest_` the larger one stays, and NaN before all."""
    for name, amount in amounts.items():
        if name.startswith(_LARGEST):
            known = total.get(name, amount)
            total[name] = math.nan if math.isnan(known) or math.isnan(amount) else max(known, amount)
        else:
            total[name] = total.get(name, 0.0) + amount
