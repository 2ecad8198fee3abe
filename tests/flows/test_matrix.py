"""The matrix between declaration and store: what jobs read, what is to be made, what a page shows."""

from pathlib import Path

from experiments.matrix import Selection
from flows.matrix import Matrix, load_matrix
from sdpo_core.base_specs import BaseSpec
from sdpo_core.journal import read_json, write_json
from sdpo_core.specs import ProbeSpec


def test_write_specs_leaves_jobs_all_they_read(matrix: Matrix) -> None:
    (base,) = matrix.bases()
    declared = read_json(matrix.store.bases / base.fingerprint / "spec.json")
    assert BaseSpec.model_validate(declared["spec"]) == base.spec
    assert [ProbeSpec.model_validate(probe).dataset for probe in declared["probes"]] == ["sciknoweval-physics"]
    for cell in matrix.planned():
        journal = matrix.store.journal(str(cell.fingerprint))
        assert journal.read_spec() == cell.spec
        stored = read_json(journal.spec_path)
        assert (stored["fingerprint"], stored["base_fingerprint"]) == (cell.fingerprint, base.fingerprint)


def test_a_cell_with_a_teacher_model_names_both_its_bases(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "taught.py"
    path.write_text(
        "from experiments.e010_variants import E010\n"
        'TAUGHT = E010.model_copy(update={"name": "taught", "arms": ("opd", "grpo"), "seeds": (42,)})\n'
    )
    matrix = load_matrix(str(path), Selection(profile="smoke"), home=home)
    student, teacher = matrix.bases_to_make()
    assert (student.spec.name, teacher.spec.name) == ("smoke-spell", "smoke-spell-teacher")
    for base in (student, teacher):
        write_json(matrix.store.bases / base.fingerprint / "base.json", {"weights_digest": base.spec.name})
    matrix.write_specs()
    stored = {}
    for cell in matrix.planned():
        stored[cell.spec.arm] = read_json(matrix.store.journal(str(cell.fingerprint)).spec_path)
    assert stored["opd"]["base_fingerprint"] == stored["grpo"]["base_fingerprint"] == student.fingerprint
    assert stored["opd"]["teacher_fingerprint"] == teacher.fingerprint
    assert stored["opd"]["teacher_digest"] == "smoke-spell-teacher"
    assert stored["grpo"]["teacher_fingerprint"] is None
    assert [arm.name for arm in matrix.arms()] == ["opd", "grpo"]


def test_a_base_is_made_when_weights_and_every_probe_are_there(matrix: Matrix) -> None:
    (base,) = matrix.bases()
    folder = matrix.store.bases / base.fingerprint
    assert matrix.bases_to_make() == (base,)
    record = {"probe": base.probes[0].model_dump(mode="json")}
    write_json(folder / "probe-sciknoweval-physics.json", record)
    assert matrix.bases_to_make() == ()
    record["probe"]["max_response_tokens"] += 1
    write_json(folder / "probe-sciknoweval-physics.json", record)
    assert matrix.bases_to_make() == (base,), "a probe of another length is another probe"
    (folder / "base.json").unlink()
    assert matrix.bases_to_make() == (base,)


def test_a_page_shows_what_was_not_selected(home: Path, small: str) -> None:
    matrix = load_matrix(small, Selection(arms=("grpo",)), home=home)
    assert [cell.spec.arm for cell in matrix.planned()] == ["grpo"]
    assert [cell.spec.arm for cell in matrix.page_cells()] == ["grpo", "sdpo-static", "sdpo-ema"]


def test_facts_say_what_the_manifest_says(matrix: Matrix) -> None:
    (facts,) = matrix.facts()
    manifest = matrix.manifests["sciknoweval-physics"]
    assert (facts.name, facts.digest, facts.splits) == ("sciknoweval-physics", manifest.digest, manifest.splits)
    assert facts.baselines
    assert all(isinstance(score, float) for scores in facts.baselines.values() for score in scores.values())


def test_folder_of_another_profile_has_its_name(matrix: Matrix) -> None:
    assert matrix.folder(Path("results"), profile_is_declared=True) == Path("results/small")
    assert matrix.folder(Path("results"), profile_is_declared=False) == Path("results/small-smoke")
