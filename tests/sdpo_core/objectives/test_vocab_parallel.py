"""Fused head over vocabulary shares: every process finds the oracle's numbers, raises with the others, calls alike."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sdpo_core.errors import DataError, SpecError
from sdpo_core.objectives import chunk_reader, chunks
from sdpo_core.objectives.full_divergence import FullDivergence
from sdpo_core.objectives.fused import loss_and_gradient, score_tables, tables
from sdpo_core.objectives.head import Head
from sdpo_core.objectives.tables import TableRequest, Tables
from sdpo_core.objectives.vocab_parallel import all_sum, copy_to_group
from tests.sdpo_core.objectives.fused_cases import Case, agree, agree_all
from tests.sdpo_core.objectives.processes import run_processes

RAGGED = [[3, 0, 4], [1, -1, -1], [-1, -1, -1], [4, 2, -1], [0, 1, 2], [2, 1, -1], [0, 4, 3]]
# Of 4 processes and 8 rows, the last holds padding only and no process holds 5 ids; of 250 ids and 256 rows, 4 hold 64.
CASES = {
    "own ids": Case(vocab=5, padded=8, has_entropy=True),
    "k beyond a share": Case(vocab=5, padded=8, top_k=4, has_teacher=True, has_entropy=True),
    "all ids": Case(vocab=5, padded=8, top_k=5, has_teacher=True, full=FullDivergence(alpha=0.5)),
    "ragged": Case(vocab=5, padded=8, support=RAGGED, full=FullDivergence(alpha=0.0, entry_clip=0.02)),
    "capped": Case(vocab=5, padded=8, top_k=2, bias=True, cap=1.5, scale=0.7, full=FullDivergence(alpha=1.0)),
    "padded 250": Case(vocab=250, padded=256, top_k=20, tokens=3, has_entropy=True, full=FullDivergence(alpha=0.3)),
    "large logits": Case(vocab=5, padded=8, top_k=2, has_teacher=True, has_entropy=True, spread=300.0),
}
# 1e-12: the sums of the shares are rounded in another order than the oracle's.
FLOAT64 = 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_every_process_finds_the_oracles_numbers(size: int, tmp_path: Path) -> None:
    """Values and all gradients; equal collectives on data of every kind; errors on all processes at once."""
    expected = {}
    for name, case in CASES.items():
        filled = case.filled()
        numbers = (filled.numbers["hidden"], filled.numbers["weight"], filled.numbers["bias"])
        expected[name] = (filled.oracle_tables(*numbers), filled.oracle_loss(*numbers), filled.oracle_gradients())
    path = tmp_path / "expected"
    path.write_bytes(pickle.dumps(expected))
    run_processes(partial(work_in_parallel, path), size=size, folder=tmp_path)


def work_in_parallel(path: Path, group: ProcessGroup) -> None:
    """All checks of one process: a start costs more than they do."""
    chunk_reader.CHUNK_NUMBERS = 2 * chunks.spare_width(8)
    chunk_reader.TILE_COLUMNS, chunk_reader.TILE_ROWS = 1, 3
    for name, (small, loss, slopes) in pickle.loads(path.read_bytes()).items():  # noqa: S301 (the parent's own file)
        check_case(CASES[name].filled(), small, loss, slopes, group=group)
    check_ties(group)
    check_no_token(group)
    check_errors(group)
    check_collectives(group)


def check_case(
    case: Case, small: dict[str, Any], loss: float, slopes: dict[str, np.ndarray[Any, Any]], *, group: ProcessGroup
) -> None:
    def share(gradient: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.split(gradient, group.size())[group.rank()]

    head, hidden = case.head(group=group), case.tensor("hidden").requires_grad_()
    request = case.request(group=group)
    agree_all(score_tables(hidden, head, request), small, relative=FLOAT64)
    found = tables(copy_to_group(hidden, group=group), head, request)
    agree_all(found, small, relative=FLOAT64)
    value = case.loss(found, slice(None))
    value.backward()
    agree(value.detach(), loss, relative=FLOAT64)
    agree(hidden.grad, slopes["hidden"], relative=FLOAT64)
    agree(head.weight.grad, share(slopes["weight"]), relative=FLOAT64)

    weight, bias = torch.zeros_like(head.weight), torch.zeros(len(head.weight), dtype=torch.float64)
    fused = loss_and_gradient(hidden, head, request, case.loss, weight_gradient=weight, bias_gradient=bias)
    agree(fused.loss, loss, relative=FLOAT64)
    agree(all_sum(fused.hidden_gradient, group=group), slopes["hidden"], relative=FLOAT64)
    agree(weight, share(slopes["weight"]), relative=FLOAT64)
    if head.bias is not None:
        agree(head.bias.grad, share(slopes["bias"]), relative=FLOAT64)
        agree(bias, share(slopes["bias"]), relative=FLOAT64)


def check_ties(group: ProcessGroup) -> None:
    """Of equal logits the lowest ids, in order, whichever process holds them; excluded ids before padding."""
    weight = torch.zeros(8, 1, dtype=torch.float64)
    weight[5] = 1.0
    bias = torch.zeros(8, dtype=torch.float64)
    bias[[1, 6]] = -torch.inf
    mine = slice(group.rank() * 8 // group.size(), (group.rank() + 1) * 8 // group.size())
    head = Head(weight=weight[mine], bias=bias[mine], temperature=1.0, vocab=7, group=group)
    hidden, own = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    for k, expected in ((3, [5, 0, 2]), (5, [5, 0, 2, 3, 4]), (7, [5, 0, 2, 3, 4, 1, 6])):
        found = score_tables(hidden, head, TableRequest(own_ids=own, top_k=k))
        assert found.support_ids is not None
        assert found.support_ids.tolist() == [expected]


def check_no_token(group: ProcessGroup) -> None:
    case = Case(tokens=0, vocab=5, padded=8, top_k=3, has_entropy=True, full=FullDivergence(alpha=0.5)).filled()
    hidden, head = case.tensor("hidden").requires_grad_(), case.head(group=group)
    found = tables(copy_to_group(hidden, group=group), head, case.request(group=group))
    assert found.support_logp is not None
    assert found.support_logp.shape == (0, 4)
    case.loss(found, slice(None)).backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()
    fused = loss_and_gradient(
        hidden, head, case.request(group=group), case.loss, weight_gradient=torch.zeros_like(head.weight)
    )
    assert fused.loss.item() == 0.0
    assert fused.hidden_gradient.shape == hidden.shape


def check_errors(group: ProcessGroup) -> None:
    """What only the last process sees wrong, all raise for, and the next collective still meets."""
    case = Case(vocab=8, padded=8, top_k=3, has_teacher=True).filled()
    is_last = group.rank() == group.size() - 1
    hidden, head, request = case.tensor("hidden"), case.head(group=group), case.request(group=group)
    damaged = head.weight.detach().clone()
    damaged[0] = torch.nan if is_last else 1.0
    broken = Head(weight=damaged, temperature=1.0, vocab=8, group=group)
    raises("a NaN logit", lambda: score_tables(hidden, broken, request))
    own = request.own_ids.clone()
    own[-1] = 8 if is_last else 0
    raises("own_ids: got an id outside 0 to 7", lambda: score_tables(hidden, head, TableRequest(own_ids=own)))
    ids = torch.tensor([[0, 0]] if is_last else [[0, 1]]).expand(7, 2)
    twice = TableRequest(own_ids=request.own_ids, support_ids=ids)
    raises("an id twice", lambda: tables(hidden, head, twice))
    with pytest.raises(SpecError, match="in the same process group"):
        score_tables(hidden, head, case.request())
    assert all_sum(torch.ones(1), group=group).item() == group.size()


def raises(words: str, call: Callable[[], Tables]) -> None:
    with pytest.raises(DataError, match=words):
        call()


def check_collectives(group: ProcessGroup) -> None:
    """The same collectives in the same order on every process and for any data; none in the backward pass."""
    calls: list[tuple[str, torch.Size]] = []
    reduce, gather = dist.all_reduce, dist.all_gather_single

    def counted_reduce(values: torch.Tensor, **options: Any) -> Any:
        calls.append((str(options["op"]), values.shape))
        return reduce(values, **options)

    def counted_gather(gathered: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
        calls.append(("gather", values.shape))
        return gather(gathered, values, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted_reduce)
        patch.setattr(dist, "all_gather_single", counted_gather)
        logs = []
        for spread in (1.0, 1e4, 0.0, np.inf):
            case = Case(vocab=5, padded=8, support=RAGGED, spread=spread, full=FullDivergence(alpha=0.5)).filled()
            hidden = case.tensor("hidden").requires_grad_()
            calls.clear()
            found = tables(hidden, case.head(group=group), case.request(group=group))
            forward = len(calls)
            case.loss(found, slice(None)).backward()
            assert len(calls) == forward
            logs.append(list(calls))
        assert logs[0]
        assert all(log == logs[0] for log in logs)
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, logs, group=group)
        assert all(log == logs for log in gathered)
