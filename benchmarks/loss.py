"""Memory and time of the distillation loss from hidden states to gradients: the fused head against dense forms.

    make bench                                     the table of the lab log; an hour on two cores
    .venv/bin/python -m benchmarks.loss --help     a part of it

Every form computes the same loss, with gradients on the hidden states and on the student's head; the teacher's hidden
states and head are constants. Time is of one thread, the forms taking turns in one process, so that load on the machine
meets all alike; ratios are of CPU time, then of wall time in brackets, each the median over the rounds. Memory is the
peak of a process of its own over what it held before the call (VmHWM, reset through /proc/self/clear_refs), so Linux
only; the head's gradient is part of it.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sdpo_core.objectives.divergence import bucket_divergence
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables, TeacherStates

VOCAB = 151_936
ALPHA = 0.5
GIB = 2**30
# Buffers of [tokens, vocab] that the dense forms hold at their peak, for the question whether they fit.
DENSE_BUFFERS = 4


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Numbers of one case. `top_k` 0: the divergence is over the whole vocabulary."""

    top_k: int
    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    own: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, *, tokens: int, hidden: int, top_k: int) -> "Problem":
        """Logits of standard deviation 3, about what a language model's are."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape).normal_(generator=generator)

        return cls(
            top_k=top_k,
            hidden=normal(tokens, hidden).requires_grad_(),
            weight=normal(VOCAB, hidden).mul_(3 * hidden**-0.5).requires_grad_(),
            teacher_hidden=normal(tokens, hidden),
            teacher_weight=normal(VOCAB, hidden).mul_(3 * hidden**-0.5),
            own=torch.randint(VOCAB, (tokens,), generator=generator),
            weights=torch.rand(tokens, generator=generator) / tokens,
        )

    def request(self) -> tuple[Head, TableRequest]:
        head = Head(weight=self.weight, temperature=1.0, vocab=VOCAB)
        teacher = TeacherStates(
            hidden=self.teacher_hidden, head=Head(weight=self.teacher_weight, temperature=1.0, vocab=VOCAB)
        )
        full = None if self.top_k else FullDivergence(alpha=ALPHA)
        return head, TableRequest(own_ids=self.own, top_k=self.top_k, teacher=teacher, full=full)

    def loss(self, small: Tables, rows: slice) -> Tensor:
        divergence = small.divergence
        if small.support_logp is not None and small.teacher_logp is not None:
            divergence = bucket_divergence(small.support_logp, small.teacher_logp, alpha=ALPHA)
        assert divergence is not None
        return (self.weights[rows] * divergence).sum()


def fused(problem: Problem) -> Tensor:
    """Three products with the student's head."""
    head, request = problem.request()
    problem.weight.grad = torch.zeros_like(problem.weight)
    found = loss_and_gradient(problem.hidden, head, request, problem.loss, weight_gradient=problem.weight.grad)
    problem.hidden.grad = found.hidden_gradient
    return found.loss


def fused_tables(problem: Problem) -> Tensor:
    """Four products: autograd decides what comes in."""
    loss = problem.loss(tables(problem.hidden, *problem.request()), slice(None))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def dense(problem: Problem) -> Tensor:
    """Plain torch with care: no log-softmax of the whole vocabulary where its sum is enough."""
    logits = problem.hidden @ problem.weight.T
    if problem.top_k:
        ids = logits.detach().topk(problem.top_k, dim=1).indices
        p_log = _with_tail(_kept(logits, ids))
        with torch.no_grad():
            q_log = _with_tail(_kept(problem.teacher_hidden @ problem.teacher_weight.T, ids))
    else:
        p_log = logits.log_softmax(dim=1)
        with torch.no_grad():
            q_log = (problem.teacher_hidden @ problem.teacher_weight.T).log_softmax(dim=1)
    del logits
    loss = (problem.weights * _mixed_divergence(p_log, q_log)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def plain(problem: Problem) -> Tensor:
    """The shortest form, as published code has it: log-softmax of both, then pick."""
    p_log = (problem.hidden @ problem.weight.T).log_softmax(dim=1)
    with torch.no_grad():
        q_log = (problem.teacher_hidden @ problem.teacher_weight.T).log_softmax(dim=1)
    if problem.top_k:
        ids = p_log.topk(problem.top_k, dim=1).indices
        p_log, q_log = _with_tail(p_log.gather(1, ids)), _with_tail(q_log.gather(1, ids))
    m_log = torch.logsumexp(torch.stack([p_log, q_log]) + torch.tensor(0.5).log(), dim=0)
    kl_p = torch.nn.functional.kl_div(m_log, p_log, reduction="none", log_target=True)
    kl_q = torch.nn.functional.kl_div(m_log, q_log, reduction="none", log_target=True)
    loss = (problem.weights * ((1 - ALPHA) * kl_p + ALPHA * kl_q).sum(dim=1)).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _kept(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(1, ids) - logits.logsumexp(dim=1, keepdim=True)


def _with_tail(kept: Tensor) -> Tensor:
    """The cheapest tail: log(1 - mass), held below mass 1; no pass over the vocabulary."""
    mass = kept.logsumexp(dim=1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([kept, (-torch.expm1(mass)).log()], dim=1)


def _mixed_divergence(p_log: Tensor, q_log: Tensor) -> Tensor:
    p, q = p_log.exp(), q_log.exp()
    m_log = ((1 - ALPHA) * p + ALPHA * q).log()
    return ((1 - ALPHA) * p * (p_log - m_log) + ALPHA * q * (q_log - m_log)).sum(dim=1)


FORMS: dict[str, Callable[[Problem], Tensor]] = {
    "fused": fused,
    "tables": fused_tables,
    "dense": dense,
    "plain": plain,
}


def seconds(form: str, problem: Problem) -> tuple[float, float]:
    """CPU and wall time of one call; the gradients of the call before are dropped first."""
    problem.hidden.grad = problem.weight.grad = None
    start, wall = time.process_time(), time.perf_counter()
    FORMS[form](problem)
    return time.process_time() - start, time.perf_counter() - wall


def times(forms: Sequence[str], problem: Problem, *, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Times of each form, one round of all forms after another, and one before that nobody counts.

    Raises:
        ArithmeticError: the forms do not find the same gradient on the hidden states.
    """
    slopes = []
    for form in forms:
        seconds(form, problem)
        assert problem.hidden.grad is not None
        slopes.append(problem.hidden.grad)
    for form, slope in zip(forms, slopes, strict=True):
        error = float((slope - slopes[0]).norm() / slopes[0].norm())
        # Plain float32: the cheap tail costs the dense forms 1e-5, plain sums over the whole vocabulary 1.5e-4.
        if not error < 1e-3:
            raise ArithmeticError(f"loss: got a gradient of {form} that is {error:.1e} from that of {forms[0]}.")
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for _ in range(rounds):
        for form in forms:
            found[form].append(seconds(form, problem))
    return found


def peak_bytes(form: str, problem: Problem) -> int:
    """Peak of resident memory during one call over what was resident before it."""
    small = Problem.draw(tokens=2, hidden=8, top_k=problem.top_k)
    # Libraries load on first use; their pages are no part of the loss.
    FORMS[form](small)
    del small
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = _status("VmRSS")
    FORMS[form](problem)
    return _status("VmHWM") - start


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def measured_peak(form: str, *, tokens: int, hidden: int, top_k: int) -> int | None:
    """`peak_bytes` in a process of its own; None where a dense form would not fit."""
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable")
    )
    needed = 3 * VOCAB * hidden * 4 + (DENSE_BUFFERS + 3 * (not top_k)) * tokens * VOCAB * 4
    if form in ("dense", "plain") and needed > 0.9 * available:
        return None
    case = json.dumps({"form": form, "tokens": tokens, "hidden": hidden, "top_k": top_k})
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", "--peak", case], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--hidden", nargs="+", type=int, default=[1024, 2560])
    parser.add_argument("--top-k", nargs="+", type=int, default=[20, 100, 0], help="0: the whole vocabulary")
    parser.add_argument("--tokens", nargs="*", type=int, default=[256, 1024])
    parser.add_argument("--memory-tokens", nargs="*", type=int, default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        case = json.loads(arguments.peak)
        form = case.pop("form")
        sys.stdout.write(f"{peak_bytes(form, Problem.draw(**case))}\n")
        return
    for hidden in arguments.hidden:
        for top_k in arguments.top_k:
            for tokens in arguments.memory_tokens:
                _print_memory(arguments.forms, tokens=tokens, hidden=hidden, top_k=top_k)
            for tokens in arguments.tokens:
                _print_times(arguments.forms, tokens=tokens, hidden=hidden, top_k=top_k, rounds=arguments.rounds)


def _print_memory(forms: Sequence[str], *, tokens: int, hidden: int, top_k: int) -> None:
    cells = []
    for form in forms:
        peak = measured_peak(form, tokens=tokens, hidden=hidden, top_k=top_k)
        cells.append(f"{form} n/a" if peak is None else f"{form} {peak / (VOCAB * hidden * 4):.3f}")
    _print(f"memory / head gradient  H {hidden} K {top_k or 'all'} tokens {tokens}: {'  '.join(cells)}")


def _print_times(forms: Sequence[str], *, tokens: int, hidden: int, top_k: int, rounds: int) -> None:
    problem = Problem.draw(tokens=tokens, hidden=hidden, top_k=top_k)
    found = times(forms, problem, rounds=rounds)
    cells = []
    for form, values in found.items():
        cell = f"{form} {statistics.median(cpu for cpu, _ in values):.2f} s"
        for base in ("dense", "plain"):
            if base in found and form in ("fused", "tables"):
                pairs = [zip(*pair, strict=True) for pair in zip(values, found[base], strict=True)]
                cpu, wall = (statistics.median(a / b for a, b in column) for column in zip(*pairs, strict=True))
                cell += f", {cpu:.2f} [{wall:.2f}] x {base}"
        cells.append(cell)
    _print(f"CPU time                H {hidden} K {top_k or 'all'} tokens {tokens}: {'  '.join(cells)}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
