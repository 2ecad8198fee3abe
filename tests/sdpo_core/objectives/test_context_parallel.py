"""Rows of a context-parallel group: brute force over layouts, exchanges and a whole loss in real processes."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from sdpo_core.algorithm_specs import Reduction
from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives.context_parallel import Zigzag, exchange_rows, last_row_owner, owned_rows
from sdpo_core.objectives.divergence import bucket_divergence
from sdpo_core.objectives.reduction import token_weights
from sdpo_core.objectives.support import top_ids
from tests.oracles import context_parallel, distributions
from tests.sdpo_core.objectives.processes import join_group, run_processes

# Ragged: responses of 1 and 2 tokens leave ranks without a row.
STUDENT_PROMPTS, TEACHER_PROMPTS, RESPONSES = [4, 9, 3, 1], [20, 13, 8, 30], [11, 2, 17, 1]
VOCAB, HIDDEN, K = 12, 5, 4


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_owned_rows_partition_every_response_of_up_to_400_positions(size: int) -> None:
    """All lengths, with the shortest and the longest prompt, half, and one token of response, against the oracle."""
    for length in range(1, 401):
        padded = math.ceil(length / (2 * size)) * 2 * size
        layout = Zigzag(padded_length=padded, size=size)
        held = [context_parallel.positions(padded, size=size, rank=rank) for rank in range(size)]
        for prompt in {1, min(2, length), (length + 1) // 2, max(length - 1, 1), length}:
            found = []
            for rank in range(size):
                owned = owned_rows(layout, prompt_length=prompt, response_length=length - prompt, rank=rank)
                rows, places = owned.rows.tolist(), owned.places.tolist()
                # Row t is predicted one position before its token.
                assert [held[rank][place] for place in places] == [row + prompt - 1 for row in rows]
                assert rows == sorted(rows)
                found += rows
            assert sorted(found) == list(range(length - prompt))


@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 60), st.data())
@settings(max_examples=100, deadline=None)
def test_owned_rows_partition_any_response(size: int, chunk: int, data: st.DataObject) -> None:
    layout = Zigzag(padded_length=2 * size * chunk, size=size)
    prompt = data.draw(st.integers(1, layout.padded_length))
    response = data.draw(st.integers(0, layout.padded_length - prompt))
    parts = [owned_rows(layout, prompt_length=prompt, response_length=response, rank=rank).rows for rank in range(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(response))
    if response:
        owner = last_row_owner(layout, prompt_length=prompt, response_length=response)
        assert parts[owner][-1] == response - 1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_zigzag_positions_are_the_oracles(size: int) -> None:
    for padded in range(2 * size, 200, 2 * size):
        layout = Zigzag(padded_length=padded, size=size)
        for rank in range(size):
            held = context_parallel.positions(padded, size=size, rank=rank)
            assert layout.positions(rank).tolist() == held
            assert {layout.owner(position) for position in held} == {rank}


def test_owned_rows_of_a_hand_worked_sequence() -> None:
    """16 positions, 2 ranks, chunks of 4: rank 0 holds 0 1 2 3 12 13 14 15, rank 1 holds 4 to 11.

    Prompt of 3, response of 11: rows at positions 2 to 12. Rank 0: rows 0, 1 (positions 2, 3) and 10 (12), at places 2,
    3 and 4 of what it holds.
    """
    layout = Zigzag(padded_length=16, size=2)
    first, second = (owned_rows(layout, prompt_length=3, response_length=11, rank=rank) for rank in (0, 1))
    assert first.rows.tolist() == [0, 1, 10]
    assert first.places.tolist() == [2, 3, 4]
    assert second.rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert second.places.tolist() == list(range(8))
    assert last_row_owner(layout, prompt_length=3, response_length=11) == 0
    assert last_row_owner(layout, prompt_length=3, response_length=10) == 1


@pytest.mark.parametrize(("size", "longest"), [(2, 13), (4, 57), (8, 241)])
def test_last_row_owner_is_who_holds_it_and_not_always_rank_0(size: int, longest: int) -> None:
    """Padded to the next multiple, rank 0 misses the last row of some sequences of up to 13, 57 and 241 tokens."""
    missed = []
    for length in range(2, 401):
        layout = Zigzag(padded_length=math.ceil(length / (2 * size)) * 2 * size, size=size)
        owner = last_row_owner(layout, prompt_length=1, response_length=length - 1)
        rows = owned_rows(layout, prompt_length=1, response_length=length - 1, rank=owner).rows
        assert rows[-1] == length - 2
        missed += [length] if owner else []
    assert max(missed) == longest


@pytest.mark.parametrize(("padded", "size"), [(6, 2), (0, 1), (8, 0), (-4, 2)])
def test_zigzag_refuses_a_length_that_cannot_be_cut(padded: int, size: int) -> None:
    with pytest.raises(SpecError, match="Zigzag: got"):
        Zigzag(padded_length=padded, size=size)


def test_zigzag_refuses_what_is_not_there() -> None:
    layout = Zigzag(padded_length=8, size=2)
    for position in (-1, 8):
        with pytest.raises(DataError, match=f"got position {position}"):
            layout.owner(position)
    for rank in (-1, 2):
        with pytest.raises(SpecError, match=f"got rank {rank}"):
            layout.positions(rank)


@pytest.mark.parametrize(("prompt", "response"), [(0, 4), (4, -1), (4, 5)])
def test_owned_rows_refuse_lengths_that_do_not_fit(prompt: int, response: int) -> None:
    layout = Zigzag(padded_length=8, size=2)
    with pytest.raises(DataError, match=f"got a prompt of {prompt} and a response of {response} tokens"):
        owned_rows(layout, prompt_length=prompt, response_length=response, rank=0)


def test_last_row_owner_refuses_an_empty_response() -> None:
    layout = Zigzag(padded_length=8, size=2)
    assert owned_rows(layout, prompt_length=8, response_length=0, rank=0).rows.shape == (0,)
    with pytest.raises(DataError, match="a response of 0 tokens"):
        last_row_owner(layout, prompt_length=8, response_length=0)


def exchange_alone(group: ProcessGroup) -> None:
    """With one process everything is in its place; the calls are checked for dtype and axes."""
    rows = torch.tensor([2, 0, 1])
    table = torch.tensor([[-math.inf, 0.5], [1.0, -2.0], [3.0, 4.0]], requires_grad=True)
    whole = exchange_rows(table, rows, total=3, group=group)
    assert torch.equal(whole, torch.tensor([[1.0, -2.0], [3.0, 4.0], [-math.inf, 0.5]]))
    assert not whole.requires_grad
    assert exchange_rows(table[:0], rows[:0], total=0, group=group).shape == (0, 2)
    for numbers, total in (([2, 0, 0], 3), ([2, 0, 1], 4), ([0, 1, 3], 3), ([-1, 0, 1], 2)):
        with pytest.raises(DataError, match=r"exchange_rows: got rows .* held by no rank or by several"):
            exchange_rows(table, torch.tensor(numbers), total=total, group=group)


def test_exchange_rows_of_one_process_puts_each_in_its_place(tmp_path: Path) -> None:
    join_group(0, exchange_alone, 1, str(tmp_path / "group"))


def exchange_between(group: ProcessGroup) -> None:
    """Ids and tables of rows dealt as by a layout, then rows that are missing or held twice."""
    rank, total = group.rank(), 9
    expected = torch.arange(total * 3).reshape(total, 3) - 4
    rows = owned_rows(
        Zigzag(padded_length=8 * group.size(), size=group.size()), prompt_length=5, response_length=total, rank=rank
    ).rows
    whole = exchange_rows(expected[rows], rows, total=total, group=group)
    assert whole.dtype == torch.int64
    assert torch.equal(whole, expected)
    for dtype in (torch.float32, torch.float64):
        table = expected.to(dtype) / 7
        table[0, 1] = -math.inf
        assert torch.equal(exchange_rows(table[rows], rows, total=total, group=group), table)
    # All ranks learn of a fault that one made, and none waits for another.
    for fault in (rows[1:], torch.arange(total)):
        numbers = fault if rank == group.size() - 1 else rows
        with pytest.raises(DataError, match="exchange_rows: got rows"):
            exchange_rows(expected[numbers], numbers, total=total, group=group)
    lost = torch.cat([rows, torch.tensor([total])]) if rank == 0 else rows
    if rank == 0:
        with pytest.raises(DataError, match=rf"got rows \[{total}\]"):
            exchange_rows(expected[lost.clamp(max=total - 1)], lost, total=total, group=group)
    else:
        exchange_rows(expected[lost], lost, total=total, group=group)


def states() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Hidden states of each student sequence, the head, logits of each teacher sequence; the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = [draw(p + r, HIDDEN) for p, r in zip(STUDENT_PROMPTS, RESPONSES, strict=True)]
    teacher = [2 * draw(p + r, VOCAB) for p, r in zip(TEACHER_PROMPTS, RESPONSES, strict=True)]
    return hidden, draw(VOCAB, HIDDEN), teacher


def padded_layout(rows: Tensor, *, size: int) -> tuple[Tensor, Zigzag]:
    """Rows padded with NaN, which no owned row may be, and their layout."""
    missing = -len(rows) % (2 * size)
    layout = Zigzag(padded_length=len(rows) + missing, size=size)
    return torch.cat([rows, rows.new_full((missing, rows.shape[1]), math.nan)]), layout


def table(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the ids and the tail."""
    outside = logits.scatter(1, ids, -math.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([logits.gather(1, ids), outside], dim=1).log_softmax(dim=1)


def split_loss(group: ProcessGroup, *, reduction: Reduction, alpha: float) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of hidden states and head, from what each rank holds, summed over the ranks."""
    hidden, head, teacher = states()
    leaves = [*hidden, head]
    for leaf in leaves:
        leaf.requires_grad_()
    weights = token_weights(RESPONSES, [True] * 4, reduction=reduction)
    loss = torch.zeros((), dtype=torch.float64)
    for place, (rows, target, length) in enumerate(zip(hidden, teacher, RESPONSES, strict=True)):
        (whole, layout), (other, teacher_layout) = (padded_layout(x, size=group.size()) for x in (rows, target))
        own = owned_rows(layout, prompt_length=STUDENT_PROMPTS[place], response_length=length, rank=group.rank())
        logits = whole[layout.positions(group.rank())][own.places] @ head.T
        ids = exchange_rows(top_ids(logits, k=K), own.rows, total=length, group=group)
        scored = owned_rows(
            teacher_layout, prompt_length=TEACHER_PROMPTS[place], response_length=length, rank=group.rank()
        )
        scores = table(other[teacher_layout.positions(group.rank())][scored.places], ids[scored.rows])
        targets = exchange_rows(scores, scored.rows, total=length, group=group)
        values = bucket_divergence(table(logits, ids[own.rows]), targets[own.rows], alpha=alpha)
        loss = loss + weights[place] * values.sum()
    gradients = list(torch.autograd.grad(loss, leaves))
    total = loss.detach().clone()
    for summand in (total, *gradients):
        dist.all_reduce(summand, group=group)
    return total.item(), gradients


def oracle_loss(*, reduction: str, alpha: float) -> tuple[float, list[list[list[float]]]]:
    """The same in one piece, on Python numbers."""
    hidden, head, teacher = (
        [rows.tolist() for rows in part] if isinstance(part, list) else part.tolist() for part in states()
    )
    loss, head_slope = 0.0, [[0.0] * HIDDEN for _ in range(VOCAB)]
    slopes = [[[0.0] * HIDDEN for _ in rows] for rows in hidden]
    for place, length in enumerate(RESPONSES):
        weight = 1 / sum(RESPONSES) if reduction == "token_mean" else 1 / len(RESPONSES) / length
        for row in range(length):
            at = STUDENT_PROMPTS[place] - 1 + row
            state, target = hidden[place][at], teacher[place][TEACHER_PROMPTS[place] - 1 + row]
            logits = [math.fsum(a * b for a, b in zip(state, weights, strict=True)) for weights in head]
            ids = distributions.ranked_ids(logits, k=K)
            p, q = (distributions.cell_masses(distributions.softmax(z, temperature=1.0), ids) for z in (logits, target))
            loss += weight * distributions.divergence(p, q, alpha=alpha)
            slope = distributions.divergence_gradient(logits, target, ids, alpha=alpha, temperature=1.0)
            for token, part in enumerate(slope):
                for axis in range(HIDDEN):
                    head_slope[token][axis] += weight * part * state[axis]
                    slopes[place][at][axis] += weight * part * head[token][axis]
    return loss, [*slopes, head_slope]


def work_in_parallel(group: ProcessGroup) -> None:
    """Exchanges, then the losses against the oracle."""
    exchange_between(group)
    cases: list[tuple[Reduction, float]] = [("token_mean", 1.0), ("sequence_mean", 0.5), ("token_mean", 0.0)]
    for reduction, alpha in cases:
        loss, gradients = split_loss(group, reduction=reduction, alpha=alpha)
        expected, slopes = oracle_loss(reduction=reduction, alpha=alpha)
        assert abs(loss - expected) <= 1e-12
        for found, slope in zip(gradients, slopes, strict=True):
            assert (found - torch.tensor(slope, dtype=torch.float64)).abs().max() <= 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_a_loss_split_over_processes_is_the_oracles_in_value_and_gradient(size: int, tmp_path: Path) -> None:
    layouts = [
        Zigzag(padded_length=math.ceil((p + r) / (2 * size)) * 2 * size, size=size)
        for p, r in zip(STUDENT_PROMPTS, RESPONSES, strict=True)
    ]
    counts = [
        len(owned_rows(layout, prompt_length=p, response_length=r, rank=rank).rows)
        for layout, p, r in zip(layouts, STUDENT_PROMPTS, RESPONSES, strict=True)
        for rank in range(size)
    ]
    assert 0 in counts, "no rank is without a row, so the case shows less than it says"
    run_processes(work_in_parallel, size=size, folder=tmp_path)
