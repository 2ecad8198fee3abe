"""Checkpoints: what is written, kept and refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sdpo_core.checkpoint import DriverState, checkpoint_folder, load_checkpoint, read_state, save_checkpoint
from sdpo_core.errors import CellError
from sdpo_core.journal import Journal


class Part:
    """A worker whose weights are a text."""

    def __init__(self, value: str) -> None:
        self.value = value

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_text(self.value)

    def load(self, folder: Path) -> None:
        self.value = (folder / "model.safetensors").read_text()


class Failing(Part):
    """A worker on a full disk."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        raise OSError("no space left")


def state(step: int, *, best_step: int = 0) -> DriverState:
    return DriverState(
        step=step,
        cursor=3 * step,
        journal_sizes={"metrics.jsonl": 10 * step},
        best_step=best_step,
        best_accuracy=0.1,
        weights_sha256_start={"student": "a"},
        started=1.25,
        trained_seconds=0.1 + 0.2,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "cell")


def steps(journal: Journal) -> list[str]:
    return sorted(path.name for path in journal.checkpoints.iterdir())


def tree(journal: Journal) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(journal.folder.rglob("*")) if path.is_file()}


def save(journal: Journal, step: int, *, best_step: int = 0) -> None:
    parts = {"student": Part(f"s{step}"), "teacher": Part(f"t{step}")}
    save_checkpoint(journal, state(step, best_step=best_step), workers=parts)


def test_load_restores_the_newest(journal: Journal) -> None:
    assert load_checkpoint(journal, workers={}) is None
    for step in (1, 2):
        save(journal, step)
    student, teacher = Part("x"), Part("y")
    found = load_checkpoint(journal, workers={"student": student, "teacher": teacher})
    assert found == state(2)
    assert (student.value, teacher.value) == ("s2", "t2")


def test_newest_and_best_are_kept(journal: Journal) -> None:
    save(journal, 0)
    save(journal, 1)
    assert steps(journal) == ["step-000000", "step-000001"]
    save(journal, 2, best_step=2)
    assert steps(journal) == ["step-000002"]
    save(journal, 3, best_step=2)
    save(journal, 4, best_step=2)
    assert steps(journal) == ["step-000002", "step-000004"]


def test_failed_save_is_no_checkpoint_and_costs_none(journal: Journal) -> None:
    """A worker that dies while it writes leaves the last checkpoint in place; the next save sweeps its remains."""
    save(journal, 1)
    before = tree(journal)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(journal, state(2), workers={"student": Part("s2"), "teacher": Failing("t2")})
    assert before.items() <= tree(journal).items()
    assert journal.committed_step() == 1
    assert load_checkpoint(journal, workers={"student": Part("")}) == state(1)
    save(journal, 2)
    assert steps(journal) == ["step-000002"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def change_number(path: Path) -> None:
    """Still JSON, still all fields: another cursor."""
    content = json.loads(path.read_text())
    content["state"]["cursor"] += 1
    path.write_text(json.dumps(content))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "flipped weight": ("student/model.safetensors", flip),
    "missing weights": ("teacher/model.safetensors", Path.unlink),
    "truncated weights": ("student/model.safetensors", lambda path: path.write_bytes(b"")),
    "truncated state": ("state.json", lambda path: path.write_bytes(path.read_bytes()[:40])),
    "empty state": ("state.json", lambda path: path.write_text("{}")),
    "missing state": ("state.json", Path.unlink),
    "changed number": ("state.json", change_number),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_and_left_alone(journal: Journal, damage: str) -> None:
    save(journal, 1, best_step=1)
    save(journal, 2, best_step=1)
    folder = checkpoint_folder(journal, 2)
    name, spoil = DAMAGES[damage]
    spoil(folder / name)
    before, student = tree(journal), Part("untouched")
    with pytest.raises(CellError) as caught:
        load_checkpoint(journal, workers={"student": student})
    message = str(caught.value)
    assert message.startswith(f"checkpoint {folder / name}: got a damaged file")
    assert f"Delete {folder} to resume" in message
    assert "\n" not in message
    assert tree(journal) == before
    assert student.value == "untouched"


def test_state_survives_json_bit_for_bit(journal: Journal) -> None:
    save(journal, 3)
    found = read_state(checkpoint_folder(journal, 3))
    assert found.trained_seconds == 0.1 + 0.2
    assert found == state(3)
