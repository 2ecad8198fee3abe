"""What a backend cannot do is refused in one message, before its module is imported."""

import pytest

from sdpo_core.backends import table
from sdpo_core.backends.table import BACKENDS, Backend, backend, backend_extras, backend_faults, check_backend
from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import CellSpec

ABSENT = Extra(name="later", module="no_such_package.core", install="pip install later")
LAID_OUT = LayoutSpec(tensor=2, sequence=True, recompute=True, kernels="transformer_engine")


def test_backend_refuses_all_that_it_cannot_do_at_once() -> None:
    with pytest.raises(SpecError) as raised:
        check_backend("hf", layouts=(LayoutSpec(), LAID_OUT), dtype="bfloat16")
    assert str(raised.value) == (
        "backend: got a layout of 2 processes for backend 'hf', expected one process; "
        "got dtype 'bfloat16' for backend 'hf', expected float32; "
        "got kernels 'transformer_engine' for backend 'hf', expected torch; "
        "got sequence, recompute for backend 'hf', expected no switch. Choose another backend, or change the profile."
    )


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="got backend 'jax', expected one of hf, megatron"):
        check_backend("jax", layouts=(LAID_OUT,), dtype="bfloat16")


def test_megatron_takes_every_switch_and_both_dtypes() -> None:
    switches = {name: True for name, field in LayoutSpec.model_fields.items() if field.annotation is bool}
    assert set(switches) == set(BACKENDS["megatron"].switches)
    layout = LayoutSpec.model_validate({"tensor": 2, **switches})
    assert list(backend_faults("megatron", layouts=(layout,), dtype="bfloat16")) == []


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of one process whose extra is nowhere installed."""
    entry = table.BackendEntry(module="no.module", dtypes=("float32",), kernels={"torch": None}, extra=ABSENT)
    monkeypatch.setattr(table, "BACKENDS", {"later": entry})


@pytest.mark.usefixtures("absent")
def test_missing_extra_is_refused_with_everything_else(cell_spec: CellSpec) -> None:
    assert list(backend_faults("later", layouts=(LayoutSpec(),), dtype="float32")) == []
    with pytest.raises(SpecError) as raised:
        check_backend("later", layouts=(LayoutSpec(),), dtype="bfloat16")
    assert "got dtype 'bfloat16' for backend 'later', expected float32; got no module no_such_package.core, " in str(
        raised.value
    )
    assert "(install it: pip install later)" in str(raised.value)
    with pytest.raises(SpecError, match="got no module no_such_package"):
        backend(cell_spec.model_copy(update={"backend": "later"}))


def test_kernels_bring_what_they_need() -> None:
    wanted = backend_extras("megatron", layouts=(LayoutSpec(), LAID_OUT))
    assert [extra.module for extra in wanted] == ["megatron.core", "transformer_engine"]
    assert [extra.name for extra in backend_extras("megatron", layouts=(LayoutSpec(),))] == ["megatron"]
    assert backend_extras("hf", layouts=(LAID_OUT,)) == backend_extras("jax", layouts=(LAID_OUT,)) == ()


def test_worker_loads_what_fits_and_refuses_what_does_not(cell_spec: CellSpec) -> None:
    assert isinstance(backend(cell_spec), Backend)
    for field in ("layout", "scorer_layout"):
        with pytest.raises(SpecError, match="got a layout of 2 processes for backend 'hf'"):
            backend(cell_spec.model_copy(update={field: LayoutSpec(context=2)}))
