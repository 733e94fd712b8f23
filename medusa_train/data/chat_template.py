"""Where in a rendered chat each speaker's words stand; knows templates and text, nothing of tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from medusa_train.data.conversation import Message

Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_CHANGED = "the chat template changes the words, so those to learn cannot be found"


class ChatTemplateError(ValueError):
    """The template does not take this chat, or hides where the words stand; the message says which."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens it may use."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template itself says, by `{% generation %}`, what the assistant writes."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the chat as text; with `prompt`, followed by the header of the answer to come.

        Raises:
            ChatTemplateError: the template refuses the chat (for example a system message where it knows none).
        """
        return self._render(messages, prompt=prompt)[0]

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text and the character spans of what the assistant writes: its words and end token.

        Raises:
            ChatTemplateError: the template refuses the chat, or rewrites it so that the answers cannot be found.
        """
        if self.has_generation_marks:
            return self._render(messages, marks=True)
        text = self._render(messages)[0]
        words = self.content_spans(messages)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return text, [self._answer(text, messages, index, words[index]) for index in answers]

    def content_spans(self, messages: Sequence[Message]) -> list[Span]:
        """Return the span of every message's own words, headers and end tokens left out.

        The chat is rendered a second time with a placeholder for each message; the text around the placeholders
        must be the text around the words.

        Raises:
            ChatTemplateError: the template changes the words or looks into them.
        """
        text, outline = self._render(messages)[0], self._render(_placeholders(messages))[0]
        spans, position, read = [], 0, 0
        for index, message in enumerate(messages):
            at = outline.find(_placeholder(index), read)
            start = position + at - read
            words = message.content if text.startswith(message.content, start) else message.content.strip()
            if at < 0 or text[position:start] != outline[read:at] or not text.startswith(words, start):
                raise ChatTemplateError(_CHANGED)
            position, read = start + len(words), at + len(_placeholder(index))
            spans.append((start, position))
        if text[position:] != outline[read:]:
            raise ChatTemplateError(_CHANGED)
        return spans

    def _answer(self, text: str, messages: Sequence[Message], index: int, words: Span) -> Span:
        """Find one answer by the difference between prefixes of the chat, for templates without marks.

        It starts where the prompt for it ends. It ends with whatever the template puts after an answer that is
        the last of its chat, less white space: so with the end token, and without the line break before the
        next turn's header.
        """
        prompt = self._render(messages[:index], prompt=True)[0]
        start, end = len(prompt), words[1]
        if not text.startswith(prompt) or words[0] < start:
            raise ChatTemplateError(
                f"the chat template rewrites earlier turns, so the answer in turn {index + 1} cannot be found; "
                "choose one by chat_template, or add {% generation %} marks to the tokenizer's"
            )
        alone = self._render(_placeholders(messages[: index + 1]))[0]
        after = alone.rpartition(_placeholder(index))[2].rstrip()
        return start, end + (len(after) if text.startswith(after, end) else 0)

    def _render(
        self, messages: Sequence[Message], *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[[message.as_dict() for message in messages]],
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses it: {error}") from None
        return texts[0], [(start, end) for start, end in spans[0]] if marks else []


def _placeholder(index: int) -> str:
    return f"\ue000{index}\ue001"  # characters for private use: no text and no template holds them


def _placeholders(messages: Sequence[Message]) -> list[Message]:
    return [Message(message.role, _placeholder(index)) for index, message in enumerate(messages)]
