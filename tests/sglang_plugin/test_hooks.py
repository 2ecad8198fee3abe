"""The parts of the hooks that need no SGLang."""

import pickle

import pytest
import torch

from sdpo_sglang.hooks import Asked, mask_padding, plain_numbers, valid_vocab
from sdpo_sglang.key import Key


class Processor:
    """What `mask_padding` reads of SGLang's logits processor."""

    vocab_size = 6


def test_mask_padding_takes_the_mass_of_ids_the_tokenizer_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPO_SGLANG_VALID_VOCAB", "4")
    logits = mask_padding(torch.ones(2, 6), Processor())
    assert logits.softmax(dim=1).tolist() == [[0.25] * 4 + [0.0] * 2] * 2


@pytest.mark.parametrize("declared", ["0", "7"])
def test_valid_vocab_must_fit_the_head(monkeypatch: pytest.MonkeyPatch, declared: str) -> None:
    monkeypatch.setenv("SDPO_SGLANG_VALID_VOCAB", declared)
    with pytest.raises(ValueError, match=f"got {declared}, expected 1 to 6"):
        valid_vocab(6)


def test_valid_vocab_is_the_head_where_nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SDPO_SGLANG_VALID_VOCAB", raising=False)
    assert valid_vocab(6) == 6


def test_plain_numbers_keep_questions_from_what_is_sampled() -> None:
    """A question may have more columns than the vocabulary has ids."""
    seen = plain_numbers(lambda _logprobs, numbers: numbers, torch.zeros(1, 2), [Asked(9), 3])
    assert seen == [1, 3]


def test_key_is_sent_but_not_shown() -> None:
    key = pickle.loads(pickle.dumps(Key("secret-1")))  # noqa: S301
    assert f"Bearer {key}" == "Bearer secret-1"
    assert "secret-1" not in repr({"api_key": key})
