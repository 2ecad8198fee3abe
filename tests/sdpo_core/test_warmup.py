"""Warm-up: the same weights from the same spec, a falling loss, contexts in the prompt."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sdpo_core.backends.base import TokenRow
from sdpo_core.base_specs import BaseSpec
from sdpo_core.errors import DataError
from sdpo_core.records import WarmupExample
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer
from sdpo_core.warmup import WarmupOutcome, _initial_model, example_messages, warm_up
from tests.sdpo_core.micro import load_model, make_problem, make_spec

BPE = {"kind": "bpe", "vocab_size": 280, "phrases": ["Say "]}


def examples(purpose: str) -> Iterator[WarmupExample]:
    """An endless stream of copies, plain and with each context."""
    offset = len(purpose)
    for index in itertools.count(offset):
        problem = make_problem(index)
        word = problem.prompt[0].content.removeprefix("Say ")
        yield WarmupExample(
            problem=problem,
            response=word,
            demonstration=word if index % 3 == 1 else None,
            feedback="Copy it." if index % 3 == 2 else None,
        )


def make_base_spec(cell_spec: CellSpec, *, tokenizer: dict[str, object] | None = None, **warmup: object) -> BaseSpec:
    value = make_spec(cell_spec).base.model_dump(mode="json")
    value["tokenizer"] = tokenizer or {"kind": "byte"}
    value["warmup"] |= {"steps": 25, "examples_per_step": 6, "learning_rate": 1e-2, "lr_warmup_steps": 2, **warmup}
    return BaseSpec.model_validate(value)


def make(spec: BaseSpec, folder: Path) -> WarmupOutcome:
    return warm_up(spec, examples=examples, folder=folder, threads=1)


def test_loss_falls_and_the_model_is_what_was_trained(cell_spec: CellSpec, tmp_path: Path) -> None:
    """Copies of one letter are learned within 25 steps; the folder holds the trained weights, not the initial ones."""
    outcome = make(make_base_spec(cell_spec), tmp_path)
    assert len(outcome.losses) == 25
    assert outcome.losses[0] == pytest.approx(5.56, abs=0.3)  # log 259: knows nothing
    assert outcome.losses[-1] < 0.5 * outcome.losses[0]
    assert outcome.vocab_size == 259
    model = load_model(tmp_path)
    weights = model.weights()
    assert outcome.parameters == sum(value.numel() for value in weights.values())
    assert outcome.weights_sha256 == model.facts().weights_sha256
    text = ChatTokenizer.load(tmp_path)
    example = next(examples("training"))
    row = TokenRow(
        prompt_ids=text.prompt_ids(example_messages(example)), response_ids=text.response_ids(example.response)
    )
    with torch.no_grad():
        logps = model.logits(model.response_states([row])).log_softmax(dim=1)
    own = logps[range(len(logps)), list(row.response_ids)]
    assert float(-own.mean()) < 0.6 * outcome.losses[0]
    assert row.response_ids[-1] == text.end_id  # it learned to stop as well
    assert float(own[-1]) > -outcome.losses[0]


def test_losses_are_those_of_plain_training(cell_spec: CellSpec, tmp_path: Path) -> None:
    """Oracle: three steps of AdamW on plain forwards; the rate rises over w = 1 step and falls by 0.9/3 a step."""
    spec = make_base_spec(cell_spec, steps=3, lr_warmup_steps=1)
    outcome = make(spec, tmp_path)
    text = ChatTokenizer.load(tmp_path)
    model = _initial_model(spec, text=text).train(False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    stream = examples("training")
    for loss, rate in zip(outcome.losses, (0.5 * 1, 1 * 0.7, 1 * 0.4), strict=True):
        surprises = []
        for example in itertools.islice(stream, 6):
            prompt, response = text.prompt_ids(example_messages(example)), text.response_ids(example.response)
            logps = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(dim=1)
            surprises.append(-logps[range(len(prompt) - 1, len(logps) - 1), list(response)])
        mean = torch.cat(surprises).mean()
        assert loss == pytest.approx(float(mean.detach()), rel=1e-4)
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * rate
        optimizer.step()


@pytest.mark.parametrize("tokenizer", [{"kind": "byte"}, BPE])
def test_same_spec_gives_the_same_weights(cell_spec: CellSpec, tmp_path: Path, tokenizer: dict[str, object]) -> None:
    spec = make_base_spec(cell_spec, tokenizer=tokenizer, steps=2)
    first, second = (make(spec, tmp_path / name) for name in ("a", "b"))
    assert first.weights_sha256 == second.weights_sha256
    assert first.losses == second.losses
    files = [(tmp_path / name / "tokenizer.json").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_another_seed_gives_other_weights(cell_spec: CellSpec, tmp_path: Path) -> None:
    one, other = (make(make_base_spec(cell_spec, steps=1, seed=seed), tmp_path / str(seed)) for seed in (1, 2))
    assert one.weights_sha256 != other.weights_sha256


def test_bpe_base_has_its_phrases(cell_spec: CellSpec, tmp_path: Path) -> None:
    outcome = make(make_base_spec(cell_spec, tokenizer=BPE, steps=1), tmp_path)
    assert outcome.vocab_size == 281
    assert len(ChatTokenizer.load(tmp_path).response_ids("Say ")) == 2


def test_example_without_room_is_refused(cell_spec: CellSpec, tmp_path: Path) -> None:
    value = make_base_spec(cell_spec, steps=1).model_dump()
    value["shape"]["max_positions"] = 40
    with pytest.raises(DataError, match="expected at most 40"):
        make(BaseSpec.model_validate(value), tmp_path)


def test_examples_are_prompted_like_the_teacher() -> None:
    plain, shown, told = itertools.islice(examples(""), 3)
    assert example_messages(plain) == plain.problem.prompt
    assert f"A correct solution:\n\n{shown.demonstration}" in example_messages(shown)[0].content
    assert "that failed:\n\nCopy it." in example_messages(told)[0].content
