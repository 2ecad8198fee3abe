"""A wrong declaration is refused with all its faults; a right one is frozen and survives JSON."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from sdpo_core.algorithm_specs import (
    AnchorSpec,
    BlendSpec,
    CheckpointWeights,
    DivergenceSpec,
    FolderWeights,
    GrpoSpec,
    OpdSpec,
    OpsdSpec,
    PpoSpec,
    SdpoSpec,
    TeacherSpec,
)
from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.spec_base import Spec
from sdpo_core.specs import CellSpec, TrainingSpec
from tests.sdpo_core.micro import ARMS, TRAITS, make_spec

STATIC = {"schedule": "static"}
LIVE = {"schedule": "live"}
FULL = {"support": "full", "top_k": None}
DIGEST, CELL = "0123456789abcdef" * 4, "0123456789abcdef0123"


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


@pytest.mark.parametrize("arm", ARMS)
def test_cell_spec_survives_json(cell_spec: CellSpec, arm: str) -> None:
    spec = make_spec(cell_spec, arm=arm)
    assert CellSpec.model_validate_json(spec.model_dump_json()) == spec


def test_cell_spec_label_names_the_cell(cell_spec: CellSpec) -> None:
    assert cell_spec.label == "spell_backward/sdpo-ema/42"


def test_cell_spec_picks_the_algorithm_by_name(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    for name, kind in {"sdpo": SdpoSpec, "grpo": GrpoSpec, "ppo": PpoSpec, "opsd": OpsdSpec}.items():
        row["algorithm"] = {"name": name} | ({"teacher": STATIC} if name == "sdpo" else {})
        assert isinstance(CellSpec.model_validate(row).algorithm, kind)
    row["algorithm"] = {"name": "dpo"}
    with pytest.raises(ValidationError, match="'grpo', 'gspo', 'sapo'"):
        CellSpec.model_validate(row)


def test_cell_spec_keeps_settings_of_another_algorithm_out(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    row["algorithm"] = {"name": "grpo", "value_clip": 0.5}
    with pytest.raises(ValidationError, match="value_clip"):
        CellSpec.model_validate(row)


@pytest.mark.parametrize("arm", ARMS)
def test_traits_say_what_the_arm_has(cell_spec: CellSpec, arm: str) -> None:
    assert make_spec(cell_spec, arm=arm).traits == {"any", *TRAITS[arm]}


def test_traits_add_up(cell_spec: CellSpec) -> None:
    """An arm with everything: a value head, an anchor, a following teacher with a divergence on a support."""
    opd = {**ARMS["opd-union"]["opd"], "teacher": {"schedule": "ema", "rate": 0.5}}
    spec = make_spec(cell_spec, arm="ppo", algorithm={"anchor": {"coefficient": 1.0}, "opd": opd})
    assert spec.traits == {"any", "value", "anchor", "teacher", "follows", "divergence", "support"}


# Each object with faults of its own, and words of every fault; all of them stand in one message.
ILLEGAL: Mapping[str, tuple[type[Spec], Mapping[str, Any], tuple[str, ...]]] = {
    "k1 in the loss": (AnchorSpec, {"estimator": "k1", "placement": "loss"}, ("'k1' in the loss",)),
    "k2 as an advantage": (AnchorSpec, {"estimator": "k2"}, ("'k2' in the advantage",)),
    "k3 as an advantage": (AnchorSpec, {"estimator": "k3"}, ("'k3' in the advantage",)),
    "k3 in the loss": (AnchorSpec, {"estimator": "k3", "placement": "loss"}, ("'k3' in the loss",)),
    "discount in the loss": (
        AnchorSpec,
        {"estimator": "k2", "placement": "loss", "discount": 0.5},
        ("discount belongs to placement 'advantage'",),
    ),
    "divergence as an advantage": (
        OpdSpec,
        {"estimator": "divergence", "divergence": {}, "teacher": STATIC},
        ("'divergence' in the advantage",),
    ),
    "divergence as an anchor": (
        AnchorSpec,
        {"estimator": "divergence", "placement": "loss"},
        ("an anchor is estimated on sampled tokens",),
    ),
    "an anchor with everything wrong": (
        AnchorSpec,
        {"estimator": "k1", "placement": "loss", "discount": 1.0},
        ("'k1' in the loss", "discount belongs"),
    ),
    "OPD without its divergence": (
        OpdSpec,
        {"estimator": "divergence", "placement": "loss", "teacher": STATIC},
        ("divergence belongs to the estimator 'divergence'",),
    ),
    "OPD with a divergence that nothing trains": (
        OpdSpec,
        {"divergence": {}, "teacher": STATIC},
        ("divergence belongs to the estimator 'divergence'",),
    ),
    "a live teacher that is the student": (OpdSpec, {"teacher": LIVE}, ("says what the student says",)),
    "OPD with everything wrong": (
        OpdSpec,
        {"estimator": "k3", "placement": "loss", "discount": 0.5, "divergence": {}, "teacher": LIVE},
        ("'k3' in the loss", "discount belongs", "divergence belongs", "says what the student says"),
    ),
    "top_k of the whole vocabulary": (DivergenceSpec, {"support": "full"}, ("top_k belongs",)),
    "a support without top_k": (DivergenceSpec, {"top_k": None}, ("top_k belongs",)),
    "nothing to truncate": (
        DivergenceSpec,
        {"support": "full", "truncation": "bregman"},
        ("top_k belongs", "truncation 'bregman' with support 'full'"),
    ),
    "renormalised over all": (DivergenceSpec, {**FULL, "truncation": "renormalised"}, ("'renormalised' with support",)),
    "SDPO at the teacher's ids": (
        SdpoSpec,
        {"teacher": STATIC, "divergence": {"support": "teacher"}},
        ("support 'teacher' for SDPO",),
    ),
    "SDPO with everything wrong": (
        SdpoSpec,
        {"teacher": STATIC, "divergence": {"support": "union"}, "blend": {"weight": 0.5}, "no_context": "poll"},
        ("support 'union' for SDPO", "'poll' with a blend"),
    ),
    "a blend with terms and mini-batches of its own": (
        BlendSpec,
        {"weight": 0.5, "policy": {"minibatches": 2, "rollout_cap": 2.0, "anchor": {"coefficient": 1.0}}},
        ("policy sets anchor, minibatches, rollout_cap",),
    ),
    **{
        f"{schedule} and its rate": (TeacherSpec, {"schedule": schedule, **rate}, ("rate belongs to the schedules",))
        for schedule, rate in {
            "ema": {},
            "trust_region": {},
            "static": {"rate": 0.05},
            "live": {"rate": 0.05},
        }.items()
    },
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_combination_is_refused_with_all_its_faults(case: str) -> None:
    """Contracts 10 and 33: what would train something else than it says is refused when the spec is built."""
    model, row, words = ILLEGAL[case]
    if issubclass(model, AnchorSpec | OpdSpec):
        row = {"coefficient": 0.1, **row}
    with pytest.raises(ValidationError) as caught:
        model.model_validate(row)
    (fault,) = caught.value.errors()
    assert fault["loc"] == ()
    assert fault["msg"].count(";") == len(words) - 1
    for word in words:
        assert word in fault["msg"]


def test_opd_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValidationError) as caught:
        GrpoSpec.model_validate({"opd": {"coefficient": 1.0}})
    assert [(fault["loc"], fault["type"]) for fault in caught.value.errors()] == [(("opd", "teacher"), "missing")]


LEGAL: Mapping[str, tuple[type[Spec], Mapping[str, Any]]] = {
    "k1 as an advantage, with later tokens": (AnchorSpec, {"coefficient": 0.1, "discount": 1.0}),
    "k2 in the loss": (AnchorSpec, {"coefficient": 0.1, "estimator": "k2", "placement": "loss"}),
    "divergence in the loss": (
        OpdSpec,
        {"estimator": "divergence", "placement": "loss", "divergence": {"support": "union"}, "teacher": STATIC},
    ),
    "a live teacher that starts elsewhere": (
        OpdSpec,
        {"teacher": {**LIVE, "weights": {"kind": "folder", "name": "a", "sha256": DIGEST}}},
    ),
    "a live teacher that sees more": (SdpoSpec, {"teacher": LIVE}),
    "SDPO over the vocabulary": (SdpoSpec, {"teacher": STATIC, "divergence": FULL}),
    "OPSD at the teacher's ids": (OpsdSpec, {"divergence": {"support": "teacher", "truncation": "bregman"}}),
    "a blend with clips of its own": (BlendSpec, {"weight": 0.5, "policy": {"normalise_std": True, "dual_clip": None}}),
    "an EMA of rate 1": (TeacherSpec, {"schedule": "ema", "rate": 1.0}),
    "a trust region": (TeacherSpec, {"schedule": "trust_region", "rate": 0.5}),
}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_combination_is_taken(case: str) -> None:
    model, row = LEGAL[case]
    found = model.model_validate(row).model_dump(mode="json")
    assert {name: found[name] for name in row if not isinstance(row[name], Mapping)} == {
        name: value for name, value in row.items() if not isinstance(value, Mapping)
    }


@pytest.mark.parametrize(
    ("weights", "place"),
    [
        ("bas", "weights"),
        ({"kind": "folder", "name": "teacher", "sha256": DIGEST.upper()}, "sha256"),
        ({"kind": "folder", "name": "teacher", "sha256": DIGEST[:-1]}, "sha256"),
        ({"kind": "folder", "name": "teacher"}, "sha256"),
        ({"kind": "folder", "name": "../teacher", "sha256": DIGEST}, "name"),
        ({"kind": "folder", "name": "", "sha256": DIGEST}, "name"),
        ({"kind": "checkpoint", "cell": CELL[1:], "step": "last"}, "cell"),
        ({"kind": "checkpoint", "cell": CELL + "0", "step": "last"}, "cell"),
        ({"kind": "checkpoint", "cell": "g" + CELL[1:], "step": "last"}, "cell"),
        ({"kind": "checkpoint", "cell": CELL, "step": 0}, "step"),
        ({"kind": "checkpoint", "cell": CELL, "step": "first"}, "step"),
        ({"kind": "nonesuch", "cell": CELL}, "weights"),
    ],
)
def test_teacher_weights_name_what_can_be_found(weights: object, place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TeacherSpec.model_validate({"schedule": "static", "weights": weights})
    assert all(fault["loc"][0] == "weights" for fault in caught.value.errors())
    assert any(place in map(str, fault["loc"]) for fault in caught.value.errors())


def test_teacher_weights_are_told_apart_by_kind() -> None:
    folder = {"kind": "folder", "name": "teacher-1.5", "sha256": DIGEST}
    checkpoint = {"kind": "checkpoint", "cell": CELL, "step": 12}
    found = [TeacherSpec.model_validate({**STATIC, "weights": one}).weights for one in (folder, checkpoint, "base")]
    assert found == [FolderWeights.model_validate(folder), CheckpointWeights.model_validate(checkpoint), "base"]


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


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((name, 2) for name in ("grpo", "gspo", "sapo", "rloo", "reinforce_pp_baseline")),
        *((name, 1) for name in ("reinforce_pp", "ppo", "opsd", "sdpo")),
    ],
)
def test_cell_spec_needs_rollouts_to_compare(cell_spec: CellSpec, name: str, least: int) -> None:
    """A group of one has an advantage of 0, which learns nothing, or none at all."""
    row = _row(cell_spec)
    row["algorithm"] = {"name": name} | ({"teacher": STATIC} if name == "sdpo" else {})
    row["training"]["rollouts_per_problem"] = least
    assert CellSpec.model_validate(row).algorithm.min_rollouts == least
    row["training"]["rollouts_per_problem"] = 1
    if least > 1:
        with pytest.raises(ValidationError, match=f"1 rollout a problem for {name}, which compares at least 2"):
            CellSpec.model_validate(row)


@pytest.mark.parametrize("prompt", ["max_prompt_tokens", "max_teacher_prompt_tokens"])
def test_cell_spec_needs_room_for_its_longest_sequence(cell_spec: CellSpec, prompt: str) -> None:
    """The fixture's base has 128 positions and its responses 8 tokens."""
    row = _row(cell_spec)
    row["training"][prompt] = 120
    assert CellSpec.model_validate(row).training.max_response_tokens == 8
    row["training"][prompt] = 121
    with pytest.raises(ValidationError, match=r"prompts and .* 129 tokens for 128"):
        CellSpec.model_validate(row)


def test_cell_spec_support_fits_the_vocabulary(cell_spec: CellSpec) -> None:
    """Bytes and three special tokens are 259 ids; OPD's divergence is looked at as SDPO's is."""
    for algorithm in (
        {"name": "sdpo", "teacher": STATIC, "divergence": {"top_k": 259}},
        {"name": "grpo", "opd": {**ARMS["opd-union"]["opd"], "divergence": {"support": "union", "top_k": 259}}},
    ):
        row = _row(cell_spec) | {"algorithm": algorithm}
        found = CellSpec.model_validate(row).divergence
        assert found is not None
        assert found.top_k == 259
        algorithm.get("opd", algorithm)["divergence"]["top_k"] = 260  # type: ignore[index]
        with pytest.raises(ValidationError, match="top_k 260 for a vocabulary of 259 ids"):
            CellSpec.model_validate(row)


@pytest.mark.parametrize("place", ["opd", "sdpo"])
def test_teacher_of_the_profile_is_the_profiles_teacher(cell_spec: CellSpec, place: str) -> None:
    row = _row(cell_spec)
    teacher = {**STATIC, "weights": "profile"}
    row["algorithm"] = (
        {"name": "sdpo", "teacher": teacher} if place == "sdpo" else {"name": "grpo", "opd": {"teacher": teacher}}
    )
    with pytest.raises(ValidationError, match="teacher_base belongs to teacher weights 'profile'"):
        CellSpec.model_validate(row)
    row["teacher_base"] = row["base"]
    assert CellSpec.model_validate(row).teacher_base == cell_spec.base
    row["algorithm"] = {"name": "grpo"}
    with pytest.raises(ValidationError, match="teacher_base belongs to teacher weights 'profile'"):
        CellSpec.model_validate(row)


@pytest.mark.parametrize("schedule", [{"schedule": "ema", "rate": 0.1}, {"schedule": "live"}, STATIC])
def test_teacher_of_another_shape_cannot_follow(cell_spec: CellSpec, schedule: dict[str, Any]) -> None:
    row = _row(cell_spec)
    row["algorithm"] = {"name": "grpo", "opd": {"teacher": {**schedule, "weights": "profile"}}}
    row["teacher_base"] = row["base"] | {"name": "other"}
    CellSpec.model_validate(row)
    row["teacher_base"]["shape"] = row["base"]["shape"] | {"num_layers": 3}
    if schedule == STATIC:
        CellSpec.model_validate(row)
        return
    with pytest.raises(ValidationError, match=f"schedule '{schedule['schedule']}' for a teacher of another shape"):
        CellSpec.model_validate(row)


def test_teacher_has_room_for_the_longest_sequence(cell_spec: CellSpec) -> None:
    """96 tokens of prompt and 8 of response."""
    row = _row(cell_spec)
    row["algorithm"] = {"name": "grpo", "opd": {"teacher": {**STATIC, "weights": "profile"}}}
    row["teacher_base"] = row["base"] | {"shape": row["base"]["shape"] | {"max_positions": 104}}
    CellSpec.model_validate(row)
    row["teacher_base"]["shape"]["max_positions"] = 103
    with pytest.raises(ValidationError, match="up to 104 tokens for 103 positions of the teacher"):
        CellSpec.model_validate(row)


def test_cell_spec_reports_what_does_not_fit_together_at_once(cell_spec: CellSpec) -> None:
    row = _row(cell_spec)
    row["teacher_base"] = row["base"]
    row["training"] |= {"max_prompt_tokens": 121, "rollouts_per_problem": 1}
    opd = {**ARMS["opd-teacher"]["opd"], "divergence": {"support": "teacher", "top_k": 300}}
    row["algorithm"] = {"name": "rloo", "minibatches": 3, "opd": opd}
    with pytest.raises(ValidationError) as caught:
        CellSpec.model_validate(row)
    (fault,) = caught.value.errors()
    for words in (
        "3 mini-batches for 2 rollouts a step; ",
        "1 rollout a problem for rloo, which compares at least 2; ",
        "top_k 300 for a vocabulary of 259 ids; ",
        "teacher_base belongs to teacher weights 'profile'",
        "; prompts and responses of up to 129 tokens for 128 positions",
    ):
        assert words in fault["msg"]


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


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
@pytest.mark.parametrize("schedule", ["ema", "trust_region"])
def test_teacher_spec_bounds_the_rate(schedule: str, rate: float) -> None:
    with pytest.raises(ValidationError, match="rate"):
        TeacherSpec.model_validate({"schedule": schedule, "rate": rate})


@pytest.mark.parametrize("row", [{"kind": "bpe"}, {"kind": "byte", "vocab_size": 300}])
def test_tokenizer_spec_ties_size_to_bpe(row: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="vocab_size belongs to kind 'bpe'"):
        TokenizerSpec.model_validate(row)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"divergence": {"alpha": 1.01}}, "divergence.alpha"),
        ({"divergence": {"alpha": -0.01}}, "divergence.alpha"),
        ({"divergence": {"top_k": 0}}, "divergence.top_k"),
        ({"divergence": {"token_clip": 0.0}}, "divergence.token_clip"),
        ({"divergence": {"entry_clip": -1.0}}, "divergence.entry_clip"),
        ({"no_context": "skip"}, "no_context"),
        ({"blend": {"weight": 0.0}}, "blend.weight"),
        ({"blend": {"weight": 1.0}}, "blend.weight"),
        ({"success_threshold": 0.0}, "success_threshold"),
        ({"importance_clip": 0.0}, "importance_clip"),
        ({"rollout_cap": 0.0}, "rollout_cap"),
        ({"scope": "run"}, "scope"),
        ({"reduction": "sum"}, "reduction"),
        ({"teacher": {**STATIC, "max_failed_fraction": 1.1}}, "teacher.max_failed_fraction"),
    ],
)
def test_sdpo_spec_bounds_its_numbers(row: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SdpoSpec.model_validate({"teacher": STATIC, **row})
    assert [".".join(map(str, fault["loc"])) for fault in caught.value.errors()] == [place]
