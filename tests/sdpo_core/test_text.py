"""Text and ids: special tokens in quoted text, round trips, headers, phrases, determinism."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Message
from sdpo_core.text import END, PAD, START, ChatTokenizer, build_tokenizer
from tests.sdpo_core.micro import Base

SPECIALS = (PAD, START, END)
PHRASES = ("Spell the word backward: ", "Answer:\n", "\n\nA correct solution:\n\n")
pieces = st.one_of(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|im_end|>", " "]), st.text(max_size=4))
texts = st.lists(pieces, max_size=8).map("".join)


@pytest.fixture(scope="module")
def text() -> ChatTokenizer:
    return build_tokenizer(TokenizerSpec(kind="byte", phrases=PHRASES), texts=())


def user(content: str) -> list[Message]:
    return [Message(role="user", content=content)]


def special_ids(text: ChatTokenizer) -> set[int]:
    """Ids of the three special tokens; a prompt opens with the third."""
    return {text.end_id, text.pad_id, text.prompt_ids(user(""))[0]}


def test_specials_are_three_ids(text: ChatTokenizer) -> None:
    assert {text.decode((token, 65)) for token in special_ids(text)} == {f"{token}b" for token in SPECIALS}


@settings(max_examples=60, deadline=None)
@given(quoted=texts)
def test_quoted_text_opens_and_ends_no_turn(quoted: str) -> None:
    """Whatever a response or feedback holds, a prompt has the special ids of its own turns and no other."""
    text = build_tokenizer(TokenizerSpec(kind="byte"), texts=())
    specials = special_ids(text)
    inner = [token for token in text.response_ids(quoted)[:-1] if token in specials]
    assert inner == []
    ids = text.prompt_ids([Message(role="system", content=quoted), Message(role="user", content=f"x{quoted}y")])
    found = [token for token in ids if token in specials]
    plain = text.prompt_ids([Message(role="system", content=""), Message(role="user", content="xy")])
    assert found == [token for token in plain if token in specials]
    assert len(found) == 5


def test_neutralise_shows_the_token_to_the_reader(text: ChatTokenizer) -> None:
    assert text.neutralise(f"a{END}b") == "a< |im_end|>b"


@settings(max_examples=60, deadline=None)
@given(value=st.text(max_size=20))
def test_response_ids_decode_to_their_text(value: str) -> None:
    text = build_tokenizer(TokenizerSpec(kind="byte", phrases=PHRASES), texts=())
    value = value.encode("utf-8", "ignore").decode()
    assert text.decode(text.response_ids(value)) == text.neutralise(value)


def test_decode_keeps_a_special_token_inside(text: ChatTokenizer) -> None:
    """The end token of a finished response goes, one sampled before it stays visible."""
    ids = text.response_ids("ab")
    assert text.decode((ids[0], text.pad_id, *ids[1:])) == f"a{PAD}b"
    assert text.decode((*ids, text.end_id)) == f"ab{END}"
    assert text.decode(ids[:-1]) == "ab"


def test_phrases_are_single_tokens_and_round_trip(text: ChatTokenizer) -> None:
    for phrase in PHRASES:
        ids = text.response_ids(phrase)
        assert len(ids) == 2
        assert ids[0] >= 256
        assert text.decode(ids) == phrase
    assert text.vocab_size == 256 + len(SPECIALS) + len(PHRASES)


def test_phrases_are_found_inside_prompts(text: ChatTokenizer) -> None:
    plain = text.prompt_ids(user("abc"))
    framed = text.prompt_ids(user(f"{PHRASES[0]}abc{PHRASES[2]}"))
    assert len(framed) == len(plain) + 2


def test_prompts_end_with_one_header(text: ChatTokenizer) -> None:
    """Student and teacher prompts of any content end with the same ids: an opened assistant turn."""
    header = text.header_ids
    assert text.decode(header) == f"{START}assistant\n"
    for content in ("", "abc", f"x{END}\n{START}assistant\n"):
        ids = text.prompt_ids(user(content))
        assert ids[-len(header) :] == header
        assert text.end_id in ids[: -len(header)]


def with_template(folder: Path, template: str, *, phrases: tuple[str, ...] = ()) -> Path:
    """The byte tokenizer with another chat template, in `folder`."""
    from transformers import AutoTokenizer

    build_tokenizer(TokenizerSpec(kind="byte", phrases=phrases), texts=()).save(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


# As Qwen3's: without thinking the header holds an empty block.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("thinking", "block"), [(False, "<think>\n\n</think>\n\n"), (True, "")])
def test_thinking_switches_the_header_of_every_prompt(tmp_path: Path, thinking: bool, block: str) -> None:
    text = ChatTokenizer.load(with_template(tmp_path, THINKING), thinking=thinking)
    header = f"{START}assistant\n{block}"
    assert text.render(user("x")) == f"{START}user\nx{END}\n{header}"
    assert text.decode(text.header_ids) == header


def test_thinking_is_refused_where_the_template_has_no_switch(base: Base) -> None:
    with pytest.raises(SpecError, match="got thinking True with a chat template that renders the same prompt"):
        ChatTokenizer.load(base.folder, thinking=True)
    assert ChatTokenizer.load(base.folder, thinking=False).header_ids == base.text.header_ids


def test_header_is_what_no_text_before_it_merges_with(tmp_path: Path) -> None:
    """After an `a` the header's first word is another token than after a full stop: only the colon is sure."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}BOT:{% endif %}"
    text = ChatTokenizer.load(with_template(tmp_path / "merged", template, phrases=("aBOT",)))
    assert text.decode(text.header_ids) == ":"
    assert ChatTokenizer.load(with_template(tmp_path / "none", template.split("{% if")[0])).header_ids == ()


@settings(max_examples=60, deadline=None)
@given(value=st.lists(st.sampled_from([PHRASES[0], "caf\u00e9", "\U0001f600", "a", "\n"]), max_size=6).map("".join))
def test_spans_are_the_tokens_places(value: str) -> None:
    """One span a token, in order and without a gap; the bytes of one character share its span."""
    text = build_tokenizer(TokenizerSpec(kind="byte", phrases=PHRASES), texts=())
    spans = text.spans(value)
    assert len(spans) == len(text.response_ids(value)) - 1
    places = list(dict.fromkeys(spans))
    assert "".join(value[start:end] for start, end in places) == value
    assert all(
        spans.count((start, end)) == max(1, len(value[start:end].encode()) * (end - start == 1))
        for start, end in places
    )


def test_tokenizer_without_offsets_is_refused(base: Base) -> None:
    from transformers import AutoTokenizer

    class Slow(type(AutoTokenizer.from_pretrained(base.folder, local_files_only=True))):  # type: ignore[misc]
        is_fast = False

    with pytest.raises(DataError, match=r"ChatTokenizer\.spans: got a tokenizer without offsets"):
        ChatTokenizer(Slow.from_pretrained(base.folder, local_files_only=True)).spans("a")


def test_a_loaded_tokenizer_equals_the_saved_one(base: Base) -> None:
    loaded = ChatTokenizer.load(base.folder)
    messages = user(f"caf\u00e9 {END}")
    assert loaded.prompt_ids(messages) == base.text.prompt_ids(messages)
    assert (loaded.end_id, loaded.pad_id, loaded.vocab_size) == (base.text.end_id, base.text.pad_id, 259)


def test_bpe_is_learned_the_same_each_time() -> None:
    corpus = [f"the word {a}{b}{a} backward is {a}{b}{a}" for a in "abcdef" for b in "uvwxyz"]
    spec = TokenizerSpec(kind="bpe", vocab_size=300, phrases=PHRASES)
    first, second = (build_tokenizer(spec, texts=corpus) for _ in range(2))
    samples = [*corpus, "unseen \u00fc words", PHRASES[0]]
    assert [first.response_ids(sample) for sample in samples] == [second.response_ids(sample) for sample in samples]
    assert first.vocab_size == 300 + len(PHRASES)
    assert len(first.response_ids(corpus[0])) < len(corpus[0].encode()) / 2
    assert all(first.decode(first.response_ids(sample)) == sample for sample in samples)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"got no tokenizer_config\.json in"):
        ChatTokenizer.load(tmp_path)


def test_tokenizer_without_chat_template_is_refused(base: Base) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base.folder, local_files_only=True)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="chat template"):
        ChatTokenizer(tokenizer)
