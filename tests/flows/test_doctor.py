"""What doctor finds, and what of it stops a run."""

import importlib.metadata
import shutil
from pathlib import Path

import psutil
import pytest

from experiments.profiles import PROFILES
from flows import machine
from flows.doctor import Finding, examine
from sdpo_core import extras


def _findings(home: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(home)}


def test_doctor_blocks_nothing_here_and_names_every_profile(tmp_path: Path) -> None:
    findings = _findings(tmp_path / "home")
    assert not any(finding.blocks for finding in findings.values())
    assert findings["torch"].state == importlib.metadata.version("torch")
    assert {f"profile {name}" for name in PROFILES} <= set(findings)
    for name in ("tiny", "smoke"):
        assert findings[f"profile {name}"].state == "runs here"


def test_doctor_says_what_each_profile_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "transformer_engine")
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "gpus", lambda: 1)
    monkeypatch.setenv("SDPO_SGLANG_PYTHON", str(tmp_path / "python"))
    findings = _findings(tmp_path)
    assert findings["extra megatron"].state == "installed"
    assert findings["extra transformer_engine"].advice.endswith("(for smoke-megatron-2gpu, qwen3-4b-2gpu)")
    assert findings["profile tiny-megatron-tp2"].state == "runs here"
    qwen = findings["profile qwen3-4b-2gpu"]
    assert qwen.state == "lacks 4 cores, 2 GPUs, extra transformer_engine, extra sglang, model qwen3-4b"
    assert qwen.advice.endswith(f"; place the model at {tmp_path / 'models' / 'Qwen3-4B'}")
    sglang = findings["profile smoke-sglang"]
    assert (sglang.state, sglang.advice) == ("lacks extra sglang", "make sglang-env")

    (tmp_path / "python").touch()
    monkeypatch.setattr(extras, "is_installed", lambda _: False)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "gpus", lambda: 2)
    (tmp_path / "models" / "Qwen3-4B").mkdir(parents=True)
    findings = _findings(tmp_path)
    assert findings["profile qwen3-4b-2gpu"].state == "lacks extra megatron, extra transformer_engine"
    tp2 = findings["profile tiny-megatron-tp2"]
    assert (tp2.state, tp2.advice) == ("lacks extra megatron", ".venv/bin/pip install -e '.[megatron]'")
    assert findings["profile tiny"].state == "runs here"
    assert findings["extra sglang"].state == "installed"
    assert findings["profile smoke-sglang"].state == "runs here"


def test_doctor_blocks_on_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def without_ray(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ray)
    (blocking,) = (finding for finding in examine(tmp_path) if finding.blocks)
    assert (blocking.what, blocking.state) == ("ray", "not installed")
    assert blocking.advice


def test_doctor_blocks_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (blocking,) = (finding for finding in examine(tmp_path) if finding.blocks)
    assert blocking.what == "disk"
    assert "SDPO_HOME" in blocking.advice
