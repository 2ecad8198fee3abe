"""A causal model on the processes of megatron-core, seen as rows of hidden states.

Rows run whole, prompt and response, right-padded or packed: megatron-core's rotary positions count from the start of a
sequence. Context parallel processes each hold the positions of `objectives.context_parallel.Zigzag`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from jaxtyping import Int, Num
from megatron.core import tensor_parallel
from torch import Tensor
from transformers import AutoConfig

from sdpo_core.backends.amounts import put_together
from sdpo_core.backends.base import Projection, TokenRow, WorkerFacts
from sdpo_core.backends.hf_model import weights_sha256
from sdpo_core.backends.megatron.build import build_model
from sdpo_core.backends.megatron.names import to_hf, to_shard
from sdpo_core.backends.megatron.shape import model_shape
from sdpo_core.backends.memory import memory_kind
from sdpo_core.backends.row_model import HeldStates
from sdpo_core.backends.weight_files import read_weights, save_share
from sdpo_core.errors import DataError
from sdpo_core.layout import LayoutSpec
from sdpo_core.objectives.context_parallel import Zigzag, exchange_rows, owned_rows
from sdpo_core.objectives.head import Head


class MegatronModel:
    """This process's share of the model in a Hugging Face folder; every process of the layout has one.

    A model in bfloat16 that follows another by an EMA keeps its share in float32, too: a commit may move a weight by
    less than bfloat16 holds.
    """

    soft_cap: float | None = None

    def __init__(
        self,
        folder: Path,
        *,
        layout: LayoutSpec,
        dtype: torch.dtype,
        device: torch.device,
        valid_vocab: int,
        has_value_head: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.shape = model_shape(config)
        if valid_vocab > self.shape.vocab:
            raise DataError(
                f"MegatronModel: got a tokenizer of {valid_vocab} ids and a head of {self.shape.vocab} rows in "
                f"{folder}, expected a row for each id. Tokenizer and weights are not of one model."
            )
        self.module = build_model(self.shape, layout, dtype=dtype, device=device, value_head=has_value_head)
        self.layout = layout
        self.groups = self.module.groups
        self.device = device
        self.weights_version = 0
        self.value_head: torch.nn.Linear | None = self.module.value_head
        self._valid_vocab = valid_vocab
        self._master: dict[str, Tensor] = {}
        self._master_version = 0
        self._copy(self._share_of(read_weights(folder)))

    @property
    def counts_whole_rows(self) -> bool:
        return bool(self.groups.context.rank() == 0)

    def projection_head(self, *, temperature: float) -> Head:
        return Head(
            weight=self.module.head_weight(),
            temperature=temperature,
            vocab=self._valid_vocab,
            group=self.groups.tensor if self.layout.tensor > 1 else None,
        )

    def whole_projection(self) -> Projection:
        parts = self._over_tensor(self.module.head_weight().detach())
        return Projection(
            weight=torch.cat(parts)[: self.shape.vocab].clone(),
            bias=None,
            logit_scale=1.0,
            soft_cap=None,
            vocab=self._valid_vocab,
            version=self.weights_version,
        )

    def head_of(self, projection: Projection, *, temperature: float) -> Head:
        own = self.projection_head(temperature=temperature)
        rows = slice(own.first, own.first + len(own.weight))
        return replace(
            own,
            weight=_padded_rows(projection.weight[rows], len(own.weight)).to(self.device),
            bias=None
            if projection.bias is None
            else _padded_rows(projection.bias[rows], len(own.weight)).to(self.device),
            vocab=projection.vocab,
            logit_scale=projection.logit_scale,
            soft_cap=projection.soft_cap,
        )

    def plan(self, rows: Sequence[TokenRow], *, max_tokens: int) -> list[list[int]]:
        """Micro-batches in order of length, dealt round to the data parallel processes, as many for each."""
        order = sorted(range(len(rows)), key=lambda index: (_length(rows[index]), index))
        batches: list[list[int]] = []
        for index in order:
            widest = self._padded(_length(rows[index]))
            tokens = (len(batches[-1]) + 1) * widest if batches else 0
            if not batches or tokens > max_tokens:
                batches.append([])
            batches[-1].append(index)
        batches += [[]] * (-len(batches) % self.layout.data)
        return batches[self.groups.data.rank() :: self.layout.data]

    def held_states(self, rows: Sequence[TokenRow], *, replicated: bool = False) -> HeldStates:
        lengths = [self._padded(_length(row)) for row in rows] or [self.layout.position_multiple]
        if max(lengths) > self._padded(self.shape.max_positions):
            raise DataError(
                f"MegatronModel: got a sequence of {max(lengths)} tokens, expected at most "
                f"{self.shape.max_positions}. Shorten the prompts or the responses in the profile."
            )
        states = self._packed_states(rows, lengths) if self.layout.packed else self._padded_states(rows, max(lengths))
        places, columns, tokens = self._places(rows, lengths)
        hidden, same = self._head_inputs(states, replicated=replicated)
        return HeldStates(
            hidden=hidden[places, columns], tokens=tokens, replicated=None if same is None else same[places, columns]
        )

    def _padded_states(self, rows: Sequence[TokenRow], width: int) -> Tensor:
        ids = torch.zeros(max(1, len(rows)), width, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : _length(row)] = torch.tensor(row.prompt_ids + row.response_ids)
        held = Zigzag(padded_length=width, size=self.layout.context).positions(self.groups.context.rank())
        states: Tensor = self.module(ids[:, held].to(self.device))
        return states

    def _packed_states(self, rows: Sequence[TokenRow], lengths: Sequence[int]) -> Tensor:
        ids = torch.zeros(1, sum(lengths), dtype=torch.long)
        for row, start in zip(rows, _starts(lengths), strict=False):
            ids[0, start : start + _length(row)] = torch.tensor(row.prompt_ids + row.response_ids)
        held = [
            start + Zigzag(padded_length=length, size=self.layout.context).positions(self.groups.context.rank())
            for length, start in zip(lengths, _starts(lengths), strict=True)
        ]
        states: Tensor = self.module(ids[:, torch.cat(held)].to(self.device), lengths)
        return states

    def _places(self, rows: Sequence[TokenRow], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Position and column of each response token that this process holds, and its number among all of them."""
        none = torch.zeros(0, dtype=torch.long)
        parts, first = [(none, none, none)], 0
        for index, (row, start) in enumerate(zip(rows, _starts(lengths), strict=False)):
            width = lengths[index] if self.layout.packed else max(lengths)
            owned = owned_rows(
                Zigzag(padded_length=width, size=self.layout.context),
                prompt_length=len(row.prompt_ids),
                response_length=len(row.response_ids),
                rank=self.groups.context.rank(),
            )
            place, column = (start // self.layout.context, 0) if self.layout.packed else (0, index)
            parts.append((owned.places + place, torch.full_like(owned.places, column), owned.rows + first))
            first += len(row.response_ids)
        places, columns, tokens = (torch.cat(part).to(self.device) for part in zip(*parts, strict=True))
        return places, columns, tokens

    def _head_inputs(self, states: Tensor, *, replicated: bool) -> tuple[Tensor, Tensor | None]:
        """The states of all positions for a head that is cut, and for what every tensor parallel process does alike."""
        if not self.layout.sequence:
            return tensor_parallel.copy_to_tensor_model_parallel_region(states), states if replicated else None
        gather = tensor_parallel.gather_from_sequence_parallel_region
        same = gather(states, tensor_parallel_output_grad=False) if replicated else None
        return gather(states, tensor_parallel_output_grad=True), same

    def _padded(self, length: int) -> int:
        multiple = self.layout.position_multiple
        return -(-length // multiple) * multiple

    def whole_rows(self, columns: Mapping[str, Tensor], *, held: Int[Tensor, " held"], total: int) -> dict[str, Tensor]:
        if self.layout.context == 1:
            return dict(columns)
        whole = {}
        for name, column in columns.items():
            others = _exchange(column, held, total=total, group=self.groups.context)
            whole[name] = others.index_put((held,), column)
        return whole

    def gathered(
        self, columns: Mapping[str, Tensor], *, numbers: Int[Tensor, " held"], total: int
    ) -> dict[str, Tensor]:
        return {
            name: _exchange(column, numbers, total=total, group=self.groups.shared_weights)
            for name, column in columns.items()
        }

    def added(self, amounts: Mapping[str, float]) -> dict[str, float]:
        group = self.groups.shared_weights
        parts: list[Mapping[str, float]] = [{}] * group.size()
        dist.all_gather_object(parts, dict(amounts), group=group)
        total: dict[str, float] = {}
        for part in parts:
            put_together(total, part)
        return total

    def weights(self) -> dict[str, Tensor]:
        shard = {name: self._over_tensor(value.detach()) for name, value in self.module.shard_parameters().items()}
        shares = [{name: parts[rank] for name, parts in shard.items()} for rank in range(self.layout.tensor)]
        return to_hf(shares, self.shape, kernels=self.layout.kernels)

    @torch.no_grad()
    def blend(self, weights: Mapping[str, Tensor], *, rate: float) -> None:
        share = self._share_of(weights)
        if rate == 1.0:
            self._copy(share)
        else:
            parameters = self.module.shard_parameters()
            masters = self._masters() or {name: value.detach().float() for name, value in parameters.items()}
            for name, value in masters.items():
                value.lerp_(share[name].to(value), rate)
                parameters[name].copy_(value)
            self._keep(masters)
        self.weights_version += 1

    def _share_of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return to_shard(
            weights,
            self.shape,
            tensor=self.layout.tensor,
            rank=self.groups.tensor.rank(),
            kernels=self.layout.kernels,
        )

    @torch.no_grad()
    def _copy(self, share: Mapping[str, Tensor]) -> None:
        self._master = {}
        self.module.load_shard(share)

    def _masters(self) -> dict[str, Tensor]:
        """The weights in float32, while the model's are what they were rounded to; else empty."""
        return self._master if self._master_version == self.weights_version else {}

    def _keep(self, masters: Mapping[str, Tensor]) -> None:
        """For the version that the caller is about to make. A float32 model is its own master."""
        is_rounded = self.module.head_weight().dtype != torch.float32
        self._master, self._master_version = dict(masters) if is_rounded else {}, self.weights_version + 1

    def save_weights(self, folder: Path) -> None:
        """One file a tensor parallel process; the others hold copies."""
        if self.groups.shared_weights.rank() == 0:
            share = self._masters() or self.module.shard_parameters()
            save_share(
                folder,
                {name: value.detach().cpu() for name, value in share.items()},
                shape=self.shape,
                kernels=self.layout.kernels,
                rank=self.groups.tensor.rank(),
                tensor=self.layout.tensor,
            )

    def load_weights(self, folder: Path) -> None:
        """Weights that any layout, or another backend, has saved."""
        share = self._share_of(read_weights(folder))
        self._copy(share)
        if any(value.dtype == torch.float32 for value in share.values()):
            self._keep({name: value.float().to(self.device) for name, value in share.items()})
        self.weights_version += 1

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            pid=os.getpid(), weights_sha256=weights_sha256(self.weights()), memory_kind=memory_kind(self.device)
        )

    def _over_tensor(self, value: Tensor) -> list[Tensor]:
        """The parts of all tensor parallel processes, on the CPU."""
        parts = [torch.empty_like(value) for _ in range(self.layout.tensor)]
        dist.all_gather(parts, value.contiguous(), group=self.groups.tensor)
        return [part.cpu() for part in parts]


def _exchange(
    column: Num[Tensor, "held ..."], numbers: Int[Tensor, " held"], *, total: int, group: dist.ProcessGroup
) -> Num[Tensor, "token ..."]:
    flat = column[:, None] if column.dim() == 1 else column
    whole = exchange_rows(flat, numbers, total=total, group=group)
    return whole[:, 0] if column.dim() == 1 else whole


def _padded_rows(rows: Num[Tensor, "row ..."], count: int) -> Num[Tensor, "count ..."]:
    missing = rows.new_zeros(count - len(rows), *rows.shape[1:])
    return torch.cat([rows, missing])


def _length(row: TokenRow) -> int:
    return len(row.prompt_ids) + len(row.response_ids)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]
