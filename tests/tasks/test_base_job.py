"""The entry point of a base's job: weights once, each probe once, one line on a failure that a retry forgets."""

import json
from pathlib import Path

import pytest

from data_prep.prepare import prepare_dataset
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.base_specs import AnyBaseSpec, BaseSpec, PlacedBaseSpec, ShapeSpec
from sdpo_core.journal import Store, read_json, write_json
from sdpo_core.specs import CellSpec, EvaluationSpec, ProbeSpec
from tasks.base_job import main
from tests.sdpo_core.micro import load_model, make_base

# Room for a prompt in bytes with a demonstration or feedback.
POSITIONS = 512
PLACED = PlacedBaseSpec(
    name="micro",
    folder="Micro-1",
    shape=ShapeSpec(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_positions=POSITIONS,
    ),
    vocab_size=262,
)
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


def _declare(home: Path, base: AnyBaseSpec, *, probe: ProbeSpec) -> None:
    spec = {"fingerprint": "base", "spec": base.model_dump(mode="json"), "probes": [probe.model_dump(mode="json")]}
    write_json(Store(home).bases / "base" / "spec.json", spec)


def _main(home: Path) -> int:
    return main(["--home", str(home), "--fingerprint", "base"])


def test_base_is_made_once_and_probed_as_declared(tmp_path: Path, words: dict[str, str], cell_spec: CellSpec) -> None:
    folder, data = tmp_path / "bases" / "base", tmp_path / "data" / "spell_backward"
    assert isinstance(cell_spec.base, BaseSpec)
    shape = cell_spec.base.shape.model_copy(update={"max_positions": POSITIONS})
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


def _place(home: Path) -> Path:
    """A model in the store, where the user puts it."""
    place = Store(home).models / PLACED.folder
    make_base(place)
    config = json.loads((place / "config.json").read_text()) | {"max_position_embeddings": POSITIONS}
    (place / "config.json").write_text(json.dumps(config))
    return place


def test_placed_base_is_taken_in_and_probed(tmp_path: Path, words: dict[str, str]) -> None:
    folder, data = tmp_path / "bases" / "base", tmp_path / "data" / "spell_backward"
    data.mkdir(parents=True)
    for name, text in words.items():
        (data / name).write_text(text)
    _declare(tmp_path, PLACED, probe=_probe(4))
    assert _main(tmp_path) == 1
    error = read_json(folder / "error.json")["error"]
    assert error.startswith(f"base micro: model {tmp_path / 'models' / 'Micro-1'}: got no config.json, ")
    assert error.endswith("Place micro there, as its hub has it.")

    place = _place(tmp_path)
    assert _main(tmp_path) == 0
    assert not (folder / "error.json").exists()
    made = read_json(folder / "base.json")
    model = load_model(place)
    assert made["weights_digest"] == weights_sha256(model.weights())
    assert made["parameters"] == sum(value.numel() for value in model.weights().values())
    assert (made["fingerprint"], made["vocab_size"], made["seconds"]) == ("base", 259, None)
    assert read_json(folder / "probe-spell_backward.json")["dev_problems"] == 2
    assert not (folder / "model").readlink().is_absolute(), "a store can be moved"
    assert (folder / "model").resolve() == place.resolve()


def test_placed_base_made_anew_leaves_the_users_folder(tmp_path: Path) -> None:
    place = _place(tmp_path)
    write_json(
        Store(tmp_path).bases / "base" / "spec.json",
        {"fingerprint": "base", "spec": PLACED.model_dump(mode="json"), "probes": []},
    )
    assert _main(tmp_path) == 0
    before = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    (tmp_path / "bases" / "base" / "base.json").unlink()
    assert _main(tmp_path) == 0
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == before


def test_placed_base_of_another_shape_fails_with_what_differs(tmp_path: Path) -> None:
    _place(tmp_path)
    wide = PLACED.model_copy(update={"shape": PLACED.shape.model_copy(update={"hidden_size": 64})})
    _declare(tmp_path, wide, probe=_probe(4))
    assert _main(tmp_path) == 1
    assert "got hidden_size 32 for 64, expected micro" in read_json(tmp_path / "bases" / "base" / "error.json")["error"]
    assert not (tmp_path / "bases" / "base" / "base.json").exists()
