"""A folder's digest is that of the worker that holds its weights; a placed model is the declared one or refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sdpo_core import model_folder
from sdpo_core.backends import hf_model
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.base_specs import PlacedBaseSpec, ShapeSpec
from sdpo_core.errors import DataError
from sdpo_core.model_folder import placed_model, weights_digest
from tests.sdpo_core.micro import MAX_POSITIONS, load_model, make_base

SHAPE = ShapeSpec(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=MAX_POSITIONS,
)
PLACED = PlacedBaseSpec(name="micro", folder="micro", shape=SHAPE, vocab_size=262)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder: tied embeddings, float32, one file."""
    made = tmp_path / "micro"
    make_base(made)
    return made


def _cut(folder: Path) -> None:
    """The same weights in several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()


def _narrow(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def _untied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")


def _with_a_tied_head(folder: Path) -> None:
    """As some hubs have it: the embedding a second time, under the head's name."""
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")


@pytest.mark.parametrize("change", [lambda _: None, _cut, _narrow, _untied, _with_a_tied_head])
def test_weights_digest_is_that_of_the_loaded_model(
    folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the model being loaded: one of billions of parameters would not fit."""
    plain = weights_digest(folder)
    change(folder)
    expected = weights_sha256(load_model(folder).weights())
    monkeypatch.delattr(model_folder, "HfModel")
    assert weights_digest(folder) == expected
    assert (expected == plain) == (change not in (_narrow, _untied))


def test_weights_have_one_digest_in_every_dtype_that_holds_them(folder: Path) -> None:
    _narrow(folder)
    narrow, wide = (load_model(folder, dtype=dtype).weights() for dtype in (torch.bfloat16, torch.float32))
    assert weights_sha256(narrow) == weights_sha256(wide) == weights_digest(folder)


def test_digest_does_not_depend_on_how_much_is_read_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights_digest(folder)
    monkeypatch.setattr(hf_model, "_DIGEST_VALUES", 7)
    assert weights_digest(folder) == whole


def test_weights_under_other_names_are_loaded_to_be_known(folder: Path) -> None:
    """Saved without the head, a model's names lack their common start."""
    plain = weights_digest(folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert weights_digest(folder) == plain


def test_placed_model_is_known_without_being_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder)
    monkeypatch.delattr(model_folder, "HfModel")
    sha256 = weights_sha256(model.weights())
    for declared in (None, sha256):
        facts = placed_model(folder, PLACED.model_copy(update={"sha256": declared}))
        assert facts.weights_sha256 == sha256
        assert facts.parameters == sum(value.numel() for value in model.weights().values())
        assert facts.vocab_size == 259


def test_placed_model_that_is_another_is_refused_with_all_that_differs(folder: Path) -> None:
    other = SHAPE.model_copy(update={"num_layers": 3, "num_kv_heads": 4, "max_positions": 512})
    with pytest.raises(DataError) as raised:
        placed_model(folder, PLACED.model_copy(update={"shape": other, "vocab_size": 258}))
    for part in (
        f"model {folder}: got ",
        "num_hidden_layers 2 for 3",
        "num_key_value_heads 2 for 4",
        "max_position_embeddings 256 for 512",
        "vocab_size 262 for 258",
        "a tokenizer of 259 ids for 258 rows",
        "expected micro as the profile declares it",
    ):
        assert part in str(raised.value)
    assert "hidden_size" not in str(raised.value)


def test_placed_model_with_other_weights_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=f"got weights {weights_digest(folder)} for {'a' * 64}"):
        placed_model(folder, PLACED.model_copy(update={"sha256": "a" * 64}))


def test_placed_model_that_is_not_there_says_where_it_belongs(folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=rf"model {folder}: got no config\.json, .*Place micro there"):
        placed_model(folder, PLACED)
