"""The entry point of a base's job: weights once, each probe once, one line on a failure that a retry forgets."""

from pathlib import Path

import pytest

from data_prep.prepare import prepare_dataset
from sdpo_core.base_specs import BaseSpec
from sdpo_core.journal import Store, read_json, write_json
from sdpo_core.specs import CellSpec, EvaluationSpec, ProbeSpec
from tasks.base_job import main

EVALUATION = EvaluationSpec(samples_per_problem=1, temperature=1.0, dev_problems=2, test_problems=2)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few rows of each split of spell_backward."""
    home = tmp_path_factory.mktemp("words")
    prepare_dataset("spell_backward", home=home)
    return {
        path.name: "".join(path.read_text().splitlines(keepends=True)[:20])
        for path in (home / "data" / "spell_backward").glob("*.jsonl")
    }


def _probe(response_tokens: int) -> ProbeSpec:
    return ProbeSpec(
        dataset="spell_backward",
        evaluation=EVALUATION,
        max_response_tokens=response_tokens,
        feedback_level="diagnostic",
    )


def _declare(home: Path, base: BaseSpec, *, probe: ProbeSpec) -> None:
    spec = {"fingerprint": "base", "spec": base.model_dump(mode="json"), "probes": [probe.model_dump(mode="json")]}
    write_json(Store(home).bases / "base" / "spec.json", spec)


def _main(home: Path) -> int:
    return main(["--home", str(home), "--fingerprint", "base"])


def test_base_is_made_once_and_probed_as_declared(tmp_path: Path, words: dict[str, str], cell_spec: CellSpec) -> None:
    folder, data = tmp_path / "bases" / "base", tmp_path / "data" / "spell_backward"
    # Room for a prompt in bytes with a demonstration or feedback.
    shape = cell_spec.base.shape.model_copy(update={"max_positions": 512})
    base = cell_spec.base.model_copy(update={"shape": shape})
    _declare(tmp_path, base, probe=_probe(4))
    data.mkdir(parents=True)
    for name in ("train.jsonl", "dev.jsonl", "test.jsonl", "warmup.jsonl"):
        (data / name).touch()
    assert _main(tmp_path) == 1
    error = read_json(folder / "error.json")["error"]
    assert error.startswith("base tiny: got ")
    assert not (folder / "base.json").exists()

    for name, text in words.items():
        (data / name).write_text(text)
    assert _main(tmp_path) == 0
    assert not (folder / "error.json").exists()
    made = read_json(folder / "base.json")
    assert made["fingerprint"] == "base"
    assert made["parameters"] > 0
    assert len(made["losses"]) == base.warmup.steps
    probed = read_json(folder / "probe-spell_backward.json")
    assert (probed["dev_problems"], probed["test_problems"], probed["probe"]) == (
        2,
        2,
        _probe(4).model_dump(mode="json"),
    )

    weights = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    _declare(tmp_path, base, probe=_probe(5))
    assert _main(tmp_path) == 0
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == weights
    assert read_json(folder / "base.json") == made
    assert read_json(folder / "probe-spell_backward.json")["probe"]["max_response_tokens"] == 5
