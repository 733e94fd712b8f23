"""Chats as tokens: the tokenizer and its chat template, encoded chats with an assistant mask,
padded micro-batches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = (
    "<s>",
    "</s>",
    "<pad>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
SPECIAL = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT)  # token ids 0 to 5
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

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

Turn = tuple[str, str]  # (user message, assistant message)


@dataclass(frozen=True)
class EncodedChat:
    """Token ids of a chat, and whether each token belongs to an assistant message (EOS included)."""

    ids: list[int]
    assistant: list[bool]


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE of `size` entries in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
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
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer and its chat template in Hugging Face form, readable by transformers 4
    and 5.
    """
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
    config.pop("backend", None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize texts without special tokens."""
    return [
        encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]


def encode_chats(tokenizer: Tokenizer, chats: Sequence[Sequence[Turn]]) -> list[EncodedChat]:
    """Tokenize chats as CHAT_TEMPLATE renders them, in one batch."""
    user, assistant = SPECIAL.index(USER), SPECIAL.index(ASSISTANT)
    messages = iter(
        encode_texts(tokenizer, [text for chat in chats for turn in chat for text in turn])
    )
    encoded = []
    for chat in chats:
        ids, mask = [BOS_ID], [False]
        for _ in chat:
            question, answer = next(messages), next(messages)
            ids += [user, *question, EOS_ID, assistant, *answer, EOS_ID]
            mask += [False] * (len(question) + 3) + [True] * (len(answer) + 1)
        encoded.append(EncodedChat(ids, mask))
    return encoded


def micro_batches(
    chats: Sequence[EncodedChat], tokens: int, rng: Random | None
) -> list[list[EncodedChat]]:
    """Group chats of similar length, at most `tokens` padded tokens each; shuffle the groups if
    `rng` is given.
    """
    noise = {id(chat): rng.random() * 0.1 if rng else 0.0 for chat in chats}
    batches: list[list[EncodedChat]] = []
    longest = 0
    for chat in sorted(chats, key=lambda chat: len(chat.ids) * (1 + noise[id(chat)])):
        longest = max(longest, len(chat.ids))
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = len(chat.ids)
        batches[-1].append(chat)
    if rng:
        rng.shuffle(batches)
    return batches


def stream_batches(
    epoch: Callable[[int], Sequence[EncodedChat]], tokens: int, seed: int
) -> Iterator[list[EncodedChat]]:
    """Yield the micro-batches of epoch 0, 1, 2, ... without end."""
    for number in itertools.count():
        yield from micro_batches(epoch(number), tokens, Random(f"batches {seed} {number}"))


def to_tensors(chats: Sequence[EncodedChat], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (ids [B, T], kinds [B, T]) with kind 0 = padding, 1 = bos, user or system, 2 =
    assistant.

    Rows are padded on the right, so a causal model needs no attention mask.
    """
    width = max(len(chat.ids) for chat in chats)
    ids = torch.full((len(chats), width), PAD_ID)
    kinds = torch.zeros((len(chats), width), dtype=torch.int8)
    for row, chat in enumerate(chats):
        ids[row, : len(chat.ids)] = torch.tensor(chat.ids)
        kinds[row, : len(chat.ids)] = 1 + torch.tensor(chat.assistant, dtype=torch.int8)
    return ids.to(device), kinds.to(device)
