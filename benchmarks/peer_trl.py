"""A step of SDPO and of GRPO beside TRL's on equal work: CPU time, tokens a CPU second, peak memory.

    make bench-peer                                    the small table of docs/parity.md; minutes on one core
    .venv/bin/python -m benchmarks.peer_trl --help     other sizes

Both sides start from one folder (a random Qwen3 whose tokenizer has a token for every id), see the same prompts, sample
with the same temperature and length, reward the same texts, show the teacher the same words and take float32 steps of
AdamW on one thread. The sides take turns, each run in a process of its own. CPU time is that of the whole process from
the end of one step to that of the next; the first steps do not count.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.peer_case import Case, Run, make_folder

MIB = 2**20
HEADER = """\
| arm | side | CPU s a step | of these sampling | tokens a step | tokens a CPU s | peak MiB |
| --- | --- | --- | --- | --- | --- | --- |
"""
SIDES = {"ours": "benchmarks.peer_ours", "TRL": "benchmarks.peer_theirs"}


def in_own_process(side: str, case: Case) -> Run:
    """The last line of what the side writes."""
    quiet = {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", SIDES[side], json.dumps(asdict(case))]
    done = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} {case.arm}:\n{done.stderr[-3000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def row(side: str, arm: str, runs: Sequence[Run]) -> str:
    """Medians over the steps of all runs; the largest peak."""
    seconds = [value for run in runs for value in run.seconds]
    sampling = statistics.median(value for run in runs for value in run.sampling)
    tokens = [value for run in runs for value in run.tokens]
    peak = max(run.peak_bytes for run in runs) / MIB
    return (
        f"| {arm} | {side} | {statistics.median(seconds):.3f} | {sampling:.3f} | {statistics.fmean(tokens):.0f} "
        f"| {sum(tokens) / sum(seconds):.0f} | {peak:.0f} |"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--problems", type=int, default=4, help="a step")
    parser.add_argument("--rollouts", type=int, default=4, help="a problem")
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), **{name: given[name] for name in ("hidden", "layers", "vocab")})
        sizes = {name: given[name] for name in ("steps", "warmup", "problems", "rollouts", "response_tokens")}
        sys.stdout.write(HEADER)
        for arm in ("grpo", "sdpo"):
            found: dict[str, list[Run]] = {side: [] for side in SIDES}
            for _ in range(given["rounds"]):
                for side, runs in found.items():
                    runs.append(in_own_process(side, Case(arm=arm, folder=folder, **sizes)))
            for side, runs in found.items():
                sys.stdout.write(row(side, arm, runs) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
