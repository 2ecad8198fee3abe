"""The fingerprint moves with everything that determines a result, and with nothing else."""

import hashlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from sdpo_core.algorithm_specs import CheckpointWeights, FolderWeights
from sdpo_core.base_specs import PlacedBaseSpec
from sdpo_core.errors import SpecError
from sdpo_core.fingerprint import (
    NUMERICS_VERSION,
    base_fingerprint,
    canonical_json,
    cell_fingerprint,
    digest,
    file_digest,
)
from sdpo_core.layout import LayoutSpec
from sdpo_core.spec_base import Spec
from sdpo_core.specs import CellSpec

DIGESTS: dict[str, Any] = {"data_digest": "d", "base_digest": "b", "teacher_digest": None}


def _changed(value: Any) -> Any:
    """Another value of about the same kind; specs copied with it are not validated again."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, tuple):
        return (*value, "x")
    assert value is None
    return 1


def _variants(spec: Spec, *, path: str = "") -> Iterator[tuple[str, Spec]]:
    """Every copy of `spec` that differs in one leaf, with the leaf's path."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if isinstance(value, Spec):
            for inner, variant in _variants(value, path=f"{path}{name}."):
                yield inner, spec.model_copy(update={name: variant})
        else:
            yield f"{path}{name}", spec.model_copy(update={name: _changed(value)})


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_cell_fingerprint_moves_with_every_field(cell_spec: CellSpec) -> None:
    seen = {cell_fingerprint(cell_spec, **DIGESTS): "the spec itself"}
    for path, variant in _variants(cell_spec):
        assert isinstance(variant, CellSpec)
        fingerprint = cell_fingerprint(variant, **DIGESTS)
        assert fingerprint not in seen, f"{path} and {seen[fingerprint]} give one fingerprint"
        seen[fingerprint] = path
    # Reaches the leaves of every nested declaration, not only the top.
    assert {"seed", "algorithm.teacher.rate", "base.warmup.seed", "training.microbatch_tokens"} <= set(seen.values())


def test_cell_fingerprint_moves_with_digests_and_version(cell_spec: CellSpec) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"data_digest": "e"},
        {"base_digest": "c"},
        {"data_digest": "b", "base_digest": "d"},
        {"teacher_digest": "b"},
        {"numerics_version": 2},
    )
    fingerprints = {cell_fingerprint(cell_spec, **{**DIGESTS, "numerics_version": 1, **change}) for change in changes}
    assert len(fingerprints) == len(changes)


def test_cell_fingerprint_moves_with_the_teachers_weights(cell_spec: CellSpec) -> None:
    fingerprints = {cell_fingerprint(cell_spec, **DIGESTS)}
    several = (
        FolderWeights(name="qwen", sha256="a" * 64),
        FolderWeights(name="qwen", sha256="b" * 64),
        CheckpointWeights(cell="0" * 20, step="best"),
        CheckpointWeights(cell="0" * 20, step=40),
    )
    for weights in several:
        fields = cell_spec.model_dump(mode="json")
        fields["algorithm"]["teacher"]["weights"] = weights.model_dump(mode="json")
        other = CellSpec.model_validate(fields)
        assert other.teacher is not None
        assert other.teacher.weights == weights
        fingerprints.add(cell_fingerprint(other, **DIGESTS))
    assert len(fingerprints) == 1 + len(several)


def test_cell_fingerprint_survives_a_round_trip(cell_spec: CellSpec) -> None:
    again = CellSpec.model_validate_json(cell_spec.model_dump_json())
    assert cell_fingerprint(again, **DIGESTS) == cell_fingerprint(cell_spec, **DIGESTS)


def test_what_a_store_holds_from_before_layouts_is_still_known(cell_spec: CellSpec) -> None:
    row = cell_spec.model_dump(mode="json")
    del row["layout"], row["scorer_layout"], row["sglang"], row["teacher_placement"], row["base"]["kind"]
    assert CellSpec.model_validate(row) == cell_spec
    before = {"spec": row, "data": "d", "base": "b", "teacher": None, "numerics": NUMERICS_VERSION}
    assert cell_fingerprint(cell_spec, **DIGESTS) == digest(before)
    laid_out = cell_spec.model_copy(update={"scorer_layout": LayoutSpec(tensor=2)})
    assert cell_fingerprint(laid_out, **DIGESTS) != digest(before)


def test_base_fingerprint_moves_with_recipe_and_data(cell_spec: CellSpec) -> None:
    base = cell_spec.base
    renamed = base.model_copy(update={"name": "other"})
    fingerprints = {
        base_fingerprint(base, data_digests={"a": "1", "b": "2"}),
        base_fingerprint(base, data_digests={"a": "2", "b": "1"}),
        base_fingerprint(renamed, data_digests={"a": "1", "b": "2"}),
    }
    assert len(fingerprints) == 3
    assert base_fingerprint(base, data_digests={"b": "2", "a": "1"}) in fingerprints


def test_fingerprint_of_a_placed_base_moves_with_its_declaration(cell_spec: CellSpec) -> None:
    placed = PlacedBaseSpec(name="big", folder="big", shape=cell_spec.base.shape, vocab_size=300)
    assert placed.datasets == ()
    several = (placed, *(placed.model_copy(update=change) for change in ({"folder": "b"}, {"sha256": "a" * 64})))
    assert len({base_fingerprint(spec, data_digests={}) for spec in several}) == 3
    cell = CellSpec.model_validate({**cell_spec.model_dump(mode="json"), "base": placed.model_dump(mode="json")})
    assert cell.base == placed
    assert cell_fingerprint(cell, **DIGESTS) != cell_fingerprint(cell_spec, **DIGESTS)


def test_digest_ignores_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})


def test_digest_keeps_the_order_of_lists() -> None:
    assert digest([1, 2]) != digest([2, 1])


def test_digest_is_the_start_of_a_sha256() -> None:
    assert digest({"b": 1, "a": "x"}) == hashlib.sha256(b'{"a":"x","b":1}').hexdigest()[:20]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, Path("x"), date(2026, 1, 1)])
def test_canonical_json_refuses_what_has_no_stable_form(value: object) -> None:
    with pytest.raises(SpecError, match="expected plain data"):
        canonical_json({"value": value})


def test_file_digest_reads_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    assert file_digest(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
