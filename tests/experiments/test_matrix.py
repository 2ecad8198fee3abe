"""Selecting and expanding: every fault in one message, one order of cells, fingerprints of what matters only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.manifest import Manifest
from experiments.matrix import Selection, cells_of, check_profile, datasets_to_prepare, plan_bases, plan_cells, select
from experiments.profiles import PROFILES
from experiments.table import EXPERIMENTS
from reports.rows import PlannedCell
from sdpo_core.errors import SpecError
from sdpo_core.fingerprint import base_fingerprint
from sdpo_core.journal import Store, write_json
from sdpo_core.specs import CellSpec, ExperimentSpec

E000, E001, E010 = EXPERIMENTS["e000"], EXPERIMENTS["e001"], EXPERIMENTS["e010"]
# One arm whose teacher is another model, and one whose teacher is the student's base.
TAUGHT = E010.model_copy(update={"arms": ("opd", "sdpo-static"), "seeds": (42,), "profile": "smoke"})


def manifest(name: str, *, digest: str = "d") -> Manifest:
    """What planning reads of a manifest: its digest."""
    return Manifest(
        name=name,
        digest=f"{digest}-{name}",
        splits={"train": 1, "dev": 1, "test": 1},
        rows_read=3,
        kept=3,
        quarantined={},
        flagged={},
        baselines={},
        baseline_choices={},
        files={},
        source={},
    )


def declare(**changes: Any) -> ExperimentSpec:
    return E000.model_copy(update=changes)


def test_select_without_a_selection_keeps_the_declaration() -> None:
    assert select(E001, Selection()) == E001


def test_select_narrows_each_part() -> None:
    selected = select(
        E001, Selection(datasets=("sciknoweval-physics",), arms=("grpo",), seeds=(2026,), profile="smoke")
    )
    assert (selected.datasets, selected.arms, selected.seeds, selected.profile) == (
        ("sciknoweval-physics",),
        ("grpo",),
        (2026,),
        "smoke",
    )


def test_select_reports_every_fault_at_once() -> None:
    selection = Selection(datasets=("spelling",), arms=("dpo", "grpo"), seeds=(42, 7), profile="huge")
    with pytest.raises(SpecError) as raised:
        select(E000, selection)
    message = str(raised.value)
    assert "\n" not in message
    for part in ("data set 'spelling'", "arm 'dpo'", "seed 7", "profile 'huge'", "spell_backward", "tiny", "42"):
        assert part in message
    assert "'grpo'," not in message.split("expected")[0]


@pytest.mark.parametrize(
    ("experiment", "fault"),
    [
        (declare(datasets=("nope",)), "data set 'nope'"),
        (declare(arms=("grpo", "nope")), "arm 'nope'"),
        (declare(profile="nope"), "profile 'nope'"),
        (declare(seeds=()), "no seed"),
        (declare(seeds=(1, 1)), "seed 1 2 times"),
    ],
)
def test_select_checks_the_whole_declaration(experiment: ExperimentSpec, fault: str) -> None:
    """Also what the selection leaves out: the page at the end shows all of it."""
    selection = Selection(datasets=("spell_backward",), arms=("grpo",), seeds=experiment.seeds[:1], profile="smoke")
    with pytest.raises(SpecError, match=fault):
        select(experiment, selection)


def test_select_refuses_a_name_given_twice() -> None:
    with pytest.raises(SpecError, match="arm 'grpo' 2 times"):
        select(E000, Selection(arms=("grpo", "grpo")))


def test_cells_come_in_one_order() -> None:
    labels = [cell.label for cell in cells_of(E001, declared=E001)]
    assert len(labels) == len(set(labels)) == 18
    assert labels[:4] == [
        "spell_backward/grpo/42",
        "spell_backward/sdpo-static/42",
        "spell_backward/sdpo-ema/42",
        "spell_backward/grpo/1234",
    ]
    assert labels[9] == "sciknoweval-physics/grpo/42"


def test_arms_of_one_data_set_and_seed_differ_in_the_algorithm_alone() -> None:
    grpo, static, ema = cells_of(E000, declared=E000)[:3]
    same = {"arm": "x", "algorithm": grpo.algorithm}
    assert grpo.model_copy(update=same) == static.model_copy(update=same) == ema.model_copy(update=same)
    assert static.algorithm != ema.algorithm


def test_cells_of_refuses_what_experiment_or_profile_do_not_have() -> None:
    selected = declare(datasets=("sciknoweval-biology", "toolalpaca"))
    with pytest.raises(SpecError) as raised:
        cells_of(selected, declared=E000)
    message = str(raised.value)
    assert "data set 'sciknoweval-biology', expected one the experiment declares" in message
    assert "task 'tool_call', expected a task of profile 'smoke'" in message


def test_cells_of_names_every_arm_that_does_not_fit_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = declare(arms=("opd", "grpo", "sdpo-ema"))
    mcq = PROFILES["smoke"].tasks["mcq"]
    training = mcq.training.model_copy(update={"rollouts_per_problem": 1})
    tasks = {**PROFILES["smoke"].tasks, "mcq": mcq.model_copy(update={"training": training})}
    monkeypatch.setitem(PROFILES, "smoke", PROFILES["smoke"].model_copy(update={"tasks": tasks}))
    with pytest.raises(SpecError) as raised:
        cells_of(selected, declared=E000)
    message = str(raised.value)
    assert "\n" not in message
    assert "arm 'opd', whose teacher is a model of the profile" in message
    assert "expected profile 'smoke' to name one for task 'mcq' (teacher_base)" in message
    assert "arm 'grpo' on 'sciknoweval-physics' under profile 'smoke': 1 rollout a problem for grpo" in message
    assert message.count("arm ") == 2, "opd fits the spelling, sdpo compares no rollouts"


def test_a_warmed_up_base_is_not_rounded() -> None:
    profile = PROFILES["smoke-megatron"]
    check_profile(profile)
    with pytest.raises(
        SpecError, match="profile smoke-megatron: got dtype 'bfloat16' for smoke-mcq, smoke-spell, smok"
    ):
        check_profile(profile.model_copy(update={"dtype": "bfloat16"}))


def test_only_a_teacher_of_the_profile_brings_a_second_base() -> None:
    opd, static = cells_of(TAUGHT, declared=TAUGHT)
    assert opd.teacher_base == PROFILES["smoke"].tasks["spell_backward"].teacher_base
    assert static.teacher_base is None


def test_datasets_to_prepare_holds_those_of_the_teachers_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    spell = PROFILES["smoke"].tasks["spell_backward"]
    assert spell.teacher_base is not None
    teacher = spell.teacher_base.model_copy(update={"datasets": ("spell_backward", "sciknoweval-physics")})
    tasks = {"spell_backward": spell.model_copy(update={"teacher_base": teacher})}
    monkeypatch.setitem(PROFILES, "smoke", PROFILES["smoke"].model_copy(update={"tasks": tasks}))
    assert datasets_to_prepare(TAUGHT) == ("spell_backward", "sciknoweval-physics")


def test_datasets_to_prepare_holds_those_of_the_warm_up() -> None:
    names = datasets_to_prepare(declare(datasets=("sciknoweval-physics",)))
    assert names[0] == "sciknoweval-physics"
    assert len(names) == len(set(names)) == 4
    assert datasets_to_prepare(declare(datasets=("toolalpaca",))) == ("toolalpaca",)


def _plan(tmp_path: Path, cell: CellSpec, *, digest: str = "d", weights: str | None = "w") -> tuple[str | None, str]:
    """Fingerprints of a cell and of its base, under a data digest and weights."""
    manifests = {name: manifest(name, digest=digest) for name in ("spell_backward", *cell.base.datasets)}
    store = Store(tmp_path)
    (base,) = plan_bases([cell], manifests=manifests)
    if weights is not None:
        write_json(store.bases / base.fingerprint / "base.json", {"weights_digest": weights})
    (planned,) = plan_cells([cell], manifests=manifests, store=store)
    assert planned.base_fingerprint == base.fingerprint
    return planned.fingerprint, base.fingerprint


@pytest.mark.parametrize(
    ("change", "changes_base"),
    [
        (lambda _: {"seed": 43}, False),
        (lambda cell: {"optimizer": cell.optimizer.model_copy(update={"learning_rate": 2e-4})}, False),
        (lambda cell: {"training": cell.training.model_copy(update={"steps": 5})}, False),
        (lambda cell: {"evaluation": cell.evaluation.model_copy(update={"dev_problems": 7})}, False),
        (lambda _: {"threads_per_worker": 2}, False),
        (
            lambda cell: {
                "base": cell.base.model_copy(update={"warmup": cell.base.warmup.model_copy(update={"seed": 8})})
            },
            True,
        ),
    ],
)
def test_each_number_has_a_fingerprint_of_its_own(
    tmp_path: Path, change: Callable[[CellSpec], dict[str, Any]], changes_base: bool
) -> None:
    cell = cells_of(E000, declared=E000)[0]
    before, after = _plan(tmp_path, cell), _plan(tmp_path, cell.model_copy(update=change(cell)))
    assert before[0] != after[0]
    assert (before[1] != after[1]) == changes_base


def test_data_and_weights_enter_the_fingerprint(tmp_path: Path) -> None:
    cell = cells_of(E000, declared=E000)[0]
    plain, other_data, other_weights = (
        _plan(tmp_path / "a", cell),
        _plan(tmp_path / "b", cell, digest="e"),
        _plan(tmp_path / "c", cell, weights="v"),
    )
    assert len({plain[0], other_data[0], other_weights[0]}) == 3
    assert plain[1] == other_weights[1] != other_data[1]


def test_experiment_name_and_home_do_not_enter_the_fingerprint(tmp_path: Path) -> None:
    renamed = declare(name="other", question="?", prediction="!")
    first, second = cells_of(E000, declared=E000)[0], cells_of(renamed, declared=renamed)[0]
    assert _plan(tmp_path / "a", first) == _plan(tmp_path / "b", second)


def test_a_base_is_known_by_the_fingerprint_of_the_published_page() -> None:
    """As in docs/example/results.md: bases and cells of a store outlive fields that declarations get later."""
    base = PROFILES["tiny"].tasks["spell_backward"].base
    assert base_fingerprint(base, data_digests={"spell_backward": "cf46fae3f620c473f721"}) == "9d86bbaf2f3d10cbfb3c"


def test_a_cell_without_base_weights_has_no_fingerprint_yet(tmp_path: Path) -> None:
    assert _plan(tmp_path, cells_of(E000, declared=E000)[0], weights=None)[0] is None


def test_plan_bases_names_each_base_once_with_a_probe_a_data_set() -> None:
    experiment = declare(datasets=("sciknoweval-biology", "sciknoweval-physics", "spell_backward"))
    cells = cells_of(experiment, declared=experiment)
    manifests = {name: manifest(name) for name in datasets_to_prepare(experiment)}
    bases = plan_bases(cells, manifests=manifests)
    assert [base.spec.name for base in bases] == ["smoke-mcq", "smoke-spell"]
    assert [probe.dataset for probe in bases[0].probes] == ["sciknoweval-biology", "sciknoweval-physics"]


def test_plan_bases_holds_the_teachers_with_the_same_probe() -> None:
    student, teacher = plan_bases(cells_of(TAUGHT, declared=TAUGHT), manifests={"spell_backward": manifest("x")})
    assert (student.spec.name, teacher.spec.name) == ("smoke-spell", "smoke-spell-teacher")
    assert student.probes == teacher.probes
    assert [probe.dataset for probe in teacher.probes] == ["spell_backward"]


def test_a_cell_waits_for_the_weights_of_its_teacher_too(tmp_path: Path) -> None:
    manifests, store = {"spell_backward": manifest("x")}, Store(tmp_path)
    cells = cells_of(TAUGHT, declared=TAUGHT)
    student, teacher = plan_bases(cells, manifests=manifests)

    def planned(**weights: str) -> tuple[PlannedCell, PlannedCell]:
        for name, base in (("student", student), ("teacher", teacher)):
            if name in weights:
                write_json(store.bases / base.fingerprint / "base.json", {"weights_digest": weights[name]})
        opd, static = plan_cells(cells, manifests=manifests, store=store)
        return opd, static

    opd, static = planned(teacher="t")
    assert (opd.fingerprint, static.fingerprint) == (None, None)
    (store.bases / teacher.fingerprint / "base.json").unlink()
    opd, static = planned(student="s")
    assert opd.fingerprint is None
    assert static.fingerprint is not None
    first, same = planned(teacher="t")
    assert (first.teacher_digest, first.teacher_fingerprint) == ("t", teacher.fingerprint)
    assert (same.teacher_digest, same.teacher_fingerprint, same.fingerprint) == (None, None, static.fingerprint)
    second, _ = planned(teacher="u")
    assert None not in (first.fingerprint, second.fingerprint)
    assert first.fingerprint != second.fingerprint


def test_teachers_of_a_profile_are_served_where_there_is_one() -> None:
    declared = E000.model_copy(update={"arms": ("grpo", "sdpo-ema"), "profile": "tiny-sglang-teacher"})
    grpo, ema, *_ = cells_of(declared, declared=declared)
    assert (grpo.teacher_placement, ema.teacher_placement) == ("trainer", "sglang")
    whole = declared.model_copy(update={"arms": ("opsd", "sdpo-trust-region")})
    with pytest.raises(SpecError) as raised:
        cells_of(whole, declared=whole)
    assert "arm 'opsd' on 'spell_backward' under profile 'tiny-sglang-teacher': teacher_placement" in str(raised.value)
    assert "arm 'sdpo-trust-region'" in str(raised.value)
