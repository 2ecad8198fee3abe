"""A step of SDPO on one process of Hugging Face and on Megatron-core's layouts: seconds, and memory of each process.

    make bench-megatron                            the table of the lab log; three minutes on two cores
    .venv/bin/python -m benchmarks.megatron --help a part of it

All layouts are alive at once and take turns, so that load on the machine meets all alike; one thread a process. A step
is what a cell does on its student: scores with the support, then an update. Ratios are of wall time, the median over
the rounds; memory is a process's largest resident set, and what of it came after its libraries were loaded.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core.algorithm_specs import DivergenceSpec
from sdpo_core.algorithms.objective import DivergenceTerm, TermSum
from sdpo_core.backends.base import RowScores, TokenRow, TrainRow
from sdpo_core.backends.hf import hf_policy
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.megatron.model import MegatronModel
from sdpo_core.backends.megatron.optimizer import MegatronOptimizer
from sdpo_core.backends.memory import peak_memory_bytes
from sdpo_core.backends.policy import ModelPolicy
from sdpo_core.layout import LayoutSpec
from sdpo_core.rendezvous import LOOPBACK_ENVIRONMENT, Meeting, hosted_meeting, join
from sdpo_core.specs import OptimizerSpec

VOCAB, TOP_K, GROUPS, MEMBERS, PROMPT, RESPONSE = 8192, 20, 4, 4, 64, 64
MIB = 2**20
CPU = torch.device("cpu")
LAYOUTS: dict[str, LayoutSpec | None] = {
    "hf": None,
    "tensor 1": LayoutSpec(),
    "tensor 2": LayoutSpec(tensor=2),
    "tensor 2, sequence": LayoutSpec(tensor=2, sequence=True),
    "context 2": LayoutSpec(context=2),
    "data 2": LayoutSpec(data=2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The processes of one layout: `pipes` take "step" and answer with seconds, at last with their memory."""

    name: str
    pipes: list[Connection]

    def step(self) -> float:
        """Seconds until all processes are through."""
        start = time.perf_counter()
        for pipe in self.pipes:
            pipe.send("step")
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - start

    def memory(self) -> list[tuple[int, int]]:
        """Of each process: the largest resident set, and that without libraries, in bytes."""
        for pipe in self.pipes:
            pipe.send("memory")
        return [pipe.recv() for pipe in self.pipes]


@contextmanager
def team(name: str, layout: LayoutSpec | None, *, folder: Path) -> Iterator[Team]:
    """Start a layout's processes, and end them with the block."""
    context = multiprocessing.get_context("spawn")
    size = 1 if layout is None else layout.size
    with hosted_meeting(name, size=size) as meeting:
        pairs = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(target=work, args=(pairs[rank][1], layout, folder, meeting, rank)) for rank in range(size)
        ]
        for process, (_, theirs) in zip(processes, pairs, strict=True):
            process.start()
            # While it is open here, too, a process that has died is waited for.
            theirs.close()
        try:
            for pipe, _ in pairs:
                pipe.recv()
            yield Team(name=name, pipes=[pipe for pipe, _ in pairs])
        finally:
            for pipe, _ in pairs:
                # One that has died takes no order; the others are to end.
                with suppress(OSError):
                    pipe.send("end")
            for process in processes:
                process.join()


def work(pipe: Connection, layout: LayoutSpec | None, folder: Path, meeting: Meeting, rank: int) -> None:
    """The life of one process."""
    torch.set_num_threads(1)
    join(meeting, rank=rank, device="cpu")
    libraries = peak_memory_bytes(CPU)
    policy, rows = make_policy(layout, folder), token_rows()
    pipe.send("ready")
    while (order := pipe.recv()) != "end":
        if order == "step":
            step(policy, rows)
        pipe.send((peak_memory_bytes(CPU), peak_memory_bytes(CPU) - libraries) if order == "memory" else None)
    dist.destroy_process_group()


def make_policy(layout: LayoutSpec | None, folder: Path) -> ModelPolicy:
    """The student of a layout; None: of one process of Hugging Face."""
    optimizer = OptimizerSpec(learning_rate=1e-5)
    if layout is None:
        model = HfModel(folder, dtype=torch.float32, device=CPU, valid_vocab=VOCAB)
        return hf_policy(model, optimizer, temperature=1.0, max_tokens=4096)
    cut = MegatronModel(folder, layout=layout, dtype=torch.float32, device=CPU, valid_vocab=VOCAB)
    return ModelPolicy(cut, MegatronOptimizer(cut, optimizer), temperature=1.0, max_tokens=4096)


def step(policy: ModelPolicy, rows: list[TokenRow]) -> None:
    """Scores, then an update; every process is given all rows."""
    scores = policy.score(rows, top_k=TOP_K)
    trained = [train_row(row, score) for row, score in zip(rows, scores, strict=True)]
    divergence = DivergenceTerm(spec=DivergenceSpec(alpha=0.5, top_k=TOP_K), importance_clip=2.0, rollout_cap=None)
    policy.update(trained, TermSum(terms=(divergence,)), learning_rate=1e-5)


def train_row(row: TokenRow, score: RowScores) -> TrainRow:
    """A row whose teacher finds all cells equally likely."""
    even = np.full((RESPONSE, TOP_K + 1), -np.log(TOP_K + 1), dtype=np.float32)
    return TrainRow(row=row, distill_weight=1e-3, support_ids=score.support_ids, teacher_logps=even)


def token_rows() -> list[TokenRow]:
    """Groups that share a prompt each."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, VOCAB, PROMPT).tolist()) for _ in range(GROUPS)]
    return [
        TokenRow(prompt_ids=prompt, response_ids=tuple(rng.integers(0, VOCAB, RESPONSE).tolist()))
        for prompt in prompts
        for _ in range(MEMBERS)
    ]


def make_folder(folder: Path) -> None:
    """4 layers x 256: about 5 million parameters, 2 of them in the tied head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.megatron")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    options = parser.parse_args(arguments)
    os.environ.update(LOOPBACK_ENVIRONMENT, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        make_folder(Path(place))
        teams = [stack.enter_context(team(name, LAYOUTS[name], folder=Path(place))) for name in options.layouts]
        rounds = [{one.name: one.step() for one in teams} for _ in range(options.rounds + 1)][1:]
        sys.stdout.write("| layout | processes | s a step | x the first | MiB a process | without libraries |\n")
        sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
        for one in teams:
            seconds = statistics.median(times[one.name] for times in rounds)
            share = statistics.median(times[one.name] / times[teams[0].name] for times in rounds)
            largest, own = (max(part) / MIB for part in zip(*one.memory(), strict=True))
            memory = f"{largest:.0f} | {own:.0f}"
            sys.stdout.write(f"| {one.name} | {len(one.pipes)} | {seconds:.2f} | {share:.2f} | {memory} |\n")


if __name__ == "__main__":
    main(sys.argv[1:])
