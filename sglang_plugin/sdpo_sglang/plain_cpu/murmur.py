"""MurmurHash3 of a seed, a position and a column in plain torch, equal to SGLang's Triton kernel."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """32-bit hashes [row, column] as int64. `seed` [row] is 64 bits wide; `positions` [row], `col_indices` [column]."""
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.long() & _MASK):
        state = _mix(state, block)
    # 16: bytes that were mixed in.
    state = _mix(state[:, None], col_indices.long()[None, :] & _MASK) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return state ^ (state >> 16)


def _rotate(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _mix(state: Tensor, block: Tensor) -> Tensor:
    # Products of 32-bit numbers overflow int64; its low 32 bits are right all the same.
    scrambled = (_rotate((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotate(state ^ scrambled, 13) * 5 + 0xE6546B64) & _MASK
