"""A larger teacher that the user has placed, served: the student's vocabulary, the declared weights, and a cell."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core.cell import Workers
from sdpo_core.errors import CellError
from sdpo_core.journal import Journal, Store
from sdpo_core.model_folder import weights_digest
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer
from sdpo_core.workers import StudentWorker, TeacherWorker
from tasks.teacher_weights import check_weights, teacher_weights
from tests.sdpo_core.micro import MAX_POSITIONS, Base, make_base, make_cell, make_spec
from tests.sdpo_core.teacher.serving import TOLERANCE, largest_change, largest_gap, questions, scorer_of, served_spec

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

DECLARED = {"base_fingerprint": "base", "base_digest": "b"}


def make_teacher(folder: Path, text: ChatTokenizer) -> None:
    """Wider and deeper than the micro base, with a projection of its own and more padding."""
    text.save(folder)
    config = Qwen3Config(
        vocab_size=text.vocab_size + 13,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=text.end_id,
        pad_token_id=text.pad_id,
    )
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("base")
    return Base(folder=folder, text=make_base(folder))


def test_larger_placed_teacher_is_served(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    """Plain distillation at the teacher's own ids; the scores are those of the same folder in the trainer."""
    store = Store(tmp_path)
    shutil.copytree(base.folder, store.bases / "base" / "model")
    make_teacher(store.models / "strong", base.text)
    digest = weights_digest(store.models / "strong")
    weights: dict[str, Any] = {"kind": "folder", "name": "strong", "sha256": digest}
    opd = {"teacher": {"schedule": "static", "weights": weights}, "estimator": "divergence", "placement": "loss"}
    opd["divergence"] = {"support": "teacher", "top_k": 4}
    plain = make_spec(cell_spec, arm="opd-teacher", algorithm={"opd": opd}, training={"steps": 2})
    spec = served_spec(plain)
    at = teacher_weights(store, spec=spec, declared=DECLARED)
    assert at is not None
    assert spec.teacher is not None

    journals = {}
    where: Any
    for where in ("trainer", "sglang"):
        teacher = TeacherWorker(spec, life=spec.teacher, at=at, device="cpu", where=where, scratch=tmp_path / "scratch")
        try:
            check_weights(teacher.facts(), whose="teacher", at=at)
            if where == "trainer":
                asked = questions(teacher)
                wanted = [teacher.score(asked, support=support, top_k=5) for support in ("student", "union")]
            else:
                found = [teacher.score(asked, support=support, top_k=5) for support in ("student", "union")]
                assert max(map(largest_gap, found, wanted)) <= TOLERANCE
            journals[where] = Journal(tmp_path / where)
            workers = Workers(student=StudentWorker(spec, folder=base.folder, device="cpu"), teacher=teacher)
            make_cell(spec, journal=journals[where], workers=workers, text=base.text).run()
        finally:
            if where == "sglang":
                scorer_of(teacher).close()
    change, where = largest_change(journals["sglang"], journals["trainer"])
    assert change <= TOLERANCE, where


def test_other_weights_than_the_declared_start_no_server(cell_spec: CellSpec, base: Base, tmp_path: Path) -> None:
    store = Store(tmp_path)
    shutil.copytree(base.folder, store.bases / "base" / "model")
    make_teacher(store.models / "strong", base.text)
    weights = {"kind": "folder", "name": "strong", "sha256": "0" * 64}
    spec = served_spec(
        make_spec(cell_spec, arm="sdpo-static", algorithm={"teacher": {"schedule": "static", "weights": weights}})
    )
    at = teacher_weights(store, spec=spec, declared=DECLARED)
    assert at is not None
    assert spec.teacher is not None
    with pytest.raises(CellError, match=f"strong: got weights .*, expected {'0' * 64}"):
        TeacherWorker(spec, life=spec.teacher, at=at, device="cpu", where="sglang", scratch=tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
