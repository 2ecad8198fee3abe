"""Our side of `benchmarks/peer_trl.py`: trainer and workers in one process."""

import json
import time
from pathlib import Path

import torch

from benchmarks.peer_case import ALPHA, EMA_RATE, LEARNING_RATE, TOP_K, Case, Run, answer, problem, questions, reward
from sdpo_core.algorithms.table import algorithm
from sdpo_core.backends.base import WeightsAt
from sdpo_core.backends.memory import peak_memory_bytes
from sdpo_core.records import Verdict
from sdpo_core.specs import CellSpec
from sdpo_core.text import ChatTokenizer
from sdpo_core.trainer import Trainer
from sdpo_core.workers import StudentWorker, TeacherWorker


def run_ours(case: Case) -> Run:
    """Steps of the trainer; the clock it is given, and so its phases, are CPU time."""
    folder, spec = Path(case.folder), cell_spec(case)
    student = StudentWorker(spec, folder=folder, device="cpu")
    teacher = None
    if spec.teacher is not None:
        teacher = TeacherWorker(spec, life=spec.teacher, at=WeightsAt(folder=folder), device="cpu")
    trainer = Trainer(
        spec,
        problems=[problem(index, question) for index, question in enumerate(questions())],
        student=student,
        teacher=teacher,
        anchor=None,
        text=ChatTokenizer.load(folder),
        algorithm=algorithm(spec),
        grade=lambda _problem, text, _truncated: Verdict(score=reward(text), reason="", feedback="", format_ok=True),
        clock=time.process_time,
    )
    seconds, metrics, cursor, last = [], [], 0, time.process_time()
    for number in range(1, case.steps + 1):
        outcome = trainer.step(number, cursor=cursor)
        now = time.process_time()
        seconds.append(now - last)
        metrics.append(outcome.metrics)
        cursor, last = outcome.cursor, now
    rollouts = case.problems * case.rollouts
    return Run(
        seconds=seconds[case.warmup :],
        sampling=[float(row["cost/step_seconds/rollout"] or 0.0) for row in metrics[case.warmup :]],
        tokens=[rollouts * float(row["train/response_tokens"] or 0.0) for row in metrics[case.warmup :]],
        peak_bytes=peak_memory_bytes(torch.device("cpu")),
    )


def cell_spec(case: Case) -> CellSpec:
    """The case as a cell: no mini-batches, one micro-batch."""
    sdpo = {
        "name": "sdpo",
        "teacher": {"schedule": "ema", "rate": EMA_RATE},
        "divergence": {"alpha": ALPHA, "top_k": TOP_K},
        "demonstration": {"rule": "first"},
        "include_feedback": False,
        "reduction": "sequence_mean_of_all",
    }
    config = json.loads((Path(case.folder) / "config.json").read_text(encoding="utf-8"))
    shape = {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["intermediate_size"],
        "max_positions": config["max_position_embeddings"],
    }
    warmup = {"steps": 1, "examples_per_step": 1, "learning_rate": 1e-3, "lr_warmup_steps": 0, "seed": 0}
    return CellSpec.model_validate(
        {
            "dataset": "bench",
            "task": "bench",
            "arm": case.arm,
            "profile": "bench",
            "seed": 0,
            "algorithm": sdpo if case.arm == "sdpo" else {"name": "grpo", "normalise_std": True, "dual_clip": None},
            "base": {
                "name": "bench",
                "datasets": ["bench"],
                "tokenizer": {"kind": "byte"},
                "shape": shape,
                "warmup": {**warmup, "plain_share": 1.0, "demonstration_share": 0.0},
            },
            "optimizer": {"learning_rate": LEARNING_RATE, "weight_decay": 0.0},
            "training": {
                "steps": case.steps,
                "problems_per_step": case.problems,
                "rollouts_per_problem": case.rollouts,
                "temperature": 1.0,
                "max_prompt_tokens": 128,
                "max_response_tokens": case.response_tokens,
                "max_teacher_prompt_tokens": 1024 - case.response_tokens,
                "evaluate_every": 1,
                "checkpoint_every": 1,
                "microbatch_tokens": 10**9,
            },
            "evaluation": {"samples_per_problem": 1, "temperature": 1.0, "dev_problems": 1, "test_problems": 1},
        }
    )


if __name__ == "__main__":
    answer(run_ours)
