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
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from medusa_train.config.types import RENDERING
from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags
from medusa_train.data.marked_text import MARK, Span
from medusa_train.errors import ConfigError

#: Names that jinja2 and transformers give to every template.
_GLOBALS = frozenset(
    {
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
        "lipsum",
        "cycler",
        "joiner",
    }
)

#: Written by templates that print today's date (`strftime_now`); the one that Llama 3 falls back
#: to.
DATE = datetime.date(2024, 7, 26)

_CHANGED = (
    "the chat template modifies message contents, so their positions in the text cannot be"
    " determined"
)


class ChatTemplateError(ValueError):
    """The template rejects this chat, or its spans cannot be determined; the message says which."""


@dataclass(frozen=True, slots=True)
class RenderedAnswer:
    """An answer as it is generated.

    Attributes:
        index: of its message in the chat.
        prompt: the messages before it and the generation prompt, as rendered for decoding.
        text: what follows the prompt, up to and including the end token.
        end: the end token; '' if the answer reached the length limit.
        token_ids: the tokens before the end token, if they are known not to be those of `text`.
    """

    index: int
    prompt: str
    text: str
    end: str
    token_ids: tuple[int, ...] | None = None

    @property
    def whole(self) -> str:
        """Prompt and answer."""
        return self.prompt + self.text


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template.

    Attributes:
        special_tokens: the special tokens that it may use, by name (`bos_token`, ...).
        added_tokens: all tokens that the tokenizer never splits, among them those that may end an
            answer.
        kwargs: further variables of the template, such as `enable_thinking`.
        stops: tokens at which decoding stops, which end answers with tool calls.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    added_tokens: frozenset[str] = frozenset()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_tags: ReasoningTags = REASONING_TAGS
    stops: frozenset[str] = frozenset()

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render the chat, with `prompt` plus the generation prompt; ChatTemplateError if the
        template rejects it.
        """
        try:
            return _compiled(self.source).render(
                messages=[message.as_dict() for message in messages],
                add_generation_prompt=prompt,
                # Templates expect these two, if only as None.
                **{"tools": None, "documents": None, **self.special_tokens, **self.kwargs},
            )
        except TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error}") from None
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise ChatTemplateError(f"the chat template rejects the chat: {error}") from None

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with the variables of a chat, which replace those in `kwargs`."""
        return replace(self, kwargs={**self.kwargs, **variables})

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads, apart from those that rendering sets."""
        return _free_variables(self.source) - RENDERING - _GLOBALS - set(self.special_tokens)

    def describe_unused_kwargs(self) -> str | None:
        """Name the variables in `kwargs` that the template does not have, such as mistyped ones;
        None if it has all.
        """
        unused = [
            name for name in self.kwargs if not re.search(rf"\b{re.escape(name)}\b", self.source)
        ]
        if not unused:
            return None
        return f"chat_template_kwargs: not in the chat template: {', '.join(unused)}"

    def answers(
        self, messages: Sequence[Message], counts: Counter[str] | None = None
    ) -> list[RenderedAnswer]:
        """Return every answer of the chat as it is generated: the text that the template renders for
        it as the last message.

        A chat ends before an answer with tool calls that is rendered otherwise than it can be
        generated after a prompt; `counts` has such a chat under "cut_before_turn".
        """
        indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if not indices:
            return []
        lead, end = self._around_answer(messages[: indices[-1]])
        answers = []
        for index in indices:
            if not messages[index].calls:
                answers.append(self._answer(messages[: index + 1], lead, end))
                continue
            answer = self._answer_with_calls(messages[: index + 1])
            if answer is None and not answers:
                raise ChatTemplateError(
                    f"the chat template renders turn {index + 1} differently after a prompt"
                )
            if answer is None:
                if counts is not None:
                    counts["cut_before_turn"] += 1
                break
            answers.append(answer)
        return answers

    def _answer(self, messages: Sequence[Message], lead: str, end: str) -> RenderedAnswer:
        """Return the last message as it is generated.

        Args:
            lead: what the template writes before the content of an answer.
            end: its end token.
        """
        index = len(messages) - 1
        message = messages[index]
        prompt = self.render(messages[:index], prompt=True)
        content = self._without_prompted(prompt, message.content)
        # 1. The answer as the template renders it, with its content unchanged or only stripped.
        rendered = self.render(messages)
        text = None
        for words in (content, content.strip()):
            border = rendered.rfind(lead + words + end)
            if border == self._answer_start(prompt, rendered, border):
                text = lead + words + end
                break
        # 2. Else the content itself, followed by the end token. DeepSeek-R1's template drops the
        # reasoning even from the last answer.
        if text is None:
            is_whole = content == message.content  # no opening tag was removed
            if is_whole and not message.is_cut:
                content = self._with_closed_reasoning(prompt, content)
            text = content + end
            if lead.isspace():
                text = lead + text
        if not message.is_cut:
            return RenderedAnswer(index, prompt, text, end, message.token_ids)
        # 3. An answer that was cut off has no end token. Within its reasoning, the content alone is
        # what was generated.
        opened, closed = map((prompt + content).rfind, self.reasoning_tags)
        text = content if opened > closed else text.removesuffix(end)
        return RenderedAnswer(index, prompt, text, "", message.token_ids)

    def _answer_with_calls(self, messages: Sequence[Message]) -> RenderedAnswer | None:
        """Return the last message, an answer with tool calls, as it is generated; None if the
        template renders it otherwise after the prompt.
        """
        *history, message = messages
        prompt = self.render(history, prompt=True)
        # 1. The chat with the answer, and with another one. A prompt that closes the reasoning
        # leaves none to generate.
        if prompt.rstrip().endswith(self.reasoning_tags[1]):
            kept = {k: v for k, v in message.parts.items() if k == "tool_calls"}
            message = replace(message, parts=kept)
        rendered = self.render([*history, message])
        other = self.render([*history, Message("assistant", _placeholder(len(history)))])
        # 2. What of it is generated, up to the first token at which decoding stops.
        text = self._after_prompt(prompt, rendered, other)
        if text is None:
            return None
        found = _pattern(self.stops).search(text)
        end = found[0] if found else ""
        text = text[: found.end()] if found else text.rstrip()
        # A template may write the text next to calls and the calls as two turns (Nemotron Nano 2).
        names = Counter(call["function"]["name"] for call in message.calls)
        if any(text.count(name) < count for name, count in names.items()):
            return None
        if message.is_cut:
            text, end = text.removesuffix(end), ""
        return RenderedAnswer(len(history), prompt, text, end, message.token_ids)

    def _after_prompt(self, prompt: str, rendered: str, other: str) -> str | None:
        """Return what follows the prompt in a rendered chat, of which `other` has another answer.

        prompt      ... <|start|>assistant
        rendered    ... <|start|>assistant<|channel|>commentary to=...
        """
        if rendered.startswith(prompt):
            return rendered[len(prompt) :]
        common = _common_length(rendered, other)
        # 1. Earlier turns are rendered otherwise.
        start = self._answer_start(prompt, rendered, common)
        if start is not None:
            return rendered[start:]
        # 2. The prompt opens a reasoning that the answer does not have.
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
        # 3. The prompt ends with what no turn contains, such as a closed thought.
        border = _common_length(rendered, prompt)
        for token in _pattern(self.added_tokens).finditer(rendered, max(0, border - 100)):
            if token.start() < border < token.end():
                border = token.start()
                break
        if prompt[border:] in rendered or rendered[border:common].strip():
            return None
        return rendered[border:]

    def _answer_start(self, prompt: str, rendered: str, border: int) -> int | None:
        """Return where what is generated after a prompt starts in a rendered chat: after the prompt,
        or, if earlier turns are rendered otherwise, after the header that the prompt ends with.

        None if there is neither, or a turn ends between it and the character at `border`, which is
        of the answer.
        """
        if rendered.startswith(prompt):
            return len(prompt)
        # The header begins with a token that no content contains, as it may contain reasoning tags.
        tokens = _pattern(self.added_tokens - set(self.reasoning_tags))
        starts = [token.start() for token in tokens.finditer(prompt)]
        header = prompt[starts[-1] :] if starts else prompt
        found = list(_pattern(frozenset([header])).finditer(rendered, 0, border + len(header)))
        if not found or _pattern(self.stops).search(rendered[found[-1].end() : border]):
            return None
        return found[-1].end()

    def opened_reasoning(self, prompt: str) -> str:
        """Return the end of a rendered prompt that opens the reasoning, such as `<think>` and a
        line break, or ''.
        """
        opening = self.reasoning_tags[0]
        words = prompt.rstrip()
        if not words.endswith(opening):
            return ""
        return prompt[len(words) - len(opening) :]

    def end_token(self) -> str | None:
        """Return the token that the template writes after the content of an answer: the one that
        answers are trained to end with.

        None where nothing but plain text follows, or where the template rejects a chat of one
        question.
        """
        question = [Message("user", "Hello")]
        try:
            end = self._around_answer(question)[1]
        except ChatTemplateError:
            return None
        tokens = [token for token in self.added_tokens if token.strip() and end.endswith(token)]
        return max(tokens, key=len, default=None)

    def content_spans(self, messages: Sequence[Message], indices: Collection[int]) -> list[Span]:
        """Return the character spans in `render(messages, prompt=True)` of the contents of the
        messages at `indices`, in order.

        The chat is rendered again with a placeholder for each of them; the text around the
        placeholders must equal the text around the contents. A template may strip white space
        around a content.
        """
        if not indices:
            return []
        # 1. The chat as it is, and with placeholders.
        replaced = list(messages)
        for index in indices:
            replaced[index] = replace(messages[index], content=_placeholder(index))
        text = self.render(messages, prompt=True)
        outline = self.render(replaced, prompt=True)
        # 2. The text before the first placeholder, and that after each.
        first, *following = re.split("|".join(map(_placeholder, indices)), outline)
        if len(following) != len(indices) or not text.startswith(first):
            raise ChatTemplateError(_CHANGED)
        # 3. Each content is between two of these texts.
        spans = []
        position = len(first)
        for index, after in zip(indices, following, strict=True):
            content = messages[index].content
            if not text.startswith(content + after, position):
                content = content.strip()
            if not text.startswith(content + after, position):
                raise ChatTemplateError(_CHANGED)
            spans.append((position, position + len(content)))
            position += len(content + after)
        if position != len(text):
            raise ChatTemplateError(_CHANGED)
        return spans

    def _around_answer(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return what the template writes between the generation prompt and the content of an answer
        to `messages`, and its end token.

        The end is what follows the content, up to the first added token that is not white space
        (Gemma has tokens of line breaks); without one, up to trailing white space. So neither the
        line break before the next turn nor a token that closes the whole text belongs to the
        answer.
        """
        prompt = self.render(messages, prompt=True)
        placeholder = _placeholder(len(messages))
        rendered = self.render([*messages, Message("assistant", placeholder)])
        before, found, after = rendered.rpartition(placeholder)
        if not found:
            raise ChatTemplateError("the chat template leaves out the content of answers")
        end = _end_of_answer(after, self.added_tokens)
        start = self._answer_start(prompt, before, len(before))
        return "" if start is None else before[start:], end

    def _without_prompted(self, prompt: str, content: str) -> str:
        """Return an answer's content without what the generation prompt already says of its
        reasoning.

        That is the opening tag, or all of the reasoning where the prompt closes it
        (`enable_thinking: false`).
        """
        opening, closing = self.reasoning_tags
        if prompt.rstrip().endswith(closing):
            if closing not in content:
                return content
            return content.rpartition(closing)[2].lstrip("\n")
        opened = self.opened_reasoning(prompt)
        if opened and content.lstrip().startswith(opening):
            return content.lstrip()[len(opening) :].removeprefix(opened[len(opening) :])
        return content

    def _with_closed_reasoning(self, prompt: str, content: str) -> str:
        """Return the content, after an empty reasoning part where the prompt opens one that the
        content lacks.
        """
        closing = self.reasoning_tags[1]
        if not self.opened_reasoning(prompt) or closing in content:
            return content
        return f"\n{closing}\n\n{content}"


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern of tokens that no content contains: there they are marked."""
    names = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile(f"(?<!{MARK})(?:{'|'.join(map(re.escape, names)) or '(?!)'})")


@lru_cache(maxsize=8)
def _free_variables(source: str) -> frozenset[str]:
    """Return the names that a template reads and does not set; none if it is not valid."""
    # tags of transformers that jinja2 alone does not know
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(find_undeclared_variables(tree))


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    """Compile a template as transformers does, but with `DATE` as today's date: tokens must not
    change from day to day, or a run could not be resumed.
    """
    environment: Environment = _compile_jinja_template("").environment
    return environment.from_string(source, globals={"strftime_now": DATE.strftime})


# There are thousands of added tokens in some tokenizers, and few texts after answers.
@lru_cache(maxsize=64)
def _end_of_answer(after: str, added_tokens: frozenset[str]) -> str:
    """Cut the text that follows the content of a last answer after its end token."""
    ends = [
        after.index(token) + len(token)
        for token in added_tokens
        if token.strip() and token in after
    ]
    if not ends:
        return after.rstrip()
    return after[: min(ends)]


def _common_length(left: str, right: str) -> int:
    """Return how many characters two texts have in common at their start."""
    return len(commonprefix([left, right]))  # noqa: RUF071  (of texts, not of paths)


def _placeholder(index: int) -> str:
    """Return a text of private use characters, which neither templates nor texts contain."""
    return f"\ue000{index}\ue001"
