"""Named random streams, derived from a cell's seed without state.

Every draw of a cell comes from `stream(seed, name, *keys)`: the same words give the same generator in any process at
any time. A resumed cell therefore needs no saved generator state: the step number is the state.
"""

import hashlib

import numpy as np

DATA_ORDER = "data_order"
SAMPLING = "sampling"
EVALUATION = "evaluation"
DEMONSTRATION = "demonstration"
INITIALISATION = "initialisation"
WARMUP = "warmup"
SELF_DISTANCE = "self_distance"


def stream_key(seed: int, name: str, *keys: int | str) -> int:
    """A 128-bit key: SHA-256 of the words, so that neighbouring seeds share nothing."""
    words = "\x1f".join([str(seed), name, *(str(key) for key in keys)])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:16], "big")


def stream(seed: int, name: str, *keys: int | str) -> np.random.Generator:
    """The generator of stream `name` at `keys` (step, problem, rollout, ...)."""
    return np.random.Generator(np.random.Philox(key=stream_key(seed, name, *keys)))
