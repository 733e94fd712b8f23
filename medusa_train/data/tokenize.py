"""A chat -> token ids, and which of them are to be learnt; knows nothing of files, batches or models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError, Span
from medusa_train.data.conversation import Conversation, Message, Role
from medusa_train.data.templates import TEMPLATES, get_template
from medusa_train.errors import DataError

ASSISTANT: tuple[Role, ...] = ("assistant",)


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A chat as tokens: `ids` [T], and `supervised` [T], true where the token is to be learnt."""

    ids: list[int]
    supervised: list[bool]
    id: str
    source: str = ""

    def trimmed(self) -> EncodedChat:
        """Return it without the tokens after the last supervised one: nothing is learnt from them."""
        end = len(self.supervised)
        while end and not self.supervised[end - 1]:
            end -= 1
        return EncodedChat(self.ids[:end], self.supervised[:end], self.id, self.source)


class ChatEncoder:
    """Turns chats into tokens by a chat template: the tokenizer's own, or one of ours by name.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: a name of `TEMPLATES`, or None for the tokenizer's own template.
        roles: whose words are supervised. The assistant's include the token that ends an answer.
        everything: supervise every token, whoever wrote it.

    Raises:
        ConfigError: no template of that name.
        DataError: the tokenizer has no template, cannot resolve_model its tokens, or lacks the template's end token.
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
            raise DataError("this tokenizer cannot say where its tokens stand; one with a tokenizer.json is needed")
        self.template = _template_for(tokenizer, template)

    def with_settings(
        self, *, template: str | None = None, roles: Collection[Role] = ASSISTANT, train_on_inputs: bool = False
    ) -> ChatEncoder:
        """Return an encoder with the same tokenizer; `template` None keeps this one's."""
        name = template if template is not None else self.template_name
        return ChatEncoder(self.tokenizer, name, roles=roles, train_on_inputs=train_on_inputs)

    @property
    def pad_id(self) -> int:
        """The token that fills up rows; any will do, as padding is neither attended to nor learnt."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0

    def encode(self, conversation: Conversation) -> EncodedChat:
        """Return the whole chat as tokens; special tokens come from the template alone.

        A token is supervised if any of its characters is. That settles tokens that straddle a border: a space
        of the header merged with an answer's first word is learnt with the word.

        Raises:
            DataError: the template cannot take the chat; names its source.
        """
        try:
            text, spans = self._spans(conversation.messages)
        except ChatTemplateError as error:
            raise DataError(f"{conversation.source or conversation.id}: {error}") from None
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        supervised = _within(encoding["offset_mapping"], spans)
        return EncodedChat(list(encoding["input_ids"]), supervised, conversation.id, conversation.source)

    def fingerprint(self) -> str:
        """Return a digest of all that `encode` follows from: tokenizer, template, and whose words are learnt."""
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
        """Return the tokens of a chat that ends with the user's turn, and the header of the answer to come.

        Raises:
            DataError: the template cannot take the chat.
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
            words = zip(messages, self.template.content_spans(messages), strict=True)
            spans = spans + [span for message, span in words if message.role in self.roles - {"assistant"}]
        return text, sorted(spans)


def _template_for(tokenizer: Any, name: str | None) -> ChatTemplate:
    special = dict(tokenizer.special_tokens_map)
    if name is None:
        own = tokenizer.chat_template
        if not own:
            known = ", ".join(TEMPLATES)
            raise DataError(f"the tokenizer has no chat template; set chat_template to one of {known}")
        return ChatTemplate(tokenizer.get_chat_template(), special)
    template = get_template(name)
    end = template.answer_end or tokenizer.eos_token
    if end is None:
        raise DataError(f"chat template '{name}' ends answers with the eos token, and the tokenizer has none")
    # In pieces, the end token would be learnt as plain text, and the backbone was not trained to stop there.
    if len(tokenizer(end, add_special_tokens=False)["input_ids"]) != 1:
        raise DataError(
            f"chat template '{name}' ends answers with {end}, which is no single token of this tokenizer; "
            "choose the template that the backbone was trained with"
        )
    return ChatTemplate(template.source, special)


def _within(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Say for each token's characters [start, end) whether they share any with `spans` (sorted, disjoint).

    Many tokenizers leave spaces out of their offsets: a token of one space has none, and stands behind it.
    """
    inside, current = [], 0
    for start, end in offsets:
        first = start if start < end else end - 1
        while current < len(spans) and spans[current][1] <= first:
            current += 1
        inside.append(current < len(spans) and spans[current][0] < end)
    return inside


Outcome = Literal["whole", "cut", "too_long", "unsupervised"]


@dataclass(frozen=True, slots=True)
class Example:
    """What is kept of a conversation: `tokens` [T] int32 and `supervised` [T] bool; the last is always true.

    `key` is the `content_key` of the turns that are kept, so that two which differ only in what was cut off
    are known to be equal.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    id: str
    source: str

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the tokens before each answer, the earlier turns and the answer's header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


def encode_example(conversation: Conversation, encoder: ChatEncoder, limit: int) -> tuple[Example | None, Outcome]:
    """Encode a conversation in at most `limit` tokens, never cutting inside an answer.

    What follows the last supervised token is left out, as nothing is learnt from it. A conversation that is
    still too long keeps as many whole answers as fit.

    Returns:
        The example and "whole" or "cut"; or None and why: "too_long" (even the first answer ends beyond `limit`)
        or "unsupervised" (it has no answer, or nothing in it is to be learnt).

    Raises:
        DataError: the template cannot take the conversation.
    """
    ends = [i for i, message in enumerate(conversation.messages, start=1) if message.role == "assistant"]
    if not ends:
        return None, "unsupervised"
    encoded = encoder.encode(conversation).trimmed()
    if not encoded.ids:
        return None, "unsupervised"
    if len(encoded.ids) <= limit:
        return _example(encoded, conversation.first(ends[-1])), "whole"
    best, low, high = None, 0, len(ends)
    while low < high:  # how many answers fit: `low` do, `high` and more may not
        middle = (low + high) // 2
        part = conversation.first(ends[middle])
        encoded = encoder.encode(part).trimmed()
        if len(encoded.ids) <= limit:
            best, low = (encoded, part), middle + 1
        else:
            high = middle
    if best is None:
        return None, "too_long"
    return (_example(*best), "cut") if best[0].ids else (None, "unsupervised")


def select_validation(keys: Sequence[str], share: float, seed: int) -> list[bool]:
    """Choose which conversations are held out, by their contents alone.

    Each content gets a number drawn from `seed`; the smallest numbers are held out until `share` of all is
    reached. So the choice is the same in every order of the files, and two equal conversations are never
    parted (one in training would make the other's evaluation worthless).

    Args:
        keys: `Example.key` of each.
        share: 0 (none) to below 1. At least one is held out and at least one is left, if there are two contents.
        seed: of the choice.
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
    if not chosen:  # every content stands there more often than `share` has room for: the rarest one has to do
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
