"""Streams are stable for ever, and share nothing with their neighbours."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdpo_core.random_streams import DATA_ORDER, DEMONSTRATION, EVALUATION, SAMPLING, stream, stream_key


def test_stream_key_is_the_hash_of_its_words() -> None:
    words = b"42\x1fsampling\x1f3\x1f1"
    assert stream_key(42, "sampling", 3, 1) == int(hashlib.sha256(words).hexdigest()[:32], 16)


def test_stream_values_are_pinned() -> None:
    """A change here changes every result ever recorded: raise NUMERICS_VERSION with it."""
    assert stream(42, SAMPLING, 3, 1).integers(0, 1000, 5).tolist() == [494, 508, 529, 922, 455]
    assert stream(1234, DATA_ORDER).permutation(6).tolist() == [4, 2, 1, 5, 0, 3]


def test_stream_has_no_state() -> None:
    first = stream(42, SAMPLING, 7).random(4)
    stream(42, SAMPLING, 8).random(100)
    assert stream(42, SAMPLING, 7).random(4).tolist() == first.tolist()


@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(0, 10**6))
def test_stream_key_separates_neighbours(seed: int, step: int, place: int) -> None:
    keys = {
        stream_key(seed, SAMPLING, step, place),
        stream_key(seed + 1, SAMPLING, step, place),
        stream_key(seed, SAMPLING, step + 1, place),
        stream_key(seed, SAMPLING, step, place + 1),
        stream_key(seed, SAMPLING, step),
        stream_key(seed, EVALUATION, step, place),
        stream_key(seed, DEMONSTRATION, step, place),
    }
    assert len(keys) == 7


def test_stream_key_keeps_words_apart() -> None:
    """Joined without a separator, these three would be one stream."""
    assert len({stream_key(1, "a", 12, 3), stream_key(1, "a", 1, 23), stream_key(11, "a", 2, 3)}) == 3


@pytest.mark.parametrize("other", [stream_key(43, SAMPLING, 0), stream_key(42, SAMPLING, 1)])
def test_neighbouring_streams_are_uncorrelated(other: int) -> None:
    left = stream(42, SAMPLING, 0).standard_normal(4000)
    right = np.random.Generator(np.random.Philox(key=other)).standard_normal(4000)
    # The correlation of independent draws has a standard deviation of 4000**-0.5 = 0.016; five of them.
    assert abs(float(np.corrcoef(left, right)[0, 1])) < 0.08
