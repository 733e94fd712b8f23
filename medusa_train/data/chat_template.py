"""Rendering of chats, and the character spans of assistant answers and message contents in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from medusa_train.data.conversation import Message

Span = tuple[int, int]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

_CHANGED = "the chat template modifies message contents, so their positions in the text cannot be determined"


class ChatTemplateError(ValueError):
    """The template rejects this chat, or its spans cannot be determined; the message says which."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and the special tokens that it may use, by name (`bos_token`, ...)."""

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_generation_marks(self) -> bool:
        """Whether the template marks assistant text with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render the chat as text; with `prompt`, followed by the generation prompt.

        Raises:
            ChatTemplateError: the template rejects the chat, for example a system message that it does not support.
        """
        return self._render(messages, prompt=prompt)[0]

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Return the text and the character spans that the assistant generates: its contents and end tokens.

        Raises:
            ChatTemplateError: the template rejects the chat, or rewrites it so that answers cannot be located.
        """
        if self.has_generation_marks:
            return self._render(messages, marks=True)
        text = self._render(messages)[0]
        contents = self.content_spans(messages)
        answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
        return text, [self._answer(text, messages, index, contents[index]) for index in answers]

    def content_spans(self, messages: Sequence[Message]) -> list[Span]:
        """Return the character span of every message's content, without headers and end tokens.

        The chat is rendered again with a placeholder for each content; the text around the placeholders must equal
        the text around the contents. A template may strip white space around a content.

        Raises:
            ChatTemplateError: the template modifies contents, or depends on them.
        """
        text, outline = self._render(messages)[0], self._render(_placeholders(messages))[0]
        spans, position, read = [], 0, 0
        for index, message in enumerate(messages):
            at = outline.find(_placeholder(index), read)
            start = position + at - read
            content = message.content if text.startswith(message.content, start) else message.content.strip()
            if at < 0 or text[position:start] != outline[read:at] or not text.startswith(content, start):
                raise ChatTemplateError(_CHANGED)
            position, read = start + len(content), at + len(_placeholder(index))
            spans.append((start, position))
        if text[position:] != outline[read:]:
            raise ChatTemplateError(_CHANGED)
        return spans

    def _answer(self, text: str, messages: Sequence[Message], index: int, content: Span) -> Span:
        """Locate one answer by rendering prefixes of the chat, for templates without `{% generation %}` marks.

        It starts at the end of its generation prompt. It ends with what the template appends to an answer that is the
        last message, without trailing white space: after the end token, before the next turn's line break.
        """
        prompt = self._render(messages[:index], prompt=True)[0]
        start, end = len(prompt), content[1]
        if not text.startswith(prompt) or content[0] < start:
            raise ChatTemplateError(
                f"the chat template rewrites earlier turns, so the answer in turn {index + 1} cannot be located; "
                "set chat_template to a built-in one, or add {% generation %} marks to the tokenizer's"
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
            raise ChatTemplateError(f"the chat template rejects the chat: {error}") from None
        return texts[0], [(start, end) for start, end in spans[0]] if marks else []


def _placeholder(index: int) -> str:
    return f"\ue000{index}\ue001"  # private use characters, which neither templates nor text contain


def _placeholders(messages: Sequence[Message]) -> list[Message]:
    return [Message(message.role, _placeholder(index)) for index, message in enumerate(messages)]
