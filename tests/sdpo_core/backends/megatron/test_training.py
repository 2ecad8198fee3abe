"""Optimizer steps and checkpoints: those of one process, bit-equal continuation, weights at any other layout."""

import pickle
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("megatron.core", reason="needs the extra 'megatron'")

from megatron.core import optimizer as megatron_optimizer

from sdpo_core.algorithms.objective import TermSum
from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.backends.megatron.optimizer import MegatronOptimizer
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.backends.weight_files import read_weights
from sdpo_core.errors import CellError, DataError
from sdpo_core.layout import LayoutSpec
from sdpo_core.specs import OptimizerSpec
from tests.sdpo_core.backends.megatron.test_objectives import (
    OBJECTIVES,
    TEMPERATURE,
    VALID,
    same_weights,
    token_rows,
    train_rows,
)
from tests.sdpo_core.micro import Base, load_model
from tests.sdpo_core.objectives.processes import run_processes

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "tp1": LayoutSpec(),
    "tp2": LayoutSpec(tensor=2),
    "tp2-sp": LayoutSpec(tensor=2, sequence=True),
    "cp2": LayoutSpec(context=2),
    "dp2-shared": LayoutSpec(data=2, distributed_optimizer=True),
    "tp2cp2-sp-shared": LayoutSpec(tensor=2, context=2, sequence=True, distributed_optimizer=True),
}
# Weight decay so large that a norm which decays, or a matrix which does not, is a hundred times what rounding is.
OPTIMIZER = OptimizerSpec(learning_rate=1e-3, weight_decay=1.0, max_grad_norm=0.05)
OBJECTIVE = OBJECTIVES["sdpo, blend"]
STEPS = 3
# Of the weights, which a step moves by 1e-3. One process in float32 is 3e-8 and, where a gradient is almost 0 and Adam
# divides by it, 2.3e-5 from float64.
MEAN, LARGEST = 3e-7, 1e-4


def make_policy(
    folder: Path,
    layout: LayoutSpec,
    *,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerSpec = OPTIMIZER,
    has_value_head: bool = False,
) -> ModelPolicy:
    model = MegatronModel(
        folder,
        layout=layout,
        dtype=dtype,
        device=torch.device("cpu"),
        valid_vocab=VALID,
        has_value_head=has_value_head,
    )
    return ModelPolicy(model, MegatronOptimizer(model, optimizer), temperature=TEMPERATURE, max_tokens=100)


def train(policy: ModelPolicy, *, steps: int = STEPS, objective: TermSum = OBJECTIVE) -> dict[str, Tensor]:
    for _ in range(steps):
        policy.update(train_rows(states=False), objective, learning_rate=OPTIMIZER.learning_rate)
    return policy.weights()


@pytest.fixture(scope="module")
def stepped(base: Base) -> dict[str, Tensor]:
    """The weights that one Hugging Face process in float64 has after three clipped steps with weight decay."""
    policy = hf_policy(
        load_model(base.folder, dtype=torch.float64), OPTIMIZER, temperature=TEMPERATURE, max_tokens=9999
    )
    return train(policy)


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_and_checkpoints(name: str, base: Base, stepped: dict[str, Tensor], tmp_path: Path) -> None:
    """Three clipped steps as one process takes them; saved and loaded, the next three are bit-equal.

    The shares make up the weights at any layout and in the other backend.
    """
    layout = LAYOUTS[name]
    (tmp_path / "stepped").write_bytes(pickle.dumps(stepped))
    run_processes(partial(check_training, tmp_path, base.folder, layout), size=layout.size, folder=tmp_path)
    saved = pickle.loads((tmp_path / "saved").read_bytes())  # noqa: S301 (the worker's own file)
    checkpoint = tmp_path / "checkpoint"
    same_weights(read_weights(checkpoint), saved)
    assert {path.suffix for path in checkpoint.iterdir()} == {".safetensors", ".json"}
    other = load_model(base.folder)
    other.load_weights(checkpoint)
    same_weights(other.weights(), saved)
    for unlike in (LayoutSpec(), LayoutSpec(context=2)):
        if unlike != layout:
            shutil.rmtree(tmp_path / "elsewhere", ignore_errors=True)
            (tmp_path / "elsewhere").mkdir()
            work = partial(check_elsewhere, tmp_path, base.folder, unlike)
            run_processes(work, size=unlike.size, folder=tmp_path / "elsewhere")
            break


def check_training(folder: Path, base: Path, layout: LayoutSpec, group: ProcessGroup) -> None:
    policy, checkpoint = make_policy(base, layout), folder / "checkpoint"
    expected: Mapping[str, Tensor] = pickle.loads((folder / "stepped").read_bytes())  # noqa: S301 (the parent's own)
    saved = train(policy)
    for key, value in expected.items():
        errors = (saved[key].double() - value).abs()
        assert float(errors.mean()) <= MEAN, key
        assert float(errors.max()) <= LARGEST, key
    policy.save(checkpoint)
    group.barrier().wait()
    if group.rank() == 0:
        (folder / "saved").write_bytes(pickle.dumps(saved))
    further = train(policy)
    resumed = make_policy(base, layout)
    resumed.load(checkpoint)
    same_weights(resumed.weights(), saved)
    assert isinstance(resumed.optimizer, MegatronOptimizer)
    counts = [state["step"] for state in resumed.optimizer._optimizer.optimizer.state.values()]
    assert {float(count) for count in counts} == {float(STEPS)}
    assert len({id(count) for count in counts}) == len(counts)
    same_weights(train(resumed), further)
    assert any(not torch.equal(further[key], saved[key]) for key in saved)
    forgetful = make_policy(base, layout)
    forgetful.load_weights(checkpoint)
    assert any(not torch.equal(value, further[key]) for key, value in train(forgetful).items())


def check_elsewhere(folder: Path, base: Path, layout: LayoutSpec, group: ProcessGroup) -> None:  # noqa: ARG001
    """The weights load, and score as one process does; the optimizer's state is another layout's."""
    saved: Mapping[str, Tensor] = pickle.loads((folder / "saved").read_bytes())  # noqa: S301 (the parent's own)
    policy = make_policy(base, layout)
    policy.load_weights(folder / "checkpoint")
    same_weights(policy.weights(), saved)
    whole = load_model(base)
    whole.blend(saved, rate=1.0)
    other = hf_policy(whole, OPTIMIZER, temperature=TEMPERATURE, max_tokens=9999)
    for one, two in zip(policy.score(token_rows(), top_k=0), other.score(token_rows(), top_k=0), strict=True):
        np.testing.assert_allclose(one.logps, two.logps, rtol=0, atol=2e-5)
    if (folder / "checkpoint" / "optimizer-00000-of-00001.safetensors").is_file():
        return
    with pytest.raises(DataError, match="Resume at the layout of the checkpoint"):
        policy.load(folder / "checkpoint")


def test_other_states(base: Base, tmp_path: Path) -> None:
    """Value heads and bfloat16 resume bit-equal, a NaN leaves the weights, an EMA in bfloat16 keeps what it rounds."""
    run_processes(partial(check_states, tmp_path, base.folder), size=2, folder=tmp_path)


def check_states(folder: Path, base: Path, group: ProcessGroup) -> None:
    layout = LayoutSpec(tensor=2, sequence=True)
    shared = layout.model_copy(update={"distributed_optimizer": True})
    states: dict[str, dict[str, Any]] = {
        "value": {"layout": layout, "has_value_head": True},
        "half": {"layout": layout, "dtype": torch.bfloat16},
        "half, shared": {"layout": shared, "dtype": torch.bfloat16},
    }
    for name, options in states.items():
        objective = OBJECTIVES["ppo"] if name == "value" else OBJECTIVE
        policy = make_policy(base, **options)
        train(policy, objective=objective)
        policy.save(folder / name)
        group.barrier().wait()
        further = train(policy, objective=objective)
        resumed = make_policy(base, **options)
        resumed.load(folder / name)
        same_weights(train(resumed, objective=objective), further)
        if policy.model.value_head is not None and resumed.model.value_head is not None:
            assert torch.equal(policy.model.value_head.weight, resumed.model.value_head.weight)
            assert policy.model.value_head.weight.abs().max() > 0
    check_nan(base, layout)
    check_ema(folder, base, layout, group)


def check_nan(base: Path, layout: LayoutSpec) -> None:
    policy = make_policy(base, layout)
    before = policy.weights()
    rows = train_rows(states=False)
    rows[0] = replace(rows[0], weight=float("nan"))
    with pytest.raises(CellError, match="got gradient norm nan"):
        policy.update(rows, OBJECTIVE, learning_rate=1e-3)
    same_weights(policy.weights(), before)


def check_ema(folder: Path, base: Path, layout: LayoutSpec, group: ProcessGroup) -> None:
    """teacher <- (1 - r) teacher + r student in float32: in bfloat16 a step of 1e-4 of the way would round to none."""
    model = MegatronModel(base, layout=layout, dtype=torch.bfloat16, device=torch.device("cpu"), valid_vocab=VALID)
    scorer = ModelScorer([Part(model=model, share=1.0)], temperature=1.0, max_tokens=100)
    start = {name: value.float() for name, value in scorer.weights().items()}
    student = {name: value + 1.0 for name, value in start.items()}
    for _ in range(100):
        scorer.blend(student, rate=1e-4)
    moved = 1.0 - (1.0 - 1e-4) ** 100
    for name, value in scorer.weights().items():
        expected = (start[name] + moved).bfloat16().float()
        assert float((value.float() - expected).abs().max()) <= 2**-8 * float(expected.abs().max()), name
    scorer.save(folder / "teacher")
    group.barrier().wait()
    again = MegatronModel(base, layout=layout, dtype=torch.bfloat16, device=torch.device("cpu"), valid_vocab=VALID)
    again.load_weights(folder / "teacher")
    for one in (model, again):
        one.blend(student, rate=1e-4)
    assert model._masters().keys() == model.module.shard_parameters().keys()
    for name, value in model._masters().items():
        assert torch.equal(again._masters()[name], value), name
    # Whoever changes the weights otherwise leaves no masters behind that a checkpoint would take for them.
    model.weights_version += 1
    assert not model._masters()


class GroupAdam(torch.optim.Optimizer):
    """AdamW whose groups count the steps, as the fused optimizers of CUDA do; its parameters hold moments alone."""

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                deviation = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (deviation + group["eps"]))


def test_count_of_steps_that_groups_keep_is_resumed(base: Base, tmp_path: Path) -> None:
    """Adam corrects young moments by it: old ones at step 1 would take steps of another size."""
    run_processes(partial(check_group_counts, tmp_path, base.folder), size=1, folder=tmp_path)


def check_group_counts(folder: Path, base: Path, group: ProcessGroup) -> None:  # noqa: ARG001
    megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = GroupAdam, False
    policy = make_policy(base, LayoutSpec())
    saved = train(policy)
    policy.save(folder / "checkpoint")
    further = train(policy)
    resumed = make_policy(base, LayoutSpec())
    resumed.load(folder / "checkpoint")
    same_weights(resumed.weights(), saved)
    same_weights(train(resumed), further)
    # A policy that has gone on, too.
    policy.load(folder / "checkpoint")
    same_weights(train(policy), further)
