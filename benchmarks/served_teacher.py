"""Scores of one long response by a served teacher and by the teacher in the trainer: payload, seconds, difference.

    make bench-teacher                                   the table of the lab log; minutes on two cores
    .venv/bin/python -m benchmarks.served_teacher --help a part of it

Both are alive at once and take turns, so that load on the machine meets both alike; one thread each. The response has R
tokens under a prompt of 64, its student K ids of its own at each of them; V is 32,000. The model is so small that its
head is most of the work. Seconds are wall time of a whole call, the median over the rounds. Payload is what travels:
the request's body, and the answer's.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sdpo_core.algorithm_specs import Support
from sdpo_core.backends.base import TeacherQuestion, TeacherScores, TokenRow, WeightsAt
from sdpo_core.backends.hf_model import HfModel
from sdpo_core.backends.scorer import ModelScorer, Part
from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.sglang.wire import score_body
from sdpo_core.teacher.served import ServedScorer, teacher_server
from sdpo_core.teacher.served_answers import score_request
from sdpo_core.teacher.served_weights import ServedWeights
from sdpo_core.text import build_tokenizer

VOCAB, PROMPT, POSITIONS = 32_000, 64, 8_192
SUPPORT: Support = "student"
TEMPERATURE = 1.0
MB = 1e6


def make_folder(folder: Path) -> None:
    """2 layers x 64 under 32,000 ids: bytes, and words that stand for the rest."""
    bare = build_tokenizer(TokenizerSpec(kind="byte"), texts=()).vocab_size
    words = tuple(f"<w{index}>" for index in range(VOCAB - bare))
    text = build_tokenizer(TokenizerSpec(kind="byte", phrases=words), texts=())
    text.save(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=text.end_id,
        pad_token_id=text.pad_id,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_question(rows: int, k: int) -> TeacherQuestion:
    """Drawn evenly; the ids of a row differ."""
    draw = np.random.default_rng(rows + k)
    first = draw.integers(0, VOCAB, (rows, 1))
    ids = (first + np.cumsum(draw.integers(1, VOCAB // k, (rows, k)), axis=1)) % VOCAB
    tokens = draw.integers(0, VOCAB, PROMPT + rows).tolist()
    row = TokenRow(prompt_ids=tuple(tokens[:PROMPT]), response_ids=tuple(tokens[PROMPT:]))
    return TeacherQuestion(row=row, student_ids=ids)


def payload(scorer: ServedScorer, question: TeacherQuestion, *, k: int) -> tuple[int, int]:
    """Bytes up and down."""
    asked = score_request(question, support=SUPPORT, top_k=k, temperature=TEMPERATURE, vocab=VOCAB)
    body = json.dumps(score_body(asked)).encode()
    headers = {"Authorization": f"Bearer {scorer.server.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{scorer.server.url}/generate", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        return len(body), len(response.read())


def seconds(scorer: ServedScorer | ModelScorer, question: TeacherQuestion, *, k: int) -> tuple[float, TeacherScores]:
    """Of one call, and what it found."""
    start = time.perf_counter()
    (found,) = scorer.score([question], support=SUPPORT, top_k=k)
    if not isinstance(found, TeacherScores):
        sys.exit(f"no scores: {found.reason}")
    return time.perf_counter() - start, found


def difference(one: TeacherScores, other: TeacherScores) -> float:
    """The largest, in nats, of any column."""
    pairs = ((one.table, other.table), (one.logps, other.logps), (one.entropies, other.entropies))
    return max(float(np.abs(a - b).max()) for a, b in pairs if a is not None and b is not None)


def compare(served: ServedScorer, trainer: ModelScorer, *, rows: int, k: int, rounds: int) -> str:
    """A line of the table."""
    question = make_question(rows, k)
    up, down = payload(served, question, k=k)
    gap, times = 0.0, []
    for _ in range(rounds + 1):
        own, wanted = seconds(trainer, question, k=k)
        other, found = seconds(served, question, k=k)
        times.append((own, other))
        gap = max(gap, difference(found, wanted))
    in_trainer, by_server = (statistics.median(side) for side in zip(*times[1:], strict=True))
    share = statistics.median(other / own for own, other in times[1:])
    sizes = f"{up / MB:.2f} | {down / MB:.2f} | {down / rows:.0f}"
    return f"| {rows:,} | {k} | {sizes} | {in_trainer:.2f} | {by_server:.2f} | {share:.2f} | {gap:.1e} |\n"


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.served_teacher")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 8_000])
    parser.add_argument("--k", type=int, nargs="*", default=[20, 100])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder, scratch = Path(place) / "model", Path(place) / "server"
        make_folder(folder)
        weights = ServedWeights(
            WeightsAt(folder=folder),
            dtype=torch.float32,
            temperature=TEMPERATURE,
            tolerance=1e-4,
            follows=False,
            scratch=scratch,
        )
        model = HfModel(folder, dtype=torch.float32, device=torch.device("cpu"), valid_vocab=VOCAB)
        trainer = ModelScorer([Part(model=model, share=1.0)], temperature=TEMPERATURE, max_tokens=16_384)
        server = teacher_server(weights, dtype="float32", tokens=16_384, threads=1, device="cpu", scratch=scratch)
        with closing(ServedScorer(server, weights, temperature=TEMPERATURE)) as served:
            sys.stdout.write("| R | K | up MB | down MB | bytes down a token | s trainer | s served | ratio | gap |\n")
            sys.stdout.write(f"|{' --- |' * 9}\n")
            for rows in options.rows:
                for k in options.k:
                    sys.stdout.write(compare(served, trainer, rows=rows, k=k, rounds=options.rounds))
                    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
