"""What every test shares: a store of its own, no network, one thread a process, and a small cell to work with."""

import gc
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sdpo_core.specs import CellSpec

# Set before torch, Ray, Prefect or MLflow are imported, and inherited by every process a test starts.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


def pytest_configure() -> None:
    """Fix the environment of this process and of its children."""
    os.environ.update(_ENVIRONMENT)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What imports allocate stays: to look for garbage in it would take as long as a third of them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on only what tests allocate is looked through."""
    gc.freeze()
    gc.enable()


def _has_megatron() -> bool:
    """Not through `sdpo_core.extras`: the shape checker must be in place before sdpo_core is."""
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules for an extra that is not installed are not even imported; `make test-megatron` installs it."""
    if collection_path.suffix != ".py" or _has_megatron():
        return None
    lines = collection_path.read_text(encoding="utf-8").splitlines()
    return any(line.startswith("pytestmark") and "mark.megatron" in line for line in lines) or None


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the store of the person who runs it."""
    monkeypatch.setenv("SDPO_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def cell_spec() -> "CellSpec":
    """A small valid cell with an EMA teacher."""
    # Imported here: the shape checker must be in place before sdpo_core is.
    from sdpo_core.specs import CellSpec

    return CellSpec.model_validate(
        {
            "dataset": "spell_backward",
            "task": "spell_backward",
            "arm": "sdpo-ema",
            "profile": "tiny",
            "seed": 42,
            "algorithm": {"name": "sdpo", "teacher": {"schedule": "ema", "rate": 0.05}},
            "base": {
                "name": "tiny",
                "datasets": ["spell_backward"],
                "tokenizer": {"kind": "byte"},
                "shape": {
                    "hidden_size": 16,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 1,
                    "head_dim": 8,
                    "intermediate_size": 32,
                    "max_positions": 128,
                },
                "warmup": {
                    "steps": 2,
                    "examples_per_step": 4,
                    "learning_rate": 1e-3,
                    "lr_warmup_steps": 0,
                    "plain_share": 0.5,
                    "demonstration_share": 0.3,
                    "seed": 7,
                },
            },
            "optimizer": {"learning_rate": 1e-4},
            "training": {
                "steps": 2,
                "problems_per_step": 2,
                "rollouts_per_problem": 2,
                "temperature": 1.0,
                "max_prompt_tokens": 64,
                "max_response_tokens": 8,
                "max_teacher_prompt_tokens": 96,
                "evaluate_every": 1,
                "checkpoint_every": 1,
                "microbatch_tokens": 256,
            },
            "evaluation": {"samples_per_problem": 1, "temperature": 1.0, "dev_problems": 2, "test_problems": 2},
        }
    )
