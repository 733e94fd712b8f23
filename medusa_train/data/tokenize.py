"""Tokenization of chats into training rows with loss masks."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_train.data.builtin_templates import template_source
from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError
from medusa_train.data.conversation import (
    REASONING_TAGS,
    Conversation,
    Message,
    ReasoningTags,
    Role,
)
from medusa_train.data.marked_text import MarkedTextTokenizer
from medusa_train.data.rendered_answers import RenderedAnswer, end_token, render_answer
from medusa_train.data.tool_calls import TOOLS
from medusa_train.data.tool_forms import fit_to_template, map_strings
from medusa_train.errors import DataError

ASSISTANT: tuple[Role, ...] = ("assistant",)


@dataclass(slots=True)
class Row:
    """Tokenized messages of a chat that end with an answer.

    Attributes:
        ids: token ids [T].
        supervised: the loss mask [T].
        answers: for each answer that is not history in this row, in order, its index among the
            messages of the chat, and the index in `ids` at which it ends.
    """

    ids: list[int] = field(default_factory=list)
    supervised: list[bool] = field(default_factory=list)
    answers: dict[int, int] = field(default_factory=dict)

    def trimmed(self, max_length: int) -> Row | None:
        """Return the row with as many complete answers as fit, without the tokens after the last
        supervised one, which no loss depends on. None if nothing is left.
        """
        answers = dict(self.answers)
        while answers:
            end = max(answers.values())
            while end and not self.supervised[end - 1]:
                end -= 1
            if 0 < end <= max_length:
                return Row(self.ids[:end], self.supervised[:end], answers)
            answers.popitem()
        return None


class ChatEncoder:
    """Tokenizes chats with a chat template, and determines the loss mask.

    Training rows hold what decoding sees: the tokens of a rendered prompt, as `prompt` returns
    them, then the tokens of the answer. An encoder is picklable, and `encode` depends only on its
    settings and the chat.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: a name of `TEMPLATES`, a Jinja file, or None for the tokenizer's own template.
        template_kwargs: further variables of the template (`chat_template_kwargs`).
        roles: roles whose messages are supervised. For the assistant this includes the token that
            ends an answer.
        train_on_inputs: supervise every token, whatever its role. If `Message.is_target` is set, it
            overrides both `roles` and this.
        stops: tokens at which decoding stops, in addition to the tokenizer's EOS token and the one
            that the template writes after an answer.
        max_tool_rows: maximum number of rows of a chat with tool calls (`max_rows_per_chat`).
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        roles: Collection[Role] = ASSISTANT,
        train_on_inputs: bool = False,
        reasoning_tags: ReasoningTags = REASONING_TAGS,
        stops: Collection[str] = (),
        max_tool_rows: int = 8,
    ) -> None:
        self.tokenizer = tokenizer
        self.template_name = template
        self.roles = frozenset(roles)
        self.train_on_inputs = train_on_inputs
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                "a fast tokenizer (with tokenizer.json) is required: loss masks need character"
                " offsets"
            )
        self.template = ChatTemplate(
            template_source(tokenizer, template),
            dict(tokenizer.special_tokens_map),
            frozenset(tokenizer.get_added_vocab()),
            dict(template_kwargs or {}),
            reasoning_tags,
        )
        ends = {*stops, end_token(self.template), tokenizer.eos_token} - {None, ""}
        self.template = replace(self.template, stops=frozenset(ends))
        self.max_tool_rows = max_tool_rows
        self._text = MarkedTextTokenizer(tokenizer, reasoning_tags)

    def with_settings(self, *, template: str | None = None, **settings: Any) -> ChatEncoder:
        """Return an encoder with the same tokenizer, other `settings`, and another template unless
        it is None.
        """
        name = template if template is not None else self.template_name
        settings = {"stops": self.template.stops, "max_tool_rows": self.max_tool_rows, **settings}
        return ChatEncoder(self.tokenizer, name, self.template.kwargs, **settings)

    def encode(self, conversation: Conversation, counts: Counter[str] | None = None) -> list[Row]:
        """Tokenize a chat into rows that end with an answer. Special tokens come only from the
        template: in contents, their text is tokenized as plain text.

        The question "Hi" and the answer "Hello!" are one row, with the tokenizer of data/tiny:

            prompt   <s> <|user|> H i </s> <|assistant|>   0 4 45 78 1 5    not supervised
            answer   H el lo ! </s>                        45 278 507 6 1   supervised

        An answer continues the previous row if its prompt begins with the tokens of that row. It
        begins a new row if the template changes earlier turns, if the tokenizer merges characters
        of the prompt with the answer, or if the data give token ids for an answer.

        Each answer is supervised in only one row; in other rows it is history. Each other message
        (see `roles`) is supervised in the first row that has it. An answer that reached the length
        limit has no end token to learn. For an answer with tool calls, everything that is generated
        is supervised: reasoning, content, calls and the separators between them.

        `counts` receives the number of answers whose given token ids are another text for this
        tokenizer ("ignored_token_ids"), and the changes by `fit_to_template` and `max_tool_rows`.
        """
        counts = Counter() if counts is None else counts
        template = self._template_of(conversation.variables)
        try:
            messages = fit_to_template(self._with_marks(conversation.messages), template, counts)
            rows = self._rows(messages, template, counts)
        except ChatTemplateError as error:
            raise DataError(f"{conversation.source or conversation.id}: {error}") from None
        num_dropped = len(rows) - self.max_tool_rows
        if num_dropped > 0 and any(message.calls for message in messages):
            # Long trajectories would take quadratic compute: keep the last rows and a sample of the
            # others.
            counts["dropped_rows"] += num_dropped
            num_last = (self.max_tool_rows + 1) // 2
            others = range(len(rows) - num_last)
            chooser = random.Random(conversation.content_key)
            chosen = sorted(chooser.sample(others, self.max_tool_rows - num_last))
            rows = [*(rows[index] for index in chosen), *rows[len(rows) - num_last :]]
        return rows

    def _with_marks(self, messages: Sequence[Message]) -> list[Message]:
        """Mark the control tokens in contents, calls and results as plain text."""
        mark = self._text.mark
        return [
            replace(m, content=mark(m.content), parts=map_strings(m.parts, mark)) for m in messages
        ]

    def _rows(
        self, messages: Sequence[Message], template: ChatTemplate, counts: Counter[str]
    ) -> list[Row]:
        """Return the rows of a chat with marked contents; see `encode`."""
        rows: list[Row] = []
        has_given_ids = False  # the data give the token ids of the previous answer
        first = 0  # index of the first message that is in no row yet
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            # 1. Render the prompt and the answer.
            answer = render_answer(template, messages[: index + 1])
            if answer is None:
                if not rows:
                    raise ChatTemplateError(
                        f"the chat template renders turn {index + 1} differently after a prompt"
                    )
                counts["cut_before_turn"] += 1
                break
            # 2. Tokenize both.
            prompt_ids = self._text.ids(answer.prompt)
            given_ids = message.token_ids
            if given_ids is not None and not self._decode_to(given_ids, message, answer):
                given_ids = None
                counts["ignored_token_ids"] += 1
            answer_ids = self._answer_ids(answer, prompt_ids, given_ids)
            # 3. Continue the previous row if the prompt begins with its tokens, or begin another
            # one. An answer with given tokens has a row of its own, since as history it has the
            # tokens of its text.
            has_own_row = has_given_ids or given_ids is not None
            if has_own_row or not rows or prompt_ids[: len(rows[-1].ids)] != rows[-1].ids:
                rows.append(Row())
            row = rows[-1]
            start = len(row.ids)
            # 4. Append the new part of the prompt, then the answer.
            is_chosen = self._trained_characters(
                messages[:index], answer.prompt, template, first, is_new_row=not start
            )
            mask = [False] * len(prompt_ids)
            if any(is_chosen):
                mask = self._text.overlaps(answer.prompt, is_chosen)
            row.ids += prompt_ids[start:] + answer_ids
            row.supervised += mask[start:] + [self._is_trained(message)] * len(answer_ids)
            row.answers[index] = len(row.ids)
            has_given_ids, first = given_ids is not None, index + 1
        return rows

    def _answer_ids(
        self, answer: RenderedAnswer, prompt_ids: list[int], given_ids: Sequence[int] | None
    ) -> list[int]:
        """Return the token ids of an answer, its end included.

        These are the given ones, if there are any. Else they are the tokens that follow
        `prompt_ids` in the whole text. If a token spans the border between prompt and answer, the
        answer is tokenized alone.
        """
        if given_ids is not None:
            # White space before the end token would be part of the given tokens.
            return [*given_ids, *self._text.ids(answer.end.lstrip())]
        whole_ids = self._text.ids(answer.prompt + answer.text)
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            return whole_ids[len(prompt_ids) :]
        return self.tokenize_continuation(answer.text)

    def _decode_to(self, ids: Sequence[int], message: Message, answer: RenderedAnswer) -> bool:
        """Return whether the `ids` given for an answer are its text in this tokenizer. They are not
        if a model with another tokenizer generated them, or if the answer was edited.
        """
        # self-distillation stores the text of an answer without most special tokens
        special = re.compile("|".join(map(re.escape, self.tokenizer.all_special_tokens)) or "(?!)")

        def plain(text: str) -> str:
            return special.sub("", text).strip()

        decoded = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        stored = self._text.unmark(message.content)
        rendered = self._text.unmark(answer.text.removesuffix(answer.end))
        return plain(decoded) in (plain(stored), plain(rendered))

    def _trained_characters(
        self,
        history: Sequence[Message],
        prompt: str,
        template: ChatTemplate,
        first: int,
        is_new_row: bool,
    ) -> list[bool]:
        """Return for each character of a prompt whether it is trained. Messages before `first` are
        trained in an earlier row, or earlier in this row.

        If only answers are trained, no character is. If the user's turns are trained as well:

            <s><|user|>Hi</s><|assistant|>
                       11
        """
        # text that the template writes between the contents is trained only with `train_on_inputs`
        default = self.train_on_inputs
        chosen = [default] * len(prompt)
        if default and first and is_new_row:
            start, _ = template.content_spans(history, prompt, [first])[0]
            chosen[:start] = [False] * start
        exceptions = [
            index
            for index in range(first, len(history))
            if self._is_trained(history[index]) != default
        ]
        for start, end in template.content_spans(history, prompt, exceptions):
            chosen[start:end] = [not default] * (end - start)
        return chosen

    def _is_trained(self, message: Message) -> bool:
        """Return whether a message is trained: `is_target` decides if it is set, else its role."""
        if message.is_target is not None:
            return message.is_target
        return self.train_on_inputs or message.role in self.roles

    def prompt(self, messages: Sequence[Message], variables: str = "") -> list[int]:
        """Return the token ids of a chat followed by the generation prompt. `variables` as in
        `Conversation`.

        Raises DataError if the template rejects the chat, or does not read its tools.
        """
        return self._text.ids(self._prompt_text(messages, variables))

    def _prompt_text(self, messages: Sequence[Message], variables: str) -> str:
        """Return the text of a prompt, with marks; raises as `prompt`."""
        template = self._template_of(variables)
        if TOOLS in template.kwargs and TOOLS not in template.variables:
            raise DataError(
                "the chat template does not render tools, so the model would not see them"
            )
        try:
            fitted = fit_to_template(self._with_marks(messages), template, Counter())
            return template.render(fitted, prompt=True)
        except ChatTemplateError as error:
            raise DataError(str(error)) from None

    def _template_of(self, variables: str) -> ChatTemplate:
        """Return the template with the variables of a chat, which are JSON text and replace those
        in `kwargs`.
        """
        if not variables:
            return self.template
        kwargs = {**self.template.kwargs, **json.loads(variables)}
        return replace(self.template, kwargs=kwargs)

    def tokenize_continuation(self, text: str) -> list[int]:
        """Tokenize text that follows other text."""
        return self._text.ids(text, follows=True)

    def opened_reasoning(self, messages: Sequence[Message], variables: str = "") -> str:
        """Return the reasoning tag that the prompt of a chat ends with, or ''; see
        `ChatTemplate.opened_reasoning`.
        """
        return self.template.opened_reasoning(self._prompt_text(messages, variables))

    def end_token_id(self) -> int | None:
        """Return the token that ends an answer, as the template writes it; see
        `rendered_answers.end_token`.
        """
        token = end_token(self.template)
        if token is None:
            return None
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def fingerprint(self) -> str:
        """Return a digest of everything that `encode` depends on."""
        settings = {
            "template": self.template.source,
            "special_tokens": dict(self.template.special_tokens),
            "template_kwargs": dict(self.template.kwargs),
            "reasoning_tags": self.template.reasoning_tags,
            "roles": sorted(self.roles),
            "everything": self.train_on_inputs,
            "stops": sorted(self.template.stops),
            "max_tool_rows": self.max_tool_rows,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.tokenizer.backend_tokenizer.to_str().encode())
        return digest.hexdigest()
