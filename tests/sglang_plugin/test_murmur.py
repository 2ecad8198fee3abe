"""The hash behind seeded sampling against MurmurHash3 as its authors wrote it, in Python's integers."""

import random

import torch

from sdpo_sglang.plain_cpu.murmur import murmur_hash32


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of a multiple of 4 bytes."""
    state = 0
    for begin in range(0, len(data), 4):
        block = int.from_bytes(data[begin : begin + 4], "little") * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= block
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor % 2**32
    return state ^ state >> 16


def test_murmur3_of_the_test_is_the_published_one() -> None:
    """Published vector: four zero bytes, seed 0."""
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE


def test_murmur_hash32_equals_murmur3() -> None:
    generator = random.Random(0)
    seeds = [0, 1, 2**63 - 1, *(generator.randrange(2**63) for _ in range(20))]
    positions = [generator.randrange(2**31) for _ in seeds]
    columns = [0, 1, 151935, 2**31 - 1]
    found = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    wanted = [
        [murmur3(b"".join(part.to_bytes(size, "little") for part, size in ((s, 8), (p, 4), (c, 4)))) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert found.tolist() == wanted
