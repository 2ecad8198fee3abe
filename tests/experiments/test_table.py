"""Experiments by name and from files: whatever is wrong with a file becomes one line that names it."""

from pathlib import Path

import pytest

from data_prep.table import DATASETS
from experiments.arms import ARMS
from experiments.matrix import Selection, cells_of, check_profile, select
from experiments.profiles import PROFILES
from experiments.table import EXPERIMENTS, experiment
from sdpo_core.base_specs import AnyBaseSpec, BaseSpec
from sdpo_core.errors import SpecError
from sdpo_core.specs import ProfileSpec

GOOD = """
from experiments.e000_smoke import E000

MINE = E000.model_copy(update={"name": "mine", "seeds": (1, 2)})
SAME = MINE
"""


def _written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_shipped_experiment_expands(name: str) -> None:
    declared = experiment(name)
    assert declared.name == name
    assert cells_of(select(declared, Selection()), declared=declared)
    assert declared.question
    assert declared.prediction


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_every_profile_fits_its_tasks(profile: ProfileSpec) -> None:
    check_profile(profile)
    bases: dict[str, AnyBaseSpec] = {}
    for task, numbers in profile.tasks.items():
        longest = numbers.training.max_teacher_prompt_tokens + numbers.training.max_response_tokens
        for base in (numbers.base, *([numbers.teacher_base] if numbers.teacher_base else [])):
            assert bases.setdefault(base.name, base) == base, "a name is one base's"
            assert longest <= base.shape.max_positions
            if isinstance(base, BaseSpec):
                assert {DATASETS[name].task for name in base.datasets} == {task}
                assert isinstance(numbers.base, BaseSpec)
                assert base.tokenizer == numbers.base.tokenizer, "ids travel from student to teacher"
        assert numbers.training.max_prompt_tokens <= numbers.training.max_teacher_prompt_tokens


def test_bases_of_one_model_are_made_once_for_every_profile() -> None:
    for tiny, others in {
        "tiny": ("tiny-megatron-tp2cp2", "tiny-megatron-cp2", "tiny-sglang-teacher"),
        "smoke": ("smoke-megatron", "smoke-megatron-2gpu"),
    }.items():
        for other in others:
            assert PROFILES[other].tasks == PROFILES[tiny].tasks


def test_names_are_those_of_the_specs() -> None:
    for table in (ARMS, PROFILES, EXPERIMENTS):
        assert all(name == spec.name for name, spec in table.items())


def test_unknown_experiment_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match="got 'e999', expected one of e000, e001, e010, e020 or the path"):
        experiment("e999")


def test_a_file_declares_an_experiment(tmp_path: Path) -> None:
    found = experiment(_written(tmp_path, GOOD))
    assert (found.name, found.seeds) == ("mine", (1, 2))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (GOOD + 'OTHER = MINE.model_copy(update={"name": "other"})', r"got 2 experiments \(mine, other\)"),
        (GOOD + 'OTHER = MINE.model_copy(update={"seeds": (3,)})', r"got 2 experiments \(mine, mine\)"),
        ("from experiments.e000_smoke import E000", r"got 0 experiments \(none\)"),
        ("def broken(:", "SyntaxError"),
        ("import no_such_module", "no_such_module"),
        ("1 + 'a'", "TypeError"),
        (GOOD.replace('"mine"', '"e001"'), "'e001' of a shipped experiment"),
        (GOOD.replace('"mine"', '"../mine"'), r"got the name '\.\./mine'"),
        ("from sdpo_core.specs import ExperimentSpec\nExperimentSpec(name='x', arm='y')", "arm: Extra inputs"),
    ],
)
def test_a_faulty_file_is_one_line_that_names_it(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(SpecError, match=fault) as raised:
        experiment(_written(tmp_path, text))
    assert str(tmp_path / "mine.py") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.py, expected a file"):
        experiment(str(tmp_path / "none.py"))
