"""Training on what the SGLang engine samples: the same as on the same rollouts from elsewhere, and it learns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist

from sdpo_core.backends.base import TokenRow
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.records import Rollout
from sdpo_core.rollout.base import RolloutRequest, Sampling
from sdpo_core.rollout.sglang import SglangEngine, load_engine
from sdpo_core.sglang.server import ManagedServer
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer
from sdpo_core.trainer import StepOutcome
from sdpo_core.workers import StudentWorker
from tests.sdpo_core.backends.megatron.processes import run_in_processes
from tests.sdpo_core.micro import Base, make_spec, plain_workers
from tests.sdpo_core.rollout.test_local import requests
from tests.sdpo_core.rollout.test_sglang import make_policy, servers, train
from tests.sdpo_core.test_trainer import make_trainer

pytestmark = pytest.mark.sglang

STEPS = 4
SAMPLING = Sampling(temperature=1.0, max_response_tokens=12)


@pytest.fixture(autouse=True)
def address(shared_server: ManagedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPO_SGLANG_URL", shared_server.url)
    monkeypatch.setenv("SDPO_SGLANG_TOKEN", shared_server.token)


class Recording(StudentWorker):
    """Keeps what its engine has sampled."""

    def __init__(self, spec: CellSpec, *, base: Base) -> None:
        super().__init__(spec, folder=base.folder, device="cpu")
        self.kept: list[tuple[Rollout, ...]] = []

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        self.kept.append(super().generate(requests, sampling=sampling))
        return self.kept[-1]


class Replaying(StudentWorker):
    """Samples nothing: takes kept ids, with the policy's own log-probabilities of them."""

    def __init__(self, spec: CellSpec, *, base: Base, kept: Sequence[tuple[Rollout, ...]]) -> None:
        super().__init__(spec.model_copy(update={"engine": "local"}), folder=base.folder, device="cpu")
        self._kept: Iterator[tuple[Rollout, ...]] = iter(kept)

    def generate(self, requests: Sequence[RolloutRequest], *, sampling: Sampling) -> tuple[Rollout, ...]:
        found = next(self._kept)
        assert [rollout.prompt_ids for rollout in found] == [request.prompt_ids for request in requests]
        scores = self.score([TokenRow(prompt_ids=r.prompt_ids, response_ids=r.response_ids) for r in found], top_k=0)
        return tuple(
            replace(rollout, sampling_logps=tuple(score.logps.tolist()))
            for rollout, score in zip(found, scores, strict=True)
        )


def steps(spec: CellSpec, student: StudentWorker, *, base: Base) -> list[StepOutcome]:
    workers = replace(plain_workers(spec.model_copy(update={"engine": "local"}), folder=base.folder), student=student)
    trainer, cursor, outcomes = make_trainer(spec, base=base, workers=workers), 0, []
    for number in range(1, spec.training.steps + 1):
        outcomes.append(trainer.step(number, cursor=cursor))
        cursor = outcomes[-1].cursor
    return outcomes


def of_sglang(spec: CellSpec) -> CellSpec:
    return spec.model_copy(update={"engine": "sglang"})


@pytest.mark.parametrize("arm", ["grpo", "sdpo-ema", "opd"])
def test_replayed_rollouts_train_the_same(cell_spec: CellSpec, base: Base, arm: str) -> None:
    """Losses, norms and weights, where the loss depends on the engine's log-probabilities too."""
    spec = of_sglang(
        make_spec(
            cell_spec, arm=arm, algorithm={"rollout_cap": 2.0}, training={"steps": STEPS, "max_response_tokens": 12}
        )
    )
    live = Recording(spec, base=base)
    again = Replaying(spec, base=base, kept=live.kept)
    first = steps(spec, live, base=base)
    second = steps(spec, again, base=base)
    for one, other in zip(first, second, strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/reward"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], abs=1e-5), name
        assert one.metrics["train/engine_gap_max"] == pytest.approx(0.0, abs=2e-5)
        assert other.metrics["train/engine_gap_max"] == pytest.approx(0.0, abs=2e-6)
    versions = [{rollout.weights_version for rollout in call} for call in live.kept]
    assert versions == [{step} for step in range(STEPS)]
    for name, value in live.weights().items():
        np.testing.assert_allclose(value.numpy(), again.weights()[name].numpy(), rtol=0, atol=1e-4)


def test_student_learns_from_rollouts_of_either_engine(cell_spec: CellSpec, base: Base) -> None:
    """Half of all first letters are right at the start."""
    numbers = {"steps": 12, "problems_per_step": 4, "rollouts_per_problem": 8, "microbatch_tokens": 4000}
    spec = make_spec(cell_spec, arm="grpo", optimizer={"learning_rate": 1e-2}, training=numbers)
    rewards = {}
    for name in ("local", "sglang"):
        student = StudentWorker(spec.model_copy(update={"engine": name}), folder=base.folder, device="cpu")
        outcomes = steps(spec, student, base=base)
        rewards[name] = [cast("float", outcome.metrics["train/reward"]) for outcome in outcomes]
        assert max(cast("float", outcome.metrics["train/engine_gap_max"]) for outcome in outcomes) < 1e-4
        assert isinstance(student._engine, SglangEngine) == (name == "sglang")
    for name, values in rewards.items():
        assert np.mean(values[:2]) < 0.7, name
        assert np.mean(values[-3:]) > 0.85, (name, values)


@pytest.mark.parametrize("work", ["sample_in_two_processes", "sample_from_a_model_cut_in_two"])
def test_every_process_of_a_student_has_the_same_rollouts(
    cell_spec: CellSpec, base: Base, tmp_path: Path, work: str
) -> None:
    """Process 0 alone asks the server; the weights are put together by all."""
    if work == "sample_from_a_model_cut_in_two":
        pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")
    spec = of_sglang(make_spec(cell_spec, training={"temperature": 1.0}))
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    (tmp_path / "base").symlink_to(base.folder)
    found = run_in_processes(f"{__name__}:{work}", size=2, folder=tmp_path)
    alone = load_engine(spec, policy=make_policy(base), folder=base.folder, device="cpu")
    expected = alone.generate(requests(), sampling=SAMPLING)
    servers(alone).close()
    assert found["same"]
    assert found["versions"] == [0, 1]
    assert found["ids"] == [list(rollout.response_ids) for rollout in expected]


def sample_in_two_processes(folder: Path) -> dict[str, Any]:
    return _sample(folder, make=lambda base: make_policy(Base(folder=base, text=ChatTokenizer.load(base))))


def sample_from_a_model_cut_in_two(folder: Path) -> dict[str, Any]:
    from sdpo_core.layout import LayoutSpec
    from tests.sdpo_core.backends.megatron.test_training import make_policy as make_megatron_policy

    def make(base: Path) -> ModelPolicy:
        policy = make_megatron_policy(base, LayoutSpec(tensor=2))
        policy._temperature = 1.0
        return policy

    return _sample(folder, make=make)


def _sample(folder: Path, *, make: Callable[[Path], ModelPolicy]) -> dict[str, Any]:
    """Before and after an update."""
    base = folder.parent / "base"
    spec = CellSpec.model_validate_json((folder.parent / "spec.json").read_text())
    policy = make(base)
    engine = load_engine(spec, policy=policy, folder=base, device="cpu")
    first = engine.generate(requests(), sampling=SAMPLING)
    train(policy)
    second = engine.generate(requests(), sampling=SAMPLING)
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, (first, second))
    return {
        "same": parts[0] == parts[1],
        "versions": [rollouts[0].weights_version for rollouts in (first, second)],
        "ids": [rollout.response_ids for rollout in first],
    }
