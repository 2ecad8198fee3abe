"""A teacher's weights by their declaration: where they lie, what is said when they do not, and whose ids they read."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sdpo_core.backends.base import WeightsAt, WorkerFacts
from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.checkpoint import DriverState, save_checkpoint
from sdpo_core.errors import CellError, DataError
from sdpo_core.journal import Store, write_json
from sdpo_core.model_folder import weights_digest
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer, build_tokenizer
from sdpo_core.workers import TeacherWorker
from tasks.teacher_weights import check_weights, teacher_weights
from tests.sdpo_core.micro import make_base

CELL = "0123456789abcdef0123"
DECLARED = {"base_fingerprint": "base", "base_digest": "b", "teacher_fingerprint": "strong", "teacher_digest": "t"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("model")
    make_base(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Store:
    """A store with the student's base."""
    store = Store(tmp_path)
    shutil.copytree(model, store.bases / "base" / "model")
    return store


def _spec(spec: CellSpec, weights: str | Mapping[str, Any], *, schedule: str = "static") -> CellSpec:
    fields = spec.model_dump(mode="json")
    fields["algorithm"]["teacher"] = {"schedule": schedule, "weights": weights}
    return CellSpec.model_validate(fields | {"teacher_base": fields["base"] if weights == "profile" else None})


def _at(store: Store, spec: CellSpec) -> WeightsAt:
    at = teacher_weights(store, spec=spec, declared=DECLARED)
    assert at is not None
    return at


def _placed(sha256: str = "a" * 64) -> dict[str, Any]:
    return {"kind": "folder", "name": "strong", "sha256": sha256}


class _Student:
    """Saves a part of a checkpoint."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    def load(self, folder: Path) -> None:
        raise AssertionError(folder)


def _finish(store: Store, *, best: int) -> None:
    """A finished cell of four steps that started from a base of its own, with the checkpoints that it keeps."""
    journal = store.journal(CELL)
    shutil.copytree(store.bases / "base", store.bases / "other")
    write_json(journal.spec_path, {"base_fingerprint": "other"})
    for step in (0, 1, 2, 3, 4):
        state = DriverState(
            step=step,
            cursor=0,
            journal_sizes={},
            best_step=min(step, best),
            best_accuracy=0.5,
            weights_sha256_start={},
            started=0.0,
            trained_seconds=0.0,
        )
        save_checkpoint(journal, state, workers={"student": _Student()})
    result = {"steps": 4, "metrics": {"test_at_best_dev/step": float(best)}}
    write_json(journal.result_path, {**result, "workers": {"student": {"weights_sha256_end": "e"}}})


def test_an_arm_without_a_teacher_has_no_weights(store: Store, cell_spec: CellSpec) -> None:
    grpo = CellSpec.model_validate(cell_spec.model_dump(mode="json") | {"algorithm": {"name": "grpo"}})
    assert teacher_weights(store, spec=grpo, declared=DECLARED) is None


def test_base_is_the_students(store: Store, cell_spec: CellSpec) -> None:
    assert _at(store, cell_spec) == WeightsAt(folder=store.bases / "base" / "model", sha256="b")


def test_profile_is_the_second_base_of_the_cell(store: Store, cell_spec: CellSpec) -> None:
    folder = store.bases / "strong" / "model"
    shutil.copytree(store.bases / "base" / "model", folder)
    assert _at(store, _spec(cell_spec, "profile")) == WeightsAt(folder=folder, sha256="t")


def test_folder_that_is_not_there_says_where_to_put_it(store: Store, cell_spec: CellSpec) -> None:
    place = store.models / "strong"
    with pytest.raises(DataError, match=rf"{place}: got no config\.json, .*no safetensors.* Place the model there"):
        _at(store, _spec(cell_spec, _placed()))
    shutil.copytree(store.bases / "base" / "model", place)
    (place / "model.safetensors").unlink()
    with pytest.raises(DataError, match=rf"{place}: got no safetensors, .*doctor --weights {place}"):
        _at(store, _spec(cell_spec, _placed()))


def test_other_weights_than_the_declared_are_refused(tmp_path: Path) -> None:
    student = WorkerFacts(pid=1, weights_sha256="abc", memory_kind="resident")
    check_weights(student, whose="student", at=WeightsAt(folder=tmp_path, sha256="abc"))
    check_weights(student, whose="student", at=WeightsAt(folder=tmp_path))
    with pytest.raises(CellError, match=rf"student weights {tmp_path}: got digest abc, expected abd\. .*made anew"):
        check_weights(student, whose="student", at=WeightsAt(folder=tmp_path, sha256="abd"))


def test_folder_is_loaded_with_the_digest_that_doctor_prints(store: Store, cell_spec: CellSpec) -> None:
    shutil.copytree(store.bases / "base" / "model", store.models / "strong")
    spec = _spec(cell_spec, _placed(weights_digest(store.models / "strong")))
    assert spec.teacher is not None
    at = _at(store, spec)
    assert at.folder == store.models / "strong"
    facts = TeacherWorker(spec, life=spec.teacher, at=at, device="cpu").facts()
    check_weights(facts, whose="teacher", at=at)
    with pytest.raises(CellError, match=rf"teacher weights {at.folder}: got digest {at.sha256}, expected a"):
        check_weights(facts, whose="teacher", at=_at(store, _spec(cell_spec, _placed())))


@pytest.mark.parametrize(
    ("best", "step", "held", "sha256"),
    [
        (2, "best", 2, None),
        (2, "last", 4, "e"),
        (2, 2, 2, None),
        (2, 4, 4, "e"),
        (0, "best", 0, None),
        (4, "best", 4, "e"),
    ],
)
def test_checkpoint_is_the_student_of_a_finished_cell(
    store: Store, cell_spec: CellSpec, best: int, step: int | str, held: int, sha256: str | None
) -> None:
    _finish(store, best=best)
    at = _at(store, _spec(cell_spec, {"kind": "checkpoint", "cell": CELL, "step": step}))
    weights = store.cells / CELL / "checkpoints" / f"step-{held:06d}" / "student"
    assert at == WeightsAt(folder=store.bases / "other" / "model", weights=weights, sha256=sha256)


def test_checkpoint_that_is_gone_names_those_that_are_there(store: Store, cell_spec: CellSpec) -> None:
    _finish(store, best=2)
    with pytest.raises(DataError, match=rf"cell {CELL}: got step 3, expected one whose checkpoint is there \(2, 4\)"):
        _at(store, _spec(cell_spec, {"kind": "checkpoint", "cell": CELL, "step": 3}))


def test_checkpoint_of_an_unfinished_cell_is_refused(store: Store, cell_spec: CellSpec) -> None:
    spec = _spec(cell_spec, {"kind": "checkpoint", "cell": CELL, "step": "last"})
    with pytest.raises(DataError, match=rf"cell {CELL}: got a cell that is missing .*`sdpo plan`"):
        _at(store, spec)
    _finish(store, best=2)
    store.journal(CELL).result_path.unlink()
    with pytest.raises(DataError, match="got a cell that is missing"):
        _at(store, spec)


def test_damaged_checkpoint_is_named(store: Store, cell_spec: CellSpec) -> None:
    _finish(store, best=2)
    damaged = store.cells / CELL / "checkpoints" / "step-000002" / "student" / "model.safetensors"
    damaged.write_bytes(b"weighty")
    with pytest.raises(CellError, match=str(damaged)):
        _at(store, _spec(cell_spec, {"kind": "checkpoint", "cell": CELL, "step": 2}))


def _as(folder: Path, architecture: str) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen3"', f'"model_type": "{architecture}"'))


@pytest.mark.parametrize(
    ("backend", "placement", "is_refused"),
    [("megatron", "trainer", True), ("megatron", "sglang", False), ("hf", "trainer", False)],
)
def test_teacher_of_another_architecture(
    store: Store, cell_spec: CellSpec, backend: str, placement: str, is_refused: bool
) -> None:
    """One that Megatron-core scores for is of the student's; a server and `hf` take any."""
    place = store.models / "strong"
    shutil.copytree(store.bases / "base" / "model", place)
    changed = {"backend": backend, "engine": "replica", "teacher_placement": placement}
    spec = _spec(cell_spec, _placed()).model_copy(update=changed)
    assert _at(store, spec).folder == place
    _as(place, "llama")
    if not is_refused:
        assert _at(store, spec).folder == place
        return
    with pytest.raises(DataError, match=r"got a model of type 'llama', expected 'qwen3' .* teacher_placement 'sglang'"):
        _at(store, spec)


def _another_token(folder: Path) -> None:
    """Ids of the same number, of which one means another token."""
    text = (folder / "tokenizer.json").read_text()
    assert '"z": ' in text
    (folder / "tokenizer.json").write_text(text.replace('"z": ', '"\u0100\u0101": ', 1))


def _more_tokens(folder: Path) -> None:
    build_tokenizer(TokenizerSpec(kind="byte", phrases=("Spell this",)), texts=()).save(folder)


def _another_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "model")
    tokenizer.save_pretrained(folder)


def _another_end(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_another_token, "tokens than"),
        (_more_tokens, "tokens, added_tokens than"),
        (_another_template, "header_ids than"),
        (_another_end, "end_id than"),
    ],
)
def test_teacher_of_another_vocabulary_is_refused(
    store: Store, cell_spec: CellSpec, change: Callable[[Path], None], names: str
) -> None:
    place = store.models / "strong"
    shutil.copytree(store.bases / "base" / "model", place)
    change(place)
    ChatTokenizer.load(place)
    with pytest.raises(DataError, match=f"teacher {place}: got a tokenizer with other {names}") as raised:
        _at(store, _spec(cell_spec, _placed()))
    assert str(store.bases / "base" / "model") in str(raised.value)
