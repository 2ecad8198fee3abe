"""Which metrics an arm owes, and how a run's steps become one number."""

from typing import get_args

import pytest

from sdpo_core.errors import DataError
from sdpo_core.metrics import METRICS, Moment, Trait, check_emitted, promised, summarise


def _step(**values: float | None) -> tuple[Moment, dict[str, float | None]]:
    """A step record; `distill__tokens` stands for `distill/tokens`."""
    return "step", {name.replace("__", "/"): value for name, value in values.items()}


def test_promised_grows_with_the_traits() -> None:
    """What each trait adds to a step, by hand."""
    plain = promised("step", [])
    added = {trait: promised("step", [trait]) - plain for trait in get_args(Trait)}
    assert all(plain <= promised("step", [trait]) for trait in added)
    assert added["any"] == frozenset()
    assert added["teacher"] == {
        "distill/tokens",
        "distill/teacher_entropy",
        "teacher/failed_fraction",
        "cost/peak_memory_bytes/teacher",
        "cost/teacher_forwards",
        "cost/teacher_seconds",
    }
    assert added["follows"] == {"cost/ema_updates", "cost/ema_seconds"}
    assert added["divergence"] == {"distill/divergence", "distill/clipped_fraction"}
    assert added["support"] == {
        "distill/kl_reverse",
        "distill/kl_forward",
        "distill/student_coverage",
        "distill/teacher_coverage",
        "distill/tail_share",
        "distill/topk_overlap",
    }
    assert added["sampled"] == {"distill/sampled_kl"}
    assert {name.split("/")[0] for name in added["context"]} == {"feedback"}
    assert added["anchor"] == {"drift/kl_to_base", "cost/peak_memory_bytes/anchor"}
    assert added["value"] == {"train/value_loss"}
    assert promised("step", added) == plain.union(*added.values())


def test_promised_keeps_the_moments_apart() -> None:
    step, evaluate, end = promised("step", []), promised("evaluate", []), promised("end", [])
    assert step.isdisjoint(evaluate | end)
    assert "eval/accuracy" in evaluate
    # Test figures come at the end and at no other moment.
    assert {name.split("/")[0] for name in end} == {"test", "test_at_best_dev"}
    assert not [name for name in step | evaluate if name.startswith("test")]
    assert promised("start", []) == frozenset()
    assert promised("start", get_args(Trait)) == promised("start", ["divergence"]) == {"distill/self_distance"}


def test_every_metric_is_promised_to_somebody() -> None:
    moments, traits = get_args(Moment), get_args(Trait)
    assert frozenset[str]().union(*(promised(moment, traits) for moment in moments)) == METRICS.keys()


def test_check_emitted_takes_exactly_the_promised_names() -> None:
    check_emitted(dict.fromkeys(promised("step", []), 0.0), moment="step", traits=[], where="a/grpo/1 step 3")


def test_check_emitted_names_what_is_absent_and_what_is_undeclared() -> None:
    values: dict[str, float | None] = dict.fromkeys(promised("step", []), 0.0)
    del values["train/loss"]
    values["train/lss"] = 1.0
    with pytest.raises(DataError, match=r"^a/grpo/1 step 3: .*without \['train/loss'\].*undeclared \['train/lss'\]"):
        check_emitted(values, moment="step", traits=[], where="a/grpo/1 step 3")


def test_check_emitted_refuses_a_hole() -> None:
    values: dict[str, float | None] = dict.fromkeys(promised("step", []), 0.0)
    del values["train/grad_norm"]
    with pytest.raises(DataError, match=r"without \['train/grad_norm'\]"):
        check_emitted(values, moment="step", traits=[], where="x")


def test_check_emitted_refuses_a_metric_of_another_arm() -> None:
    values: dict[str, float | None] = dict.fromkeys(promised("step", ["teacher"]), 0.0)
    with pytest.raises(DataError, match="undeclared"):
        check_emitted(values, moment="step", traits=[], where="x")


def test_check_emitted_takes_none_for_a_mean_over_nothing() -> None:
    check_emitted(dict.fromkeys(promised("step", []), None), moment="step", traits=[], where="x")


def test_summarise_follows_each_summary() -> None:
    records = [
        _step(train__reward=0.2, train__optimizer_steps=1, cost__peak_memory_bytes__student=5, eval__accuracy=0.1),
        _step(train__reward=0.4, train__optimizer_steps=2, cost__peak_memory_bytes__student=9, eval__accuracy=0.7),
        _step(train__reward=0.9, train__optimizer_steps=1, cost__peak_memory_bytes__student=7, eval__accuracy=0.3),
    ]
    summary = summarise(records)
    assert summary["train/reward"] == pytest.approx(0.5)  # mean: (0.2 + 0.4 + 0.9) / 3
    assert summary["train/optimizer_steps"] == 4  # sum
    assert summary["cost/peak_memory_bytes/student"] == 9  # max
    assert summary["eval/accuracy"] == 0.3  # last


def test_summarise_weights_distillation_by_tokens() -> None:
    records = [
        _step(distill__tokens=30, distill__divergence=0.1),
        _step(distill__tokens=10, distill__divergence=0.5),
    ]
    # (30 * 0.1 + 10 * 0.5) / 40 = 8 / 40; the mean over steps would be 0.3.
    assert summarise(records)["distill/divergence"] == pytest.approx(0.2)
    assert summarise(records)["distill/tokens"] == 40


def test_summarise_skips_a_mean_over_nothing() -> None:
    records = [
        _step(distill__tokens=0, distill__divergence=None, train__reward=0.5),
        _step(distill__tokens=4, distill__divergence=0.3, train__reward=None),
    ]
    summary = summarise(records)
    assert summary["distill/divergence"] == pytest.approx(0.3)
    assert summary["train/reward"] == 0.5


def test_summarise_of_nothing_but_none_is_none() -> None:
    assert summarise([_step(distill__tokens=0, distill__divergence=None)])["distill/divergence"] is None


def test_summarise_of_no_record_is_empty() -> None:
    assert summarise([]) == {}


def test_summarise_refuses_an_undeclared_name() -> None:
    with pytest.raises(KeyError, match="train/lss"):
        summarise([_step(train__lss=1.0)])
