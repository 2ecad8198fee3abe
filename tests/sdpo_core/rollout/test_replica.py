"""The replica engine: a copy that follows the trainer's weights, and says so when it does not."""

import re

import pytest
import torch

from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.errors import CellError, SpecError
from sdpo_core.rollout.base import Sampling
from sdpo_core.rollout.publish import canary_rows, publish
from sdpo_core.rollout.replica import ReplicaEngine, load_engine
from sdpo_core.specs import CellSpec, OptimizerSpec
from tests.sdpo_core.backends.test_hf import WeighedSurprise, train_rows
from tests.sdpo_core.micro import Base, load_model, make_spec
from tests.sdpo_core.rollout.test_local import make_engine, requests

SAMPLING = Sampling(temperature=1.0, max_response_tokens=5)


def make_policy(base: Base) -> ModelPolicy:
    return hf_policy(load_model(base.folder), OptimizerSpec(learning_rate=1e-2), temperature=1.0, max_tokens=10_000)


def make_replica(base: Base, policy: ModelPolicy, cell_spec: CellSpec) -> ReplicaEngine:
    return load_engine(make_spec(cell_spec), policy=policy, folder=base.folder, device="cpu")


def test_replica_samples_what_the_local_engine_samples(base: Base, cell_spec: CellSpec) -> None:
    found = make_replica(base, make_policy(base), cell_spec).generate(requests(), sampling=SAMPLING)
    assert found == make_engine(base).generate(requests(), sampling=SAMPLING)


def test_replica_follows_every_update(base: Base, cell_spec: CellSpec) -> None:
    """Contract of versions: after each update the copy holds the trainer's weights, and rollouts name their version."""
    policy = make_policy(base)
    engine = make_replica(base, policy, cell_spec)
    for version in range(3):
        rollouts = engine.generate(requests(), sampling=SAMPLING)
        assert {rollout.weights_version for rollout in rollouts} == {version}
        for name, value in policy.weights().items():
            assert torch.equal(engine._model.weights()[name], value)
        policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)


def test_weights_stay_where_they_are_between_updates(base: Base, cell_spec: CellSpec) -> None:
    policy = make_policy(base)
    engine = make_replica(base, policy, cell_spec)
    engine.generate(requests(), sampling=SAMPLING)
    policy.model.weights = None  # type: ignore[assignment, method-assign]
    engine.generate(requests(), sampling=SAMPLING)


@pytest.mark.parametrize("damage", ["stale", "uniform", "other layer", "nan"])
def test_canary_catches_weights_that_did_not_arrive(
    base: Base, cell_spec: CellSpec, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """One update's weights left out, every weight equal, two layers exchanged, no number: the cell stops."""
    policy = make_policy(base)
    engine = make_replica(base, policy, cell_spec)
    engine.generate(requests(), sampling=SAMPLING)
    policy.update(train_rows(), WeighedSurprise(), learning_rate=1e-2)
    blend = engine._model.blend

    def broken(weights: dict[str, torch.Tensor], *, rate: float) -> None:
        if damage == "stale":
            return
        if damage == "uniform":
            weights = {name: torch.full_like(value, 0.01) for name, value in weights.items()}
        if damage == "other layer":
            weights = {re.sub(r"layers\.([01])", lambda m: f"layers.{1 - int(m[1])}", n): v for n, v in weights.items()}
        if damage == "nan":
            weights = {name: value * float("nan") for name, value in weights.items()}
        blend(weights, rate=rate)

    monkeypatch.setattr(engine._model, "blend", broken)
    with pytest.raises(CellError, match="replica engine: got log-probabilities that differ from the trainer's by"):
        engine.generate(requests(), sampling=SAMPLING)


def test_weights_of_a_teacher_are_never_published(base: Base) -> None:
    scorer = ModelScorer([Part(model=load_model(base.folder), share=1.0)], temperature=1.0, max_tokens=100)
    with pytest.raises(SpecError, match="got a ModelScorer, expected the student's policy"):
        publish(scorer, canary=canary_rows([(1, 2)], vocab=10))


def test_canary_reaches_over_the_vocabulary() -> None:
    found = canary_rows([(1, 2), (1, 2), (3, 4), (5, 6)], vocab=259)
    assert [row.prompt_ids for row in found] == [(1, 2), (3, 4)]
    for rows in (found, canary_rows([(1, 2), (1, 2)], vocab=259)):
        ids = [token for row in rows for token in row.response_ids]
        assert (min(ids), max(ids), len(set(ids))) == (0, 258, 16)


def test_no_request_is_answered_with_no_rollout(base: Base, cell_spec: CellSpec) -> None:
    assert make_replica(base, make_policy(base), cell_spec).generate([], sampling=SAMPLING) == ()
