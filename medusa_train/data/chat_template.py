"""Rendering of chats and prompts by a chat template, and the character spans of message
contents.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from medusa_train.config.types import RENDERING
from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags
from medusa_train.data.marked_text import Span
from medusa_train.errors import ConfigError

#: The date for templates that print today's date (`strftime_now`). Llama 3's template falls back to
#: the same date.
DATE = datetime.date(2024, 7, 26)


class ChatTemplateError(ValueError):
    """The template rejects this chat, or its spans cannot be determined; the message says which."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template.

    Attributes:
        special_tokens: the special tokens that it may use, by name (`bos_token`, ...).
        added_tokens: all tokens that the tokenizer never splits, among them those that may end an
            answer.
        kwargs: further variables of the template, such as `enable_thinking`.
        stops: tokens at which decoding stops. They end answers with tool calls.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    added_tokens: frozenset[str] = frozenset()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_tags: ReasoningTags = REASONING_TAGS
    stops: frozenset[str] = frozenset()

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render the chat, followed by the generation prompt if `prompt` is set; raises
        ChatTemplateError if the template rejects it.
        """
        try:
            return _compiled(self.source).render(
                messages=[message.as_dict() for message in messages],
                add_generation_prompt=prompt,
                # Templates expect `tools` and `documents`, even if they are None.
                **{"tools": None, "documents": None, **self.special_tokens, **self.kwargs},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error}") from None
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ChatTemplateError(f"the chat template rejects the chat: {error}") from None

    def opened_reasoning(self, prompt: str) -> str:
        """Return the suffix of a rendered prompt that opens the reasoning, such as `<think>` and a
        line break; '' if it opens none.
        """
        opening = self.reasoning_tags[0]
        words = prompt.rstrip()
        if not words.endswith(opening):
            return ""
        return prompt[len(words) - len(opening) :]

    def closes_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends with the tag that closes the reasoning, as Qwen3's
        does with `enable_thinking: false`.
        """
        return prompt.rstrip().endswith(self.reasoning_tags[1])

    def content_spans(
        self, messages: Sequence[Message], prompt: str, indices: Collection[int]
    ) -> list[Span]:
        """Return where the contents of the messages at `indices` are in the rendered `prompt`: a
        character span for each, in order.

        The chat is rendered again with a placeholder for each of these contents. The text around
        the placeholders must equal the text around the contents. A template may strip white space
        around a content.
        """
        if not indices:
            return []
        # 1. The chat with placeholders.
        replaced = list(messages)
        for index in indices:
            replaced[index] = replace(messages[index], content=placeholder(index))
        outline = self.render(replaced, prompt=True)
        # 2. The text before the first placeholder, and each content with the text after it.
        text, *following = re.split("|".join(map(placeholder, indices)), outline)
        spans = []
        for index, after in zip(indices, following, strict=False):
            content = messages[index].content
            if not prompt.startswith(content + after, len(text)):
                content = content.strip()
            spans.append((len(text), len(text) + len(content)))
            text += content + after
        if len(following) != len(indices) or text != prompt:
            raise ChatTemplateError(
                "the chat template modifies message contents, so their positions in the text cannot"
                " be determined"
            )
        return spans

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, except those that rendering sets."""
        return _free_variables(self.source) - RENDERING - set(self.special_tokens)

    def describe_unused_kwargs(self) -> str | None:
        """Return a sentence that lists the variables in `kwargs` that the template does not have,
        such as mistyped ones; None if it has all of them.
        """
        unused = [name for name in self.kwargs if name not in _free_variables(self.source)]
        if not unused:
            return None
        return f"chat_template_kwargs: not in the chat template: {', '.join(unused)}"


@lru_cache(maxsize=8)
def _free_variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set."""
    environment = _compiled(source).environment
    names = find_undeclared_variables(environment.parse(source))
    return frozenset(names - environment.globals.keys())


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compile a template as transformers does, but with `DATE` as today's date: tokens must not
    change from day to day, or a run could not be resumed.
    """
    environment = _compile_jinja_template("").environment
    return environment.from_string(source, globals={"strftime_now": DATE.strftime})


def placeholder(index: int) -> str:
    """Return a text of private use characters, which neither templates nor texts contain."""
    return f"\ue000{index}\ue001"
