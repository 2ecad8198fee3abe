"""The peer's side of `benchmarks/peer_trl.py`: TRL's trainers with their own defaults where nothing is said."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoTokenizer, TrainerCallback
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.peer_case import ALPHA, EMA_RATE, LEARNING_RATE, TOP_K, Case, Run, answer, problem, questions, reward
from sdpo_core.backends.memory import peak_memory_bytes
from sdpo_core.teacher.context import TeacherContext, teacher_messages


class Clock(TrainerCallback):
    """CPU time between the ends of two steps: the rollouts of a step are made while its batch is prepared."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sampling: list[float] = []
        self.tokens: list[float] = []
        self._last = self._sampled = self._tokens = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self.sampling.append(self._sampled)
        self.tokens.append(self._tokens)
        self._last, self._sampled, self._tokens = now, 0.0, 0.0

    def around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, its time added up."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = generate(*args, **kwargs)
            self._sampled += time.process_time() - start
            return result

        return timed

    def reward(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float | None]:
        """What the peer asks for once a step."""
        self._tokens += sum(len(ids) for ids in completion_ids)
        return [reward(completion[0]["content"]) for completion in completions]


def teacher_template() -> str:
    """Our teacher prompt in the peer's form."""
    context = TeacherContext(demonstration="{solution}")
    return str(teacher_messages(problem(0, "{prompt}"), context)[-1].content)


def run_peer(case: Case) -> Run:
    """One training run."""
    torch.set_num_threads(1)
    rollouts = case.problems * case.rollouts
    settings: dict[str, Any] = {
        "output_dir": f"{case.folder}/out",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": rollouts,
        "num_generations": case.rollouts,
        "max_completion_length": case.response_tokens,
        "max_steps": case.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "float32"},
    }
    # Typed loosely: the peer's signatures allow a trainer without a model.
    trainer_class: Any
    config: Any
    trainer_class, config = (SDPOTrainer, SDPOConfig) if case.arm == "sdpo" else (GRPOTrainer, GRPOConfig)
    if case.arm == "sdpo":
        settings |= {
            "distillation_mode": "topk_logits",
            "distillation_topk": TOP_K,
            "distillation_add_tail": True,
            "distillation_alpha": ALPHA,
            "teacher_update_rate": EMA_RATE,
            "solution_template": "{successful_previous_attempt}",
            "reprompt_template": teacher_template(),
        }
    clock = Clock()
    trainer = trainer_class(
        model=case.folder,
        reward_funcs=clock.reward,
        args=config(**settings),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions()]}),
        processing_class=AutoTokenizer.from_pretrained(case.folder),
        callbacks=[clock],
    )
    trainer.model.generate = clock.around(trainer.model.generate)
    trainer.train()
    return Run(
        seconds=clock.seconds[case.warmup :],
        sampling=clock.sampling[case.warmup :],
        tokens=clock.tokens[case.warmup :],
        peak_bytes=peak_memory_bytes(torch.device("cpu")),
    )


if __name__ == "__main__":
    answer(run_peer)
