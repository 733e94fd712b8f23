"""Tokenization of chats into training rows with loss masks."""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

from medusa_train.data.builtin_templates import TEMPLATES, get_template
from medusa_train.data.chat_template import ChatTemplate, ChatTemplateError, RenderedAnswer, Span
from medusa_train.data.conversation import (
    REASONING_TAGS,
    Conversation,
    Message,
    ReasoningTags,
    Role,
)
from medusa_train.errors import DataError

_MAX_TAILS = 64
#: Stands before a control token in the content of a message, which is plain text there, and before
#: the same character in a content. A private use character, which templates do not contain.
_PLAIN = "\ue002"
ASSISTANT: tuple[Role, ...] = ("assistant",)
#: Why an answer has a row of its own and does not go on with the row before it, see
#: `ChatEncoder.encode`: the template changes earlier turns, the data give tokens of an answer, or
#: the tokenizer splits a prompt otherwise where an answer follows.
SplitReason = Literal["template", "token_ids", "tokenizer"]


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Where an answer stands in a row: the tokens [start, end).

    Attributes:
        message: index of the answer among the messages of the chat.
    """

    message: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Tokenized messages of a chat that end with an answer.

    Attributes:
        ids: token ids [T].
        supervised: the loss mask [T].
        answers: those that are not history in this row, in order.
        split: why they are not in the row before; None in the first row of a chat.
        ignored_token_ids: in the first row of a chat, how many of its answers have tokens in the
            data that this tokenizer reads as another text, so that their text was tokenized.
    """

    ids: list[int]
    supervised: list[bool]
    answers: list[AnswerSpan]
    split: SplitReason | None = None
    ignored_token_ids: int = 0

    def trimmed(self, max_length: int | None = None) -> EncodedRow | None:
        """Drop the tokens after the last supervised one, which no loss depends on.

        With `max_length`, keep as many complete answers as fit; None if the first one does not.
        """
        for count in range(len(self.answers), 0, -1):
            end = min(self.answers[count - 1].end, len(self.ids))
            while end and not self.supervised[end - 1]:
                end -= 1
            if max_length is None or end <= max_length:
                return replace(
                    self,
                    ids=self.ids[:end],
                    supervised=self.supervised[:end],
                    answers=self.answers[:count],
                )
        return None


class ChatEncoder:
    """Tokenizes chats with a chat template, and determines the loss mask.

    Training rows hold what decoding sees: the tokens of a rendered prompt, as `prompt` returns
    them, then the tokens of the answer. It is picklable, and `encode` depends on its settings and
    the chat only.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: a name of `TEMPLATES`, a Jinja file, or None for the tokenizer's own template.
        template_kwargs: further variables of the template (`chat_template_kwargs`).
        roles: whose words are supervised. The assistant's include the token that ends an answer.
        train_on_inputs: supervise every token, whoever wrote it. A message's own switch, see
            `Message.is_target`, decides before both.
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
        added = tokenizer.get_added_vocab()
        control = _control_tokens(tokenizer, reasoning_tags)
        self._to_mark = re.compile(f"{control}|{_PLAIN}")
        self._marked = re.compile(f"{_PLAIN}({control}|{_PLAIN})")
        # tokens of the last headers of prompts, for `_is_prompt`
        self._tails: dict[str, list[int]] = {}
        self._added_tokens = {number: token for token, number in added.items()}
        self.template = ChatTemplate(
            _template_source(tokenizer, template),
            dict(tokenizer.special_tokens_map),
            frozenset(added),
            dict(template_kwargs or {}),
            (reasoning_tags[0], reasoning_tags[1]),
        )

    def with_settings(self, *, template: str | None = None, **settings: Any) -> ChatEncoder:
        """Return an encoder with the same tokenizer, other `settings`, and another template unless
        it is None.
        """
        name = template if template is not None else self.template_name
        return ChatEncoder(self.tokenizer, name, self.template.kwargs, **settings)

    def encode(self, conversation: Conversation) -> list[EncodedRow]:
        """Tokenize a chat into rows that end with an answer. Special tokens come from the template
        only: in contents their text is tokenized as any other.

        Answers share a row where the prompt of each begins with the tokens of the previous prompt
        and answer. There are several rows if the template changes earlier turns, the tokenizer
        merges characters of a prompt and its answer, or an answer was generated as other tokens
        than those of its text. Each answer is supervised in one row only, where it is not history,
        and each other message (see `roles`) in the first row that has it. An answer that reached
        the length limit has no end token to learn.
        """
        messages = self._with_plain_contents(conversation.messages)
        template = self.template
        if conversation.variables:
            template = template.with_variables(json.loads(conversation.variables))
        rows: list[EncodedRow] = []
        try:
            answers, ignored = self._with_usable_tokens(template.answers(messages), messages)
            first = 0
            before: RenderedAnswer | None = None
            for group in _with_common_prefix(answers):
                new_rows = self._encode_rows(group, messages, first, template)
                if before is not None:
                    new_rows[0] = replace(new_rows[0], split=_split_reason(group[0], before))
                rows += new_rows
                before = group[-1]
                first = before.index + 1
        except ChatTemplateError as error:
            raise DataError(f"{conversation.source or conversation.id}: {error}") from None
        if ignored:
            rows[0] = replace(rows[0], ignored_token_ids=ignored)
        return rows

    def fingerprint(self) -> str:
        """Return a digest of everything that `encode` depends on."""
        settings = {
            "template": self.template.source,
            "special_tokens": dict(self.template.special_tokens),
            "template_kwargs": dict(self.template.kwargs),
            "reasoning_tags": self.template.reasoning_tags,
            "roles": sorted(self.roles),
            "everything": self.train_on_inputs,
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        digest.update(self.tokenizer.backend_tokenizer.to_str().encode())
        return digest.hexdigest()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat followed by the generation prompt."""
        plain = self._with_plain_contents(messages)
        try:
            return self._tokenize(self.template.render(plain, prompt=True))[0]
        except ChatTemplateError as error:
            raise DataError(str(error)) from None

    def opened_reasoning(self, messages: Sequence[Message]) -> str:
        """Return the reasoning tag that the prompt of a chat ends with, or ''; see
        `ChatTemplate.opened_reasoning`.
        """
        return self.template.opened_reasoning(self.template.render(messages, prompt=True))

    def end_token_id(self) -> int | None:
        """Return the token that ends an answer, as the template writes it; see
        `ChatTemplate.end_token`.
        """
        token = self.template.end_token()
        if token is None:
            return None
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def _encode_rows(
        self,
        answers: list[RenderedAnswer],
        messages: Sequence[Message],
        first: int,
        template: ChatTemplate,
    ) -> list[EncodedRow]:
        """Tokenize answers whose texts are prefixes of each other; messages before `first` are
        trained elsewhere.
        """
        # 1. The tokens of all of the text, and where each answer is among them.
        last = answers[-1]
        ids, offsets = self._tokenize(last.whole)
        spans = self._answer_spans(answers, ids, offsets)
        # 2. Where a prompt has other tokens than here when it stands alone, as in decoding, every
        # answer gets a row of its own.
        if spans is None and len(answers) > 1:
            return self._rows_apart(answers, messages, first, template)
        # 3. Prompt and answer are tokenized apart where the tokens of the answer are known, and
        # where the text as a whole has another prompt or no border between the two.
        generated = self._generated_tokens(last)
        if generated is None and spans is None:
            generated = self.tokenize_continuation(last.text)
        if generated is not None:
            ids, offsets = self._tokenize(last.prompt)
            prompt_length = len(ids)
            ids = ids + generated
            spans = [AnswerSpan(last.index, prompt_length, len(ids))]
        assert spans is not None  # one of the two is known
        # 4. The loss mask: other messages of the prompt, then the answers.
        supervised = [False] * len(ids)
        prompt_length = spans[-1].start
        others = self._spans_of_others(last, messages, first, template)
        if others:
            supervised[:prompt_length] = _overlaps(offsets[:prompt_length], others)
        for span in spans:
            is_trained = self._is_trained(messages[span.message])
            supervised[span.start : span.end] = [is_trained] * (span.end - span.start)
        return [EncodedRow(ids, supervised, spans)]

    def _rows_apart(
        self,
        answers: list[RenderedAnswer],
        messages: Sequence[Message],
        first: int,
        template: ChatTemplate,
    ) -> list[EncodedRow]:
        """Tokenize each answer into a row of its own; a message is trained in the first that has it."""
        rows: list[EncodedRow] = []
        next_message = first
        for answer in answers:
            (row,) = self._encode_rows([answer], messages, next_message, template)
            if rows:
                row = replace(row, split="tokenizer")
            rows.append(row)
            next_message = answer.index + 1
        return rows

    def _answer_spans(
        self, answers: Sequence[RenderedAnswer], ids: list[int], offsets: Sequence[Span]
    ) -> list[AnswerSpan] | None:
        """Return where answers are among the tokens of the last one's whole text.

        None if a token covers the start or the end of an answer, or if a prompt has other tokens
        when it stands alone.
        """
        text = answers[-1].whole
        spans = []
        for answer in answers:
            border = len(answer.prompt)
            start = _tokens_before(border, offsets, text, is_end=False)
            end = _tokens_before(len(answer.whole), offsets, text, is_end=True)
            if start is None or end is None:
                return None
            if not self._is_prompt(start, border, text, ids, offsets):
                return None
            spans.append(AnswerSpan(answer.index, start, end))
        return spans

    def _is_prompt(
        self, count: int, border: int, text: str, ids: list[int], offsets: Sequence[Span]
    ) -> bool:
        """Return whether the first `count` tokens of `text` are those of its first `border`
        characters alone.

        Some tokenizers split white space by what follows it (GPT-2's). Added tokens are never
        merged with others, so the text from the last one on suffices.
        """
        if not text[border - 1].isspace():
            return True

        def is_added(token: int) -> bool:
            # an unknown token has the text that it stands for
            start, end = offsets[token]
            return self._added_tokens.get(ids[token]) == text[start:end].strip()

        start = next(filter(is_added, range(count - 1, 0, -1)), 0)
        tail = text[offsets[start][0] : border]
        if tail not in self._tails:
            if len(self._tails) == _MAX_TAILS:
                self._tails.clear()
            self._tails[tail] = self._tokenize(tail)[0]
        return self._tails[tail] == ids[start:count]

    def _is_trained(self, message: Message) -> bool:
        """Return whether a message is trained: by its own switch, else by its role."""
        if message.is_target is not None:
            return message.is_target
        return self.train_on_inputs or message.role in self.roles

    def _spans_of_others(
        self, last: RenderedAnswer, messages: Sequence[Message], first: int, template: ChatTemplate
    ) -> list[Span]:
        """Return the supervised spans in the prompt of the last answer, apart from the answers in
        it.
        """
        history = messages[: last.index]
        trained = []
        untrained = []
        for index in range(first, len(history)):
            if history[index].role == "assistant":
                continue
            if self._is_trained(history[index]):
                trained.append(index)
            else:
                untrained.append(index)

        def spans_of(indices: Sequence[int]) -> list[Span]:
            if not indices:
                return []
            roles = {history[index].role for index in indices}
            spans = template.content_spans(history, roles)
            return [spans[index] for index in indices]

        if not self.train_on_inputs:
            return spans_of(trained)
        # what the template writes between the contents is trained, too
        start = 0
        if first:
            start = template.content_spans(history, ["user"])[first][0]
        return _between(start, spans_of(untrained), len(last.prompt))

    def _with_plain_contents(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Mark control tokens in contents, such as `<|im_end|>` in a text on chat templates: there
        they are plain text.
        """
        if not any(self._to_mark.search(message.content) for message in messages):
            return messages
        return [
            replace(message, content=self._to_mark.sub(_PLAIN + r"\g<0>", message.content))
            for message in messages
        ]

    def _without_marks(self, text: str) -> str:
        """Return a text as it was before `_with_plain_contents`."""
        return self._marked.sub(r"\1", text)

    def _tokenize(self, text: str, follows: bool = False) -> tuple[list[int], list[Span]]:
        """Return tokens, and for each its characters [start, end) in `text`.

        Args:
            follows: other text comes before, see `_tokenize_piece`.
        """
        if _PLAIN not in text:
            return self._tokenize_piece(text, follows=follows)
        ids: list[int] = []
        offsets: list[Span] = []
        for piece in self._pieces(text):
            piece_follows = follows or bool(ids)
            new_ids, spans = self._tokenize_piece(piece.text, piece.is_plain, piece_follows)
            ids += new_ids
            offsets += [piece.span_in_marked_text(start, end) for start, end in spans]
        return ids, offsets

    def _pieces(self, text: str) -> Iterator[_Piece]:
        """Yield the pieces of a text with marks that are tokenized apart."""
        piece = _Piece()
        position = 0
        for found in self._marked.finditer(text):
            piece.append(text, position, found.start())
            position = found.end()
            if found[1] == _PLAIN:  # this character itself stands in a content
                piece.append(text, *found.span(1))
                continue
            if piece.text:
                yield piece
            token = _Piece(is_plain=True)
            token.append(text, *found.span(1))
            yield token
            piece = _Piece()
        piece.append(text, position, len(text))
        if piece.text:
            yield piece

    def _tokenize_piece(
        self, text: str, is_plain: bool = False, follows: bool = False
    ) -> tuple[list[int], list[Span]]:
        """Tokenize a text without marks.

        Args:
            is_plain: control tokens are split into the tokens of their text.
            follows: other text comes before. It is tokenized after a line break then, where these
                do not merge: some tokenizers put a space before the first word of a text.
        """
        # 1. The text, or a line break and the text.
        whole = text
        if follows:
            whole = "\n" + text
        options = {}
        if is_plain:
            options["split_special_tokens"] = True
        encoding = self.tokenizer(
            whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False, **options
        )
        ids = list(encoding["input_ids"])
        offsets = encoding["offset_mapping"]
        if not follows:
            return ids, offsets
        # 2. Without the tokens of the line break, where it has not merged with the text.
        line_break, _ = self._tokenize_piece("\n")
        count = len(line_break)
        if ids[:count] != line_break:
            return self._tokenize_piece(text, is_plain)
        spans = [(max(start - 1, 0), end - 1) for start, end in offsets[count:]]
        return ids[count:], spans

    def _with_usable_tokens(
        self, answers: Iterable[RenderedAnswer], messages: Sequence[Message]
    ) -> tuple[list[RenderedAnswer], int]:
        """Take the tokens from answers in which this tokenizer reads another text: a model with
        another one generated them, or the answer was edited. Return how many these are, too.
        """
        usable: list[RenderedAnswer] = []
        ignored = 0
        for answer in answers:
            if answer.token_ids is not None and not self._reads(answer, messages):
                answer = replace(answer, token_ids=None)
                ignored += 1
            usable.append(answer)
        return usable, ignored

    def _reads(self, answer: RenderedAnswer, messages: Sequence[Message]) -> bool:
        """Return whether this tokenizer reads the text of an answer in the tokens given for it."""
        # self-distillation stores the text of an answer without most special tokens
        special = re.compile("|".join(map(re.escape, self.tokenizer.all_special_tokens)) or "(?!)")

        def plain(text: str) -> str:
            return special.sub("", text).strip()

        decoded = self.tokenizer.decode(
            answer.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        stored = self._without_marks(messages[answer.index].content)
        rendered = self._without_marks(answer.text.removesuffix(answer.end))
        return plain(decoded) in (plain(stored), plain(rendered))

    def _generated_tokens(self, answer: RenderedAnswer) -> list[int] | None:
        """Return the tokens that the answer was generated as, with its end; None if unknown."""
        if answer.token_ids is None:
            return None
        # a space would be one of the ids
        end_ids, _ = self._tokenize(answer.end.lstrip())
        return [*answer.token_ids, *end_ids]

    def tokenize_continuation(self, text: str) -> list[int]:
        """Tokenize text that follows other text."""
        ids, _ = self._tokenize(text, follows=True)
        return ids


@dataclass
class _Piece:
    """A piece of a text with marks, without them.

    Attributes:
        text: its characters.
        places: the position of each in the text with marks.
        is_plain: whether it is a control token that stands in a content.
    """

    text: str = ""
    places: list[int] = field(default_factory=list)
    is_plain: bool = False

    def append(self, marked: str, start: int, end: int) -> None:
        """Append the characters [start, end) of the text with marks, among which is no mark."""
        self.text += marked[start:end]
        self.places += range(start, end)

    def span_in_marked_text(self, start: int, end: int) -> Span:
        """Return where the characters [start, end) of this piece are in the text with marks."""
        if start == end:  # white space, in many tokenizers: the empty span behind it
            place = self.places[0]
            if start:
                place = self.places[start - 1] + 1
            return place, place
        return self.places[start], self.places[end - 1] + 1


def _control_tokens(tokenizer: Any, reasoning_tags: ReasoningTags) -> str:
    """Return a pattern of the tokenizer's special tokens; the tags of the reasoning, which are part
    of answers, are none.
    """
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    tokens |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    tokens -= set(reasoning_tags)
    names = [token for token in tokens if token.strip()]  # white space is text, too
    names.sort(key=len, reverse=True)
    return "|".join(map(re.escape, names)) or "(?!)"


def _template_source(tokenizer: Any, name: str | None) -> str:
    if name is None:
        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template; set chat_template to one of"
                f" {', '.join(TEMPLATES)}"
            )
        try:
            return str(tokenizer.get_chat_template())
        except ValueError:  # several templates by name, none of which is the default
            names = ", ".join(sorted(tokenizer.chat_template))
            raise DataError(
                f"the tokenizer has chat templates of several names ({names}) and none is the"
                " default; save the one to use as a .jinja file and set chat_template to it"
            ) from None
    template = get_template(name)
    if template.answer_end == "":
        return template.source
    end = template.answer_end or tokenizer.eos_token
    if end is None:
        raise DataError(
            f"chat template '{name}' ends answers with the EOS token, which the tokenizer does not"
            " have"
        )
    # Split into several tokens it would be trained as plain text, at which the backbone does not
    # stop.
    if len(tokenizer(end, add_special_tokens=False)["input_ids"]) != 1:
        raise DataError(
            f"chat template '{name}' ends answers with {end}, which is not a single token of this"
            " tokenizer; use the template that the backbone was trained with"
        )
    return template.source


def _with_common_prefix(answers: Sequence[RenderedAnswer]) -> list[list[RenderedAnswer]]:
    """Group consecutive answers of which each prompt begins with the previous prompt and answer."""
    groups: list[list[RenderedAnswer]] = []
    for answer in answers:
        if groups and _split_reason(answer, groups[-1][-1]) is None:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def _split_reason(answer: RenderedAnswer, before: RenderedAnswer) -> SplitReason | None:
    """Return why the prompt of `answer` does not begin with prompt and answer of `before`; None if
    it does.
    """
    if not answer.prompt.startswith(before.whole):
        return "template"
    # as history, an answer has the tokens of its text
    if before.token_ids is not None or answer.token_ids is not None:
        return "token_ids"
    return None


def _tokens_before(border: int, offsets: Sequence[Span], text: str, *, is_end: bool) -> int | None:
    """Return the number of tokens before a character position, or None if a token covers it.

    The last token of an answer (`is_end`) may include white space after it, as Phi-3's end token
    does. Many tokenizers exclude spaces from offsets: characters between two tokens belong to the
    second.
    """
    # 1. Tokens that end at the border or before it.
    count = bisect_right(offsets, border, key=itemgetter(1))
    if count == len(offsets):
        return count
    # 2. Where the next token starts, with the spaces before it.
    start, end = offsets[count]
    if count == 0:
        start = 0
    else:
        start = min(start, offsets[count - 1][1])
    # 3. Whether it covers the border.
    if start >= border:
        return count
    if is_end and text[border:end].isspace():
        return count + 1
    return None


def _between(start: int, omitted: Sequence[Span], end: int) -> list[Span]:
    """Return what `omitted` spans (sorted, disjoint) leave of the characters [start, end)."""
    left = []
    for omitted_start, omitted_end in omitted:
        left.append((start, omitted_start))
        start = omitted_end
    left.append((start, end))
    return left


def _overlaps(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token's characters [start, end) whether they overlap any of `spans` (sorted,
    disjoint).

    Many tokenizers exclude spaces from offsets: a token of one space has the empty span after it.
    """
    inside = []
    current = 0  # the first span that may still overlap
    for start, end in offsets:
        first = start
        if start >= end:
            first = end - 1
        while current < len(spans) and spans[current][1] <= first:
            current += 1
        inside.append(current < len(spans) and spans[current][0] < end)
    return inside
