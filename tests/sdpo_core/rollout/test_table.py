"""Whom an engine can sample from is known before anything is loaded."""

import pytest

from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra
from sdpo_core.rollout import table
from sdpo_core.rollout.table import EngineModule, check_engine, engine, engine_faults
from sdpo_core.specs import CellSpec


def test_local_samples_from_hf_alone(cell_spec: CellSpec) -> None:
    assert isinstance(engine(cell_spec), EngineModule)
    with pytest.raises(SpecError, match="engine: got engine 'local' for backend 'megatron', expected backend hf"):
        engine(cell_spec.model_copy(update={"backend": "megatron"}))


@pytest.mark.parametrize("backend", ["hf", "megatron"])
def test_replica_samples_from_any(backend: str) -> None:
    assert list(engine_faults("replica", backend=backend)) == []


def test_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="got engine 'vllm', expected one of local, replica"):
        check_engine("vllm", backend="hf")


def test_missing_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = Extra(name="later", module="no_such_package.core", install="pip install later")
    monkeypatch.setattr(table, "ENGINES", {"later": table.EngineEntry(module="no.module", extra=extra)})
    with pytest.raises(SpecError, match=r"engine: got no module no_such_package\.core, .*install later"):
        check_engine("later", backend="hf")
