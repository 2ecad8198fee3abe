"""TRL's SDPO trainer, called as it calls itself, on hidden states that a test chooses.

Everything between the models' logits and the loss is the peer's own code: the shift by one position, the temperature,
the masks, the objective, the importance weight, the mean, the division by the accumulation steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.text import build_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A micro-batch: final hidden states of both sides at every position, and what the responses are.

    `student` [sequence, prompt + response, hidden] is projected by `head` [vocab, hidden]; `teacher`, with a prompt of
    another width, by `teacher_head`. Position prompt + t - 1 predicts response token t. `response_ids` and `old_logps`
    [sequence, token] count up to `lengths`; `active` tells which sequences have a teacher context, `advantages` are
    theirs.
    """

    student: Tensor
    head: Tensor
    teacher: Tensor
    teacher_head: Tensor
    response_ids: Tensor
    lengths: tuple[int, ...]
    active: tuple[bool, ...]
    old_logps: Tensor | None = None
    advantages: tuple[float, ...] = ()

    @property
    def mask(self) -> Tensor:
        """[sequence, token] True on response tokens."""
        return torch.arange(self.response_ids.shape[1]) < torch.tensor(self.lengths)[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLoss:
    """What the trainer would train with, and the mean over tokens that it logs for it."""

    loss: Tensor
    logged: float


class _TableModel(torch.nn.Module):
    """A model that knows its final hidden states beforehand."""

    def __init__(self, states: Tensor, head: Tensor) -> None:
        super().__init__()
        self.states, self.head = states, head

    def forward(
        self, *, input_ids: Tensor, attention_mask: Tensor, use_cache: bool, logits_to_keep: int
    ) -> SimpleNamespace:
        assert input_ids.shape == attention_mask.shape == self.states.shape[:2]
        return SimpleNamespace(logits=self.states[:, -logits_to_keep:] @ self.head.T)


def make_folder(path: Path, *, seed: int) -> None:
    """Write a random model whose logits show its context, with a vocabulary that is not padded."""
    text = build_tokenizer(TokenizerSpec(kind="byte"), texts=())
    text.save(path)
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=text.end_id,
        pad_token_id=text.pad_id,
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)


def make_trainer(folder: Path, **settings: Any) -> Any:
    """The trainer with its own defaults but for what `settings` of `SDPOConfig` say; its models may be None by type."""
    return SDPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=SDPOConfig(
            output_dir=str(folder / "out"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=8,
            **settings,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


def peer_loss(
    case: Case, settings: Mapping[str, Any], *, folder: Path, temperature: float, accumulation: int = 1
) -> PeerLoss:
    """The loss of one micro-batch of `accumulation`, under `settings` of `SDPOConfig`."""
    trainer = make_trainer(folder, temperature=temperature, **settings)
    trainer.model.train()
    trainer.teacher_model = _TableModel(case.teacher, case.teacher_head)
    trainer.current_gradient_accumulation_steps = accumulation
    loss = trainer.compute_loss(_TableModel(case.student, case.head), _inputs(case))
    name = "distillation_loss" if trainer.args.distillation_weight else "policy_loss"
    return PeerLoss(loss=loss, logged=trainer._metrics["train"][f"self_distillation/{name}"][-1])


def _inputs(case: Case) -> dict[str, Tensor]:
    mask = case.mask.long()
    sequences, width = case.response_ids.shape
    prompt, teacher_prompt = (
        torch.ones(sequences, states.shape[1] - width, dtype=torch.long) for states in (case.student, case.teacher)
    )
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": case.response_ids,
        "completion_mask": mask,
        "teacher_input_ids": torch.cat([teacher_prompt, case.response_ids], dim=1),
        "teacher_attention_mask": torch.cat([teacher_prompt, mask], dim=1),
        "self_distillation_mask": torch.tensor(case.active, dtype=torch.float32),
        "advantages": torch.tensor(case.advantages, dtype=case.student.dtype),
    }
    if case.old_logps is not None:
        inputs["old_per_token_logps"] = case.old_logps
    return inputs
