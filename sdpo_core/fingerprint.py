"""The fingerprint of a cell: a hash of what determines its result, and of nothing else.

Spec, digests of the data and of the base weights, the teacher's own where the profile has a teacher model, and the
numerics version enter; hosts, paths and commits do not.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdpo_core.base_specs import AnyBaseSpec
from sdpo_core.errors import SpecError
from sdpo_core.layout import LayoutSpec
from sdpo_core.spec_base import Spec
from sdpo_core.specs import CellSpec, SglangSpec

# Raise it when a change of code alters numbers under an unchanged spec; cells of another version are `stale`.
NUMERICS_VERSION = 3
# The same for base weights. Apart from the other, so that cells of an older numerics version are still known by their
# base, and read `stale` instead of `missing`.
WARMUP_VERSION = 1

_HEX_DIGITS = 20
# Fields that declarations got later, with the value that all earlier ones had. Where they have it they are left out, so
# that what a store holds from before is still known by its fingerprint.
_PLAIN = LayoutSpec().model_dump(mode="json")
_LATER = (
    ("kind", "warmed_up"),
    ("layout", _PLAIN),
    ("scorer_layout", _PLAIN),
    ("sglang", SglangSpec().model_dump(mode="json")),
    ("teacher_placement", "trainer"),
    ("weights_by", "folder"),
    ("concurrency", 32),
    ("sleep", False),
    ("memory_fraction", None),
)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; a value without a stable form is refused."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"fingerprint: got a value that has no stable JSON form ({error}), expected plain data. "
            "Use numbers, text, lists and mappings in specs."
        ) from None


def digest(value: Any) -> str:
    """First 20 hex digits of the SHA-256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:_HEX_DIGITS]


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def base_fingerprint(spec: AnyBaseSpec, *, data_digests: Mapping[str, str]) -> str:
    """Fingerprint of base weights: the recipe and the data sets it is warmed up on (name to digest)."""
    return digest({"base": _content(spec), "data": dict(data_digests), "warm-up": WARMUP_VERSION})


def cell_fingerprint(
    spec: CellSpec,
    *,
    data_digest: str,
    base_digest: str,
    teacher_digest: str | None,
    numerics_version: int = NUMERICS_VERSION,
) -> str:
    """Fingerprint of a cell. `teacher_digest`: of the weights of `teacher_base`, for a cell that has one."""
    return digest(
        {
            "spec": _content(spec),
            "data": data_digest,
            "base": base_digest,
            "teacher": teacher_digest,
            "numerics": numerics_version,
        }
    )


def _content(spec: Spec) -> Any:
    return _without_later(spec.model_dump(mode="json"))


def _without_later(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_later(inner) for name, inner in value.items() if (name, inner) not in _LATER}
