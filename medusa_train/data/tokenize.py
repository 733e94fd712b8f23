"""Tokenization of chats with loss masks, truncation to whole answers, and the validation split."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medusa_train.data.builtin_templates import TEMPLATES, get_template
from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError, Span
from medusa_train.data.conversation import Conversation, Message, Role
from medusa_train.errors import DataError

ASSISTANT: tuple[Role, ...] = ("assistant",)


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A tokenized chat: token `ids` [T] and the loss mask `supervised` [T]."""

    ids: list[int]
    supervised: list[bool]
    id: str
    source: str = ""

    def trimmed(self) -> EncodedChat:
        """Drop the tokens after the last supervised one, which no loss depends on."""
        end = len(self.supervised)
        while end and not self.supervised[end - 1]:
            end -= 1
        return EncodedChat(self.ids[:end], self.supervised[:end], self.id, self.source)


class ChatEncoder:
    """Tokenizes chats with a chat template, and determines the loss mask.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: a name of `TEMPLATES`, or None for the tokenizer's own template.
        roles: whose words are supervised. The assistant's include the token that ends an answer.
        train_on_inputs: supervise every token, whoever wrote it.

    Raises:
        ConfigError: unknown template.
        DataError: the tokenizer has no chat template, is not a fast one, or lacks the template's end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        roles: Collection[Role] = ASSISTANT,
        train_on_inputs: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_name = template
        self.roles = frozenset(roles)
        self.train_on_inputs = train_on_inputs
        if not getattr(tokenizer, "is_fast", False):
            raise DataError("a fast tokenizer (with tokenizer.json) is required: loss masks need character offsets")
        self.template = _template_for(tokenizer, template)

    def with_settings(
        self, *, template: str | None = None, roles: Collection[Role] = ASSISTANT, train_on_inputs: bool = False
    ) -> ChatEncoder:
        """Return an encoder with the same tokenizer and other settings; `template` None keeps the template."""
        name = template if template is not None else self.template_name
        return ChatEncoder(self.tokenizer, name, roles=roles, train_on_inputs=train_on_inputs)

    @property
    def pad_id(self) -> int:
        """Padding token: pad, else eos, else 0. Padding is masked, so any token works."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def encode(self, conversation: Conversation) -> EncodedChat:
        """Tokenize a chat. Special tokens come from the template only.

        A token is supervised if any of its characters is: a header's space that is merged with the first word of the
        answer is supervised with the word.

        Raises:
            DataError: the template does not support the chat; names its source.
        """
        try:
            text, spans = self._spans(conversation.messages)
        except ChatTemplateError as error:
            raise DataError(f"{conversation.source or conversation.id}: {error}") from None
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        supervised = _overlaps(encoding["offset_mapping"], spans)
        return EncodedChat(list(encoding["input_ids"]), supervised, conversation.id, conversation.source)

    def fingerprint(self) -> str:
        """Return a digest of everything that `encode` depends on: tokenizer, template and supervision."""
        settings = {
            "template": self.template.source,
            "special_tokens": dict(self.template.special_tokens),
            "roles": sorted(self.roles),
            "everything": self.train_on_inputs,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.tokenizer.backend_tokenizer.to_str().encode())
        return digest.hexdigest()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat followed by the generation prompt.

        Raises:
            DataError: the template does not support the chat.
        """
        try:
            text = self.template.render(messages, prompt=True)
        except ChatTemplateError as error:
            raise DataError(str(error)) from None
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        if self.train_on_inputs:
            text = self.template.render(messages)
            return text, [(0, len(text))]
        text, answers = self.template.assistant_spans(messages)
        spans = answers if "assistant" in self.roles else []
        if self.roles - {"assistant"}:
            contents = zip(messages, self.template.content_spans(messages), strict=True)
            spans = spans + [span for message, span in contents if message.role in self.roles - {"assistant"}]
        return text, sorted(spans)


def _template_for(tokenizer: Any, name: str | None) -> ChatTemplate:
    special = dict(tokenizer.special_tokens_map)
    if name is None:
        if not tokenizer.chat_template:
            raise DataError(f"the tokenizer has no chat template; set chat_template to one of {', '.join(TEMPLATES)}")
        return ChatTemplate(tokenizer.get_chat_template(), special)
    template = get_template(name)
    end = template.answer_end or tokenizer.eos_token
    if end is None:
        raise DataError(f"chat template '{name}' ends answers with the EOS token, which the tokenizer does not have")
    # Split into several tokens it would be trained as plain text, at which the backbone does not stop.
    if len(tokenizer(end, add_special_tokens=False)["input_ids"]) != 1:
        raise DataError(
            f"chat template '{name}' ends answers with {end}, which is not a single token of this tokenizer; "
            "use the template that the backbone was trained with"
        )
    return ChatTemplate(template.source, special)


def _overlaps(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token's characters [start, end) whether they overlap any of `spans` (sorted, disjoint).

    Many tokenizers exclude spaces from offsets: a token of one space has the empty span after it.
    """
    inside, current = [], 0
    for start, end in offsets:
        first = start if start < end else end - 1
        while current < len(spans) and spans[current][1] <= first:
            current += 1
        inside.append(current < len(spans) and spans[current][0] < end)
    return inside


Outcome = Literal["complete", "truncated", "too_long", "unsupervised"]


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenized conversation, truncated to the maximum length.

    Attributes:
        tokens: int32 [T].
        supervised: bool [T], the loss mask; the last is always true.
        key: `content_key` of the kept messages, so that conversations which differ only in the truncated part count
            as duplicates.
        id, source: of the record.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    id: str
    source: str

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each answer: all tokens before it, its header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


def encode_example(conversation: Conversation, encoder: ChatEncoder, max_length: int) -> tuple[Example | None, Outcome]:
    """Tokenize a conversation into at most `max_length` tokens, truncating it after a complete answer.

    Tokens after the last supervised one are dropped. A conversation that is still too long keeps as many complete
    answers as fit.

    Returns:
        The example and "complete" or "truncated"; or None and the reason: "too_long" (the first answer ends beyond
        `max_length`) or "unsupervised" (no answer, or no supervised token).

    Raises:
        DataError: the template does not support the conversation.
    """
    ends = [i for i, message in enumerate(conversation.messages, start=1) if message.role == "assistant"]
    if not ends:
        return None, "unsupervised"
    encoded = encoder.encode(conversation).trimmed()
    if not encoded.ids:
        return None, "unsupervised"
    if len(encoded.ids) <= max_length:
        return _example(encoded, conversation.first(ends[-1])), "complete"
    best, low, high = None, 0, len(ends)
    while low < high:  # binary search for the number of answers that fit
        middle = (low + high) // 2
        part = conversation.first(ends[middle])
        encoded = encoder.encode(part).trimmed()
        if len(encoded.ids) <= max_length:
            best, low = (encoded, part), middle + 1
        else:
            high = middle
    if best is None:
        return None, "too_long"
    return (_example(*best), "truncated") if best[0].ids else (None, "unsupervised")


def select_validation(keys: Sequence[str], share: float, seed: int) -> list[bool]:
    """Choose the validation set by content.

    Contents are ranked by a hash with `seed`; the first ones are held out until `share` of all conversations is
    reached. So the split does not depend on the order of files, and duplicates are on the same side of it.

    Args:
        keys: `Example.key` of each conversation.
        share: fraction to hold out, 0 to below 1. If above 0 and there are two contents, at least one is held out and
            at least one is left.
        seed: random seed.

    Returns:
        For each conversation whether it is in the validation set.
    """
    sizes = Counter(keys)
    if share <= 0 or len(sizes) < 2:
        return [False] * len(keys)
    room = min(max(1, round(share * len(keys))), len(keys) - 1)
    chosen: set[str] = set()
    order = sorted(sizes, key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    for key in order:
        if sizes[key] <= room:
            chosen.add(key)
            room -= sizes[key]
    if not chosen:  # every content has more duplicates than `share` allows: hold out the rarest
        chosen.add(min(order, key=lambda key: sizes[key]))
    return [key in chosen for key in keys]


def _example(encoded: EncodedChat, kept: Conversation) -> Example:
    return Example(
        tokens=torch.tensor(encoded.ids, dtype=torch.int32),
        supervised=torch.tensor(encoded.supervised, dtype=torch.bool),
        key=kept.content_key,
        id=encoded.id,
        source=encoded.source,
    )
