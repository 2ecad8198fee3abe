"""Text and ids: the tokenizer of a model folder, its chat template, and the neutralising of quoted text.

Ids travel between the parts, never text: text is rendered once into a prompt, and a response is decoded only to be
graded and quoted.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sdpo_core.base_specs import TokenizerSpec
from sdpo_core.errors import DataError, SpecError
from sdpo_core.records import Message

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Two prompts that end differently: what the header merges with what stands before it is no part of it.
_PROBES = ((Message(role="user", content="a"),), (Message(role="user", content="1."),))


class ChatTokenizer:
    """A tokenizer with a chat template and an end-of-turn token.

    `thinking` is the template's switch `enable_thinking`, the same for every prompt: student and teacher share one
    object. `header_ids`: what opens the assistant's turn at the end of every prompt; empty where a template has no
    such header.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False) -> None:
        if tokenizer.chat_template is None or tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
            raise DataError(
                "ChatTokenizer: got a tokenizer without a chat template, an end token or a padding token, expected all "
                "three. Use an instruct model's folder."
            )
        self._tokenizer = tokenizer
        self.end_id = int(tokenizer.eos_token_id)
        self.pad_id = int(tokenizer.pad_token_id)
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True))
        self._thinking = thinking
        if thinking and self._applied(_PROBES[0], thinking=True) == self._applied(_PROBES[0], thinking=False):
            raise SpecError(
                "ChatTokenizer: got thinking True with a chat template that renders the same prompt for "
                "enable_thinking True and False, expected one with that switch. Set thinking to False in the profile."
            )
        self.header_ids = self._header_ids()

    @classmethod
    def load(cls, folder: Path, *, thinking: bool = False) -> "ChatTokenizer":
        """The tokenizer of a Hugging Face folder; no code of the folder is run."""
        if not (folder / "tokenizer_config.json").is_file():
            raise DataError(
                f"ChatTokenizer.load: got no tokenizer_config.json in {folder}, expected a Hugging Face folder. "
                "Make the base weights again."
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return cls(tokenizer, thinking=thinking)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def neutralise(self, text: str) -> str:
        """`text` with every special token broken by a space, so that quoting it cannot open or end a turn."""
        while any(token in text for token in self._special):
            for token in self._special:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt as text, contents neutralised, ending with the header of the assistant's turn."""
        return self._applied(messages, thinking=self._thinking)

    def rendered_ids(self, rendered: str) -> tuple[int, ...]:
        """Ids of what `render` returned."""
        return self._ids(rendered)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self.rendered_ids(self.render(messages))

    def response_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a supervised response: neutralised text and the end token."""
        return (*self._ids(self.neutralise(text)), self.end_id)

    def decode(self, response_ids: Sequence[int]) -> str:
        """Text of a response without its end token; other special tokens stay visible."""
        ids = list(response_ids)
        if ids and ids[-1] == self.end_id:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Where each token of `text` stands in it: start and end, in characters."""
        if not self._tokenizer.is_fast:
            raise DataError(
                "ChatTokenizer.spans: got a tokenizer without offsets, expected a fast one. Save the folder with its "
                "tokenizer.json."
            )
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple((int(start), int(end)) for start, end in found["offset_mapping"])

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _applied(self, messages: Sequence[Message], *, thinking: bool, has_header: bool = True) -> str:
        turns = [{"role": turn.role, "content": self.neutralise(turn.content)} for turn in messages]
        return str(
            self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=has_header, enable_thinking=thinking
            )
        )

    def _header_ids(self) -> tuple[int, ...]:
        """The ids that opening the assistant's turn adds, whatever stands before them."""
        additions = []
        for messages in _PROBES:
            closed, opened = (
                self._ids(self._applied(messages, thinking=self._thinking, has_header=has_header))
                for has_header in (False, True)
            )
            additions.append(opened[_agreement(closed, opened) :])
        size = _agreement(*(ids[::-1] for ids in additions))
        return additions[0][len(additions[0]) - size :]


def _agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """Ids that the two have in common from the start on."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def build_tokenizer(spec: TokenizerSpec, *, texts: Iterable[str]) -> ChatTokenizer:
    """Make the tokenizer of `spec`; `texts` (rendered prompts and responses) are read by kind "bpe" only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if spec.kind == "byte":
        tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    else:
        tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, START, END]
    if spec.vocab_size is not None:
        trainer = trainers.BpeTrainer(
            vocab_size=spec.vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    else:
        tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in spec.phrases])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)  # type: ignore[no-untyped-call]
    fast.add_special_tokens({"additional_special_tokens": [START]})
    fast.chat_template = _CHAT_TEMPLATE
    return ChatTokenizer(fast)
