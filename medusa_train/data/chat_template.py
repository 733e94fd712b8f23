"""Rendering of chats: prompts, answers as they are generated, and the character spans of message
contents.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from medusa_train.config.types import RENDERING
from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags
from medusa_train.data.marked_text import MARK, Span
from medusa_train.errors import ConfigError

#: The date for templates that print today's date (`strftime_now`). Llama 3's template falls back to
#: the same date.
DATE = datetime.date(2024, 7, 26)


class ChatTemplateError(ValueError):
    """The template rejects this chat, or its spans cannot be determined; the message says which."""


class RenderedAnswer(NamedTuple):
    """An answer as it is generated.

    For the question "Hi" and the answer "Hello!", the template of data/tiny gives

        prompt   <s><|user|>Hi</s><|assistant|>
        text     Hello!</s>
        end      </s>

    Attributes:
        prompt: the messages before it and the generation prompt, as rendered for decoding.
        text: what follows the prompt, up to and including the end token.
        end: the end token; '' if the answer reached the length limit.
    """

    prompt: str
    text: str
    end: str


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

    def answer(self, messages: Sequence[Message]) -> RenderedAnswer | None:
        """Return the last message as the model generates it after the prompt; None if the template
        does not render all of its tool calls in the same turn.
        """
        *history, message = messages
        prompt = self.render(history, prompt=True)
        if message.calls:
            return self._answer_with_calls(history, message, prompt)
        return self._answer_without_calls(history, message, prompt)

    def _answer_without_calls(
        self, history: Sequence[Message], message: Message, prompt: str
    ) -> RenderedAnswer:
        r"""Return an answer that is only text: what the template writes before its content, the
        content, and the end token.

        Qwen3's template writes an empty reasoning part before the content, so this `lead` is
        generated:

            prompt     ...<|im_start|>assistant\n
            rendered   ...<|im_start|>assistant\n<think>\n\n</think>\n\nHello!<|im_end|>\n
                                                 lead                   content
        """
        # 1. Find the answer in the rendered chat.
        rendered = self.render([*history, message])
        before, after = self._around_content(history)
        start = self._answer_start(prompt, rendered, _common_length(rendered, before))
        # 2. Neither the line break before the next turn nor a token that closes the whole text
        # belongs to the answer.
        end = _up_to(self.added_tokens, after)[0]
        lead = "" if start is None else before[start:]
        content = self._content_after(prompt, message)
        text = lead + content + end if lead.isspace() else content + end
        # Use the form of the content that the template renders: unchanged or stripped.
        for words in (content, content.strip()):
            if start is not None and rendered.startswith(lead + words + end, start):
                text = lead + words + end
                break
        if not message.is_cut:
            return RenderedAnswer(prompt, text, end)
        # 3. An answer that was cut off has no end token. If it was cut within the reasoning, its
        # content is all that was generated.
        opened, closed = map((prompt + content).rfind, self.reasoning_tags)
        text = content if content and opened > closed else text.removesuffix(end)
        return RenderedAnswer(prompt, text, "")

    def _content_after(self, prompt: str, message: Message) -> str:
        """Return an answer's content without the part of its reasoning that the prompt already has:
        the opening tag, or the whole reasoning if the prompt closes it (`enable_thinking: false`).

        If the prompt opens a reasoning that the content lacks, an empty reasoning is put before the
        content.
        """
        content = message.content
        opening, closing = self.reasoning_tags
        if prompt.rstrip().endswith(closing):
            if closing not in content:
                return content
            return content.rpartition(closing)[2].lstrip("\n")
        opened = self.opened_reasoning(prompt)
        if opened and content.lstrip().startswith(opening):
            return content.lstrip()[len(opening) :].removeprefix(opened[len(opening) :])
        if opened and closing not in content and not message.is_cut:
            return f"\n{closing}\n\n{content}"
        return content

    def _answer_with_calls(
        self, history: Sequence[Message], message: Message, prompt: str
    ) -> RenderedAnswer | None:
        """Return an answer with tool calls: all that the template writes after the prompt, up to a
        token at which decoding stops. None if the calls are in another turn.

            prompt     ...<|start|>assistant
            rendered   ...<|start|>assistant<|channel|>commentary to=...<|call|>
        """
        # 1. Find the answer in the rendered chat.
        if prompt.rstrip().endswith(self.reasoning_tags[1]):  # no reasoning is left to generate
            message = replace(message, parts={"tool_calls": message.calls})
        rendered = self.render([*history, message])
        before, _ = self._around_content(history)
        common = _common_length(rendered, before)
        start = self._answer_start(prompt, rendered, common)
        if start is None:
            text = self._after_changed_prompt(prompt, rendered, common)
        else:
            text = rendered[start:]
        text, end = _up_to(self.stops, text)
        # 2. A template may write the text next to calls and the calls as two turns (Nemotron
        # Nano 2).
        names = Counter(call["function"]["name"] for call in message.calls)
        if any(text.count(name) < count for name, count in names.items()):
            return None
        if message.is_cut:
            return RenderedAnswer(prompt, text.removesuffix(end), "")
        return RenderedAnswer(prompt, text, end)

    def _after_changed_prompt(self, prompt: str, rendered: str, common: int) -> str:
        """Return the text after a prompt whose end `rendered`, a chat with tool calls, does not
        contain; '' if the texts differ earlier.

        Args:
            common: length of the prefix of `rendered` that does not depend on the answer.
        """
        # 1. The prompt opens a reasoning that the answer does not have.
        opened = self.opened_reasoning(prompt)
        opening, closing = self.reasoning_tags
        before = prompt.removesuffix(opened)
        if opened and rendered.startswith(before):
            rest = rendered[len(before) :]
            if not rest.startswith(opening):
                return f"\n{closing}\n\n{rest}"
            reasoning, _, rest = rest.removeprefix(opening).partition(closing)
            if reasoning.strip():
                return reasoning.lstrip("\n") + closing + rest
            return f"\n{closing}\n\n" + rest.lstrip("\n")
        # 2. The prompt ends with text that no rendered turn contains, such as a closed reasoning
        # part.
        border = _common_length(rendered, prompt)
        for token in _pattern(self.added_tokens).finditer(rendered, max(0, border - 100)):
            if token.start() < border < token.end():
                border = token.start()
                break
        if prompt[border:] in rendered or rendered[border:common].strip():
            return ""
        return rendered[border:]

    def _around_content(self, history: Sequence[Message]) -> tuple[str, str]:
        """Return what the template writes before and after the content of an answer to `history`:
        the parts of the rendered chat that do not depend on the answer.
        """
        place = placeholder(len(history))
        outline = self.render([*history, Message("assistant", place)])
        before, found, after = outline.rpartition(place)
        if not found:
            raise ChatTemplateError("the chat template leaves out the content of answers")
        return before, after

    def _answer_start(self, prompt: str, rendered: str, border: int) -> int | None:
        """Return the index in `rendered` at which the generated text starts.

        1. If `rendered` starts with `prompt`, the generated text starts right after it.
        2. Otherwise the template renders earlier turns differently once the answer follows. The
           generated text then starts after the header of the answer's turn: the end of the prompt
           from its last special token on, such as `<|im_start|>assistant` and a line break. The
           last header up to `border` counts.

        None if there is no such header, or if a turn ends between it and `border`: then it is the
        header of an earlier turn.

        Args:
            border: length of the prefix of `rendered` that does not depend on the answer. It ends
                within the answer's turn.
        """
        if rendered.startswith(prompt):
            return len(prompt)
        # The header begins with a token that no content contains. Contents may contain reasoning
        # tags.
        tokens = _pattern(self.added_tokens - set(self.reasoning_tags))
        starts = [token.start() for token in tokens.finditer(prompt)]
        header = prompt[starts[-1] :] if starts else prompt
        found = list(_pattern(frozenset([header])).finditer(rendered, 0, border + len(header)))
        if not found or _pattern(self.stops).search(rendered[found[-1].end() : border]):
            return None
        return found[-1].end()

    def opened_reasoning(self, prompt: str) -> str:
        """Return the suffix of a rendered prompt that opens the reasoning, such as `<think>` and a
        line break; '' if it opens none.
        """
        opening = self.reasoning_tags[0]
        words = prompt.rstrip()
        if not words.endswith(opening):
            return ""
        return prompt[len(words) - len(opening) :]

    def end_token(self) -> str | None:
        """Return the token that the template writes after the content of an answer: the one that
        answers are trained to end with.

        None if only plain text follows the content, or if the template rejects a chat of one
        question and one answer.
        """
        try:
            answer = self.answer([Message("user", "Hello"), Message("assistant", "Hi")])
        except ChatTemplateError:
            return None
        end = answer.end if answer is not None else ""
        tokens = [token for token in self.added_tokens if token.strip() and end.endswith(token)]
        return max(tokens, key=len, default=None)

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

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with the variables of a chat, which replace those in `kwargs`."""
        return replace(self, kwargs={**self.kwargs, **variables})

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
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches tokens which the template wrote. Tokens in contents follow a
    mark, and do not match.
    """
    names = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile(f"(?<!{MARK})(?:{'|'.join(map(re.escape, names)) or '(?!)'})")


@lru_cache(maxsize=8)
def _free_variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set; none if its
    syntax is invalid.
    """
    environment = _compile_jinja_template("").environment
    try:
        names = find_undeclared_variables(environment.parse(source))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(names - environment.globals.keys())


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compile a template as transformers does, but with `DATE` as today's date: tokens must not
    change from day to day, or a run could not be resumed.
    """
    environment = _compile_jinja_template("").environment
    return environment.from_string(source, globals={"strftime_now": DATE.strftime})


def _up_to(tokens: frozenset[str], text: str) -> tuple[str, str]:
    """Return a text up to and including the first of the tokens, and that token. If the text has
    none of them, return it without trailing white space, and ''.
    """
    match = _pattern(tokens).search(text)
    return (text[: match.end()], match[0]) if match else (text.rstrip(), "")


def _common_length(left: str, right: str) -> int:
    """Return the length of the common prefix of two texts."""
    return len(commonprefix([left, right]))  # noqa: RUF071  (of texts, not of paths)


def placeholder(index: int) -> str:
    """Return a text of private use characters, which neither templates nor texts contain."""
    return f"\ue000{index}\ue001"
