"""The tiny backbone's tokenizer and chat template, and chats as token ids with an assistant mask.

Knows nothing of where the text comes from, nor of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)  # their ids are 0..5
EOS_ID, PAD_ID = SPECIAL.index(EOS), SPECIAL.index(PAD)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] in ('user', 'system') %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% else %}"
    "{{ raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Encoded:
    """A chat as tokens: `ids`, and `assistant[i]` = whether token i is something the assistant writes."""

    ids: list[int]
    assistant: list[bool]


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of `size` entries; digits stand alone, so that numbers are spelled the same way always."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer and its chat template in Hugging Face's form."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)  # written the way that versions 4 and 5 of transformers both read it
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, no special tokens added."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def encode_chats(tokenizer: Tokenizer, chats: Sequence[Sequence[tuple[str, str]]]) -> list[Encoded]:
    """Chats (lists of (user, assistant) turns) as the chat template renders them; a test holds the two equal."""
    bos, eos, user, assistant = (SPECIAL.index(token) for token in (BOS, EOS, USER, ASSISTANT))
    pieces = iter(encode_texts(tokenizer, [text for chat in chats for turn in chat for text in turn]))
    encoded = []
    for chat in chats:
        ids, mask = [bos], [False]
        for _ in chat:
            asked, answered = next(pieces), next(pieces)
            ids += [user, *asked, eos, assistant, *answered, eos]
            mask += [False] * (len(asked) + 3) + [True] * (len(answered) + 1)
        encoded.append(Encoded(ids, mask))
    return encoded
