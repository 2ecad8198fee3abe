"""A wrong declaration is refused with all its faults; a right one is frozen and survives JSON."""

from typing import Any

import pytest
from pydantic import ValidationError

from sdpo_core.specs import CellSpec, GrpoSpec, SdpoSpec, TeacherSpec, TokenizerSpec, TrainingSpec


def _row(spec: CellSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


def test_spec_reports_all_faults_at_once(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    row["training"]["steps"] = 0
    row["training"]["stepz"] = 3
    row["optimizer"]["learning_rate"] = -1
    row["dtype"] = "float8"
    del row["seed"]
    with pytest.raises(ValidationError) as caught:
        CellSpec.model_validate(row)
    assert {".".join(map(str, fault["loc"])) for fault in caught.value.errors()} == {
        "training.steps",
        "training.stepz",
        "optimizer.learning_rate",
        "dtype",
        "seed",
    }


def test_spec_is_frozen(cell_spec: CellSpec) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        cell_spec.training.steps = 5


def test_cell_spec_survives_json(cell_spec: CellSpec) -> None:
    assert CellSpec.model_validate_json(cell_spec.model_dump_json()) == cell_spec


def test_cell_spec_label_names_the_cell(cell_spec: CellSpec) -> None:
    assert cell_spec.label == "spell_backward/sdpo-ema/42"


def test_cell_spec_picks_the_algorithm_by_name(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    assert isinstance(CellSpec.model_validate(row).algorithm, SdpoSpec)
    row["algorithm"] = {"name": "grpo"}
    assert isinstance(CellSpec.model_validate(row).algorithm, GrpoSpec)
    row["algorithm"] = {"name": "ppo"}
    with pytest.raises(ValidationError, match="'grpo', 'sdpo'"):
        CellSpec.model_validate(row)


def test_cell_spec_keeps_settings_of_another_algorithm_out(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    row["algorithm"] = {"name": "grpo", "alpha": 0.5}
    with pytest.raises(ValidationError, match="alpha"):
        CellSpec.model_validate(row)


@pytest.mark.parametrize(("minibatches", "is_valid"), [(1, True), (4, True), (5, False)])
def test_cell_spec_needs_a_rollout_a_minibatch(cell_spec: CellSpec, minibatches: int, is_valid: bool) -> None:
    """The fixture's step has 2 problems x 2 rollouts."""
    row = _row(cell_spec)
    row["algorithm"]["minibatches"] = minibatches
    if is_valid:
        assert CellSpec.model_validate(row).algorithm.minibatches == minibatches
    else:
        with pytest.raises(ValidationError, match="5 mini-batches for 4 rollouts"):
            CellSpec.model_validate(row)


@pytest.mark.parametrize("prompt", ["max_prompt_tokens", "max_teacher_prompt_tokens"])
def test_cell_spec_needs_room_for_its_longest_sequence(cell_spec: CellSpec, prompt: str) -> None:
    """The fixture's base has 128 positions and its responses 8 tokens; faults are reported together."""
    row = _row(cell_spec)
    row["training"][prompt] = 120
    assert CellSpec.model_validate(row).training.max_response_tokens == 8
    row["training"][prompt] = 121
    row["algorithm"]["minibatches"] = 9
    with pytest.raises(
        ValidationError, match=r"9 mini-batches for 4 rollouts a step; prompts and .* 129 tokens for 128"
    ):
        CellSpec.model_validate(row)


@pytest.mark.parametrize(("evaluate", "checkpoint", "is_valid"), [(6, 3, True), (6, 4, False), (3, 6, False)])
def test_training_spec_checkpoints_every_evaluation(
    cell_spec: CellSpec, evaluate: int, checkpoint: int, is_valid: bool
) -> None:
    row = _row(cell_spec)["training"] | {"evaluate_every": evaluate, "checkpoint_every": checkpoint}
    if is_valid:
        assert TrainingSpec.model_validate(row).evaluate_every == evaluate
    else:
        with pytest.raises(ValidationError, match="multiple of checkpoint_every"):
            TrainingSpec.model_validate(row)


@pytest.mark.parametrize(
    "row",
    [{"schedule": "ema"}, {"schedule": "static", "rate": 0.05}, {"schedule": "live", "rate": 0.05}],
)
def test_teacher_spec_ties_rate_to_ema(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="rate belongs to schedule 'ema'"):
        TeacherSpec.model_validate(row)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
def test_teacher_spec_bounds_the_rate(rate: float) -> None:
    with pytest.raises(ValidationError, match="rate"):
        TeacherSpec(schedule="ema", rate=rate)


def test_teacher_spec_takes_a_rate_of_one() -> None:
    assert TeacherSpec(schedule="ema", rate=1.0).rate == 1.0


@pytest.mark.parametrize("row", [{"kind": "bpe"}, {"kind": "byte", "vocab_size": 300}])
def test_tokenizer_spec_ties_size_to_bpe(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="vocab_size belongs to kind 'bpe'"):
        TokenizerSpec.model_validate(row)


@pytest.mark.parametrize(("field", "value"), [("alpha", 1.01), ("alpha", -0.01), ("top_k", 0), ("no_context", "skip")])
def test_sdpo_spec_bounds_its_numbers(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        SdpoSpec.model_validate({"teacher": {"schedule": "static"}, field: value})
