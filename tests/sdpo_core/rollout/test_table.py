"""Whom an engine can sample from is known before anything is loaded."""

from pathlib import Path

import pytest

from sdpo_core.errors import SpecError
from sdpo_core.extras import Extra
from sdpo_core.rollout import table
from sdpo_core.rollout.table import EngineModule, Repeatability, check_engine, engine, engine_faults, repeatability
from sdpo_core.sglang.address import external_servers
from sdpo_core.specs import CellSpec, SglangSpec


def test_local_samples_from_hf_alone(cell_spec: CellSpec) -> None:
    assert isinstance(engine(cell_spec), EngineModule)
    with pytest.raises(SpecError, match="engine: got engine 'local' for backend 'megatron', expected backend hf"):
        engine(cell_spec.model_copy(update={"backend": "megatron"}))


@pytest.mark.parametrize("backend", ["hf", "megatron"])
@pytest.mark.parametrize("name", ["replica", "sglang"])
def test_engine_with_weights_of_its_own_samples_from_any(name: str, backend: str) -> None:
    assert list(engine_faults(name, backend=backend)) == []


def test_sglang_needs_its_environment_or_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(tmp_path / "python"))
    with pytest.raises(SpecError, match=r"got no environment with sglang, .*install it: make sglang-env"):
        check_engine("sglang", backend="hf")
    monkeypatch.setenv("SDPO_SGLANG_URL", "http://127.0.0.1:1, http://127.0.0.1:2,")
    monkeypatch.setenv("SDPO_SGLANG_TOKEN", "word")
    check_engine("sglang", backend="hf")
    assert [(one.url, one.token) for one in external_servers()] == [
        ("http://127.0.0.1:1", "word"),
        ("http://127.0.0.1:2", "word"),
    ]
    monkeypatch.delenv("SDPO_SGLANG_URL")
    (tmp_path / "python").touch()
    check_engine("sglang", backend="hf")


@pytest.mark.parametrize(
    ("name", "is_deterministic", "expected"),
    [
        ("local", False, "exact"),
        ("replica", False, "exact"),
        ("sglang", True, "up to rounding"),
        ("sglang", False, "not repeatable"),
    ],
)
def test_rollouts_repeat_as_far_as_engine_and_device_let_them(
    cell_spec: CellSpec, name: str, is_deterministic: bool, expected: Repeatability
) -> None:
    spec = cell_spec.model_copy(update={"engine": name, "sglang": SglangSpec(deterministic=is_deterministic)})
    assert repeatability(spec, gpus=0) == expected
    assert {repeatability(spec, gpus=count) for count in (1, 2)} == {"not repeatable"}


def test_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match="got engine 'vllm', expected one of local, replica, sglang"):
        check_engine("vllm", backend="hf")


def test_missing_extra_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = Extra(name="later", module="no_such_package.core", install="pip install later")
    monkeypatch.setattr(table, "ENGINES", {"later": table.EngineEntry(module="no.module", extra=extra)})
    with pytest.raises(SpecError, match=r"engine: got no module no_such_package\.core, .*install later"):
        check_engine("later", backend="hf")
