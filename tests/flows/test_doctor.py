"""What doctor finds, and what of it stops a run."""

import importlib.metadata
import shutil
from pathlib import Path

import pytest

from experiments.profiles import PROFILES
from flows.doctor import examine


def test_doctor_blocks_nothing_here_and_names_every_profile(tmp_path: Path) -> None:
    findings = {finding.what: finding for finding in examine(tmp_path / "home")}
    assert not any(finding.blocks for finding in findings.values())
    assert findings["torch"].state == importlib.metadata.version("torch")
    for name in PROFILES:
        assert findings[f"profile {name}"].state == "runs here"


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
