"""Where a cell's teacher finds its weights, and the checks that they are those declared and read the student's ids."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sdpo_core.algorithm_specs import CheckpointWeights, FolderWeights
from sdpo_core.backends.base import WeightsAt, WorkerFacts
from sdpo_core.backends.table import BACKENDS
from sdpo_core.checkpoint import checkpoint_folder, read_state
from sdpo_core.errors import CellError, DataError
from sdpo_core.journal import Journal, Store, read_json
from sdpo_core.model_folder import Vocabulary, architecture, require_model, vocabulary
from sdpo_core.specs import CellSpec
from sdpo_core.teacher.table import PLACEMENTS


def teacher_weights(store: Store, *, spec: CellSpec, declared: Mapping[str, Any]) -> WeightsAt | None:
    """The teacher's model by its declaration; None for an arm without a teacher. `declared`: the cell's `spec.json`.

    Raises:
        DataError: the weights are not there, or their tokenizer is not the student's, or their architecture, where
            the backend wants it.
        CellError: a checkpoint is damaged.
    """
    teacher = spec.teacher
    if teacher is None:
        return None
    student = base_model(store, str(declared["base_fingerprint"]))
    match teacher.weights:
        case FolderWeights() as placed:
            at = _placed(store, placed)
        case CheckpointWeights() as held:
            at = _checkpoint(store, held)
        case "profile":
            at = WeightsAt(
                folder=base_model(store, str(declared["teacher_fingerprint"])), sha256=str(declared["teacher_digest"])
            )
        case "base":
            at = WeightsAt(folder=student, sha256=str(declared["base_digest"]))
    if at.folder != student:
        _check_vocabulary(student=student, teacher=at.folder, thinking=spec.training.thinking)
        if PLACEMENTS[spec.teacher_placement].is_on_backend and BACKENDS[spec.backend].has_one_architecture:
            _check_architecture(student=student, teacher=at.folder, backend=spec.backend)
    return at


def check_weights(worker: WorkerFacts, *, whose: str, at: WeightsAt) -> None:
    """Raise CellError unless a worker starts from the weights that the cell's fingerprint speaks of."""
    if at.sha256 is not None and worker.weights_sha256 != at.sha256:
        raise CellError(
            f"{whose} weights {at.weights or at.folder}: got digest {worker.weights_sha256}, expected {at.sha256}. "
            "Put the declared weights there, or declare these in an arm of their own; what lies below `bases` or "
            "`cells` is made anew once its folder is deleted."
        )


def base_model(store: Store, fingerprint: str) -> Path:
    """The Hugging Face folder of base weights."""
    return store.bases / fingerprint / "model"


def _placed(store: Store, weights: FolderWeights) -> WeightsAt:
    folder = store.models / weights.name
    require_model(
        folder,
        advice=f"Place the model there; `sdpo doctor --weights {folder}` prints the digest to declare.",
    )
    return WeightsAt(folder=folder, sha256=weights.sha256)


def _checkpoint(store: Store, weights: CheckpointWeights) -> WeightsAt:
    """The student of a finished cell; only the digest of its last step is on record."""
    journal, where = store.journal(weights.cell), f"teacher weights of cell {weights.cell}"
    state = journal.status().state
    if state != "done":
        raise DataError(
            f"{where}: got a cell that is {state} in {store.cells}, expected a finished one. "
            "Finish it first; `sdpo plan` shows fingerprints and states."
        )
    result = read_json(journal.result_path)
    last, best = int(result["steps"]), int(result["metrics"]["test_at_best_dev/step"])
    step = weights.step if isinstance(weights.step, int) else {"last": last, "best": best}[weights.step]
    held = _held_steps(journal)
    if step not in held:
        raise DataError(
            f"{where}: got step {weights.step}, expected one whose checkpoint is there "
            f"({', '.join(map(str, held)) or 'none is'}). Choose one of them, 'best' or 'last'."
        )
    folder = checkpoint_folder(journal, step)
    read_state(folder)
    end = str(result["workers"]["student"]["weights_sha256_end"])
    base = base_model(store, str(read_json(journal.spec_path)["base_fingerprint"]))
    require_model(base, advice="Run that cell's experiment again: its base is made anew.")
    return WeightsAt(folder=base, weights=folder / "student", sha256=end if step == last else None)


def _held_steps(journal: Journal) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in journal.checkpoints.glob("step-??????"))


def _check_vocabulary(*, student: Path, teacher: Path, thinking: bool) -> None:
    ours, others = vocabulary(student, thinking=thinking), vocabulary(teacher, thinking=thinking)
    different = [field.name for field in fields(Vocabulary) if getattr(ours, field.name) != getattr(others, field.name)]
    if different:
        raise DataError(
            f"teacher {teacher}: got a tokenizer with other {', '.join(different)} than that of the student {student}, "
            "expected the same: the teacher reads the student's ids. Choose a teacher of the student's family."
        )


def _check_architecture(*, student: Path, teacher: Path, backend: str) -> None:
    ours, others = architecture(student), architecture(teacher)
    if ours != others:
        raise DataError(
            f"teacher {teacher}: got a model of type {others!r}, expected {ours!r} as that of the student {student}: "
            f"backend {backend!r} scores for teachers of the student's architecture. Have it served: choose "
            "teacher_placement 'sglang' in the profile."
        )
