from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from medusa_train.data.conversation import Conversation, Message

SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|assistant|>",
]
MARKED = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Merges that join a header's last character with the words after it, and the bytes of one
# character.
MERGES = [("Ġ", "B"), ("Ċ", "Ċ"), ("h", "e"), ("he", "l"), ("Ġ", "ĠB"), (">", "B"), ("Ã", "©")]


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A byte-level tokenizer of one token per byte, some merges and some special tokens."""

    def make(
        template: str | None = MARKED, special: list[str] | None = None, trim: bool = False
    ) -> Any:
        special = SPECIAL if special is None else special
        vocabulary = {
            piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
        }
        for left, right in MERGES:
            vocabulary[left + right] = len(vocabulary)
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        if trim:  # offsets leave white space out, as in many published tokenizers
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, **{n: t for n, t in tokens.items() if t in special}
        )
        fast.chat_template = template
        return fast

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat() -> Callable[..., Conversation]:
    """Build a chat from its contents in turn; a first one that starts with "S:" is the system's."""

    def build(*contents: str, name: str = "c", source: str = "chats.jsonl:1") -> Conversation:
        messages = []
        if contents and contents[0].startswith("S:"):
            messages.append(Message("system", contents[0]))
            contents = contents[1:]
        for index, content in enumerate(contents):
            messages.append(Message("assistant" if index % 2 else "user", content))
        return Conversation(name, tuple(messages), source)

    return build
