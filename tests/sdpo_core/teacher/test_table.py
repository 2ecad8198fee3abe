"""Where a teacher cannot score is refused with the cell, all faults at once; the default is no part of what it is."""

from typing import Any

import pytest
from pydantic import ValidationError

from sdpo_core.fingerprint import cell_fingerprint
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.table import PLACEMENTS, PlacementModule, placement
from tests.sdpo_core.micro import ARMS, make_spec

DIGESTS: dict[str, Any] = {"data_digest": "d", "base_digest": "b", "teacher_digest": None}


def _served(spec: CellSpec, *, temperature: float = 1.0) -> CellSpec:
    fields = spec.model_dump()
    fields["training"]["temperature"] = temperature
    return CellSpec.model_validate({**fields, "teacher_placement": "sglang"})


def test_placement_refuses_all_that_it_cannot_do_at_once(cell_spec: CellSpec) -> None:
    whole = make_spec(cell_spec, arm="sdpo-trust-region", algorithm={"divergence": {"support": "full", "top_k": None}})
    with pytest.raises(ValidationError) as raised:
        _served(whole, temperature=float("inf"))
    message = str(raised.value)
    assert "teacher_placement 'sglang' at temperature inf: scores are taken at a finite one" in message
    assert "'sglang' with support 'full': the server gives no hidden states" in message
    assert "'sglang' with schedule 'trust_region': the server holds one model, not a mixture of two" in message


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_served_unless_its_teacher_cannot_be(cell_spec: CellSpec, arm: str) -> None:
    spec = make_spec(cell_spec, arm=arm)
    cannot = {"opsd", "sdpo-full", "opd-full", "sdpo-trust-region"}
    if spec.teacher is None:
        with pytest.raises(ValidationError, match="'sglang' for an arm without a teacher"):
            _served(spec)
    elif arm in cannot:
        with pytest.raises(ValidationError, match="teacher_placement 'sglang' with"):
            _served(spec)
    else:
        assert _served(spec, temperature=0.5).teacher_placement == "sglang"


def test_where_the_teacher_scores_enters_the_fingerprint_once_it_is_elsewhere(cell_spec: CellSpec) -> None:
    before = cell_fingerprint(cell_spec, **DIGESTS)
    assert cell_fingerprint(cell_spec.model_copy(update={"teacher_placement": "trainer"}), **DIGESTS) == before
    assert cell_fingerprint(_served(cell_spec), **DIGESTS) != before


@pytest.mark.parametrize("name", PLACEMENTS)
def test_module_of_a_placement_keeps_the_tables_promise(name: Any) -> None:
    assert isinstance(placement(name), PlacementModule)
