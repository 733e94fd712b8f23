"""Build prompts for either speaker with the chat template, and parse generated tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from medusa_train.data.chat_template import ChatTemplateError
from medusa_train.data.conversation import REASONING_TAGS, Conversation, Message, ReasoningTags
from medusa_train.data.tokenize import ChatEncoder, Row
from medusa_train.errors import ConfigError, DataError
from medusa_train.inference.detokenize import answer_text
from medusa_train.inference.generate import FinishReason
from medusa_train.selfdistill.replay import AnswerFinishReason, ChatRequest, GeneratedAnswer

_MARK = "\ue000words\ue001"  # private use characters, which no template contains


class ChatPrompting:
    """Builds prompts for an assistant or user message, and parses the generated tokens.

    An assistant message follows the generation prompt and ends with EOS. A user message (self-talk)
    follows the template's user header, and ends with the text that the template writes after a user
    message: EOS in many templates, the assistant header in others (Vicuna). So the generated text
    is cut at this text or at a special token, before special tokens are removed.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        reasoning_tags: ReasoningTags = REASONING_TAGS,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = ChatEncoder(
            tokenizer, template, template_kwargs, reasoning_tags=reasoning_tags
        )

    def prompt(self, request: ChatRequest) -> list[int]:
        """Return the prompt as token ids.

        Raises:
            DataError: the template does not support this chat.
            ConfigError: self-talk, but the template does not render user messages verbatim.
        """
        if request.speaker == "assistant":
            return self.encoder.prompt(request.messages, request.variables)
        # the space at the end of the header belongs to the first word's token
        text = self._around_user(request)[0].rstrip(" ")
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def answer(
        self, request: ChatRequest, prompt_tokens: int, tokens: list[int], finish: FinishReason
    ) -> GeneratedAnswer:
        """Parse the generated `tokens` (a final EOS included) into an answer.

        If the prompt opened the reasoning part, its tag is added to the answer, as if the model had
        written it.
        """
        answer_tokens = tokens[:-1] if finish == "eos" else tokens
        reason: AnswerFinishReason = "stop" if finish == "eos" else finish
        parsed = partial(
            GeneratedAnswer, prompt_tokens=prompt_tokens, completion_tokens=len(tokens)
        )
        # 1. a user message ends at the text that the template writes after it
        if request.speaker == "user":
            written_text = self.tokenizer.decode(answer_tokens, clean_up_tokenization_spaces=False)
            text, has_ended = self._split_user_message(request, written_text)
            return parsed(text, "stop" if has_ended else reason)
        # 2. the text of an answer
        text = answer_text(self.tokenizer, answer_tokens, self.encoder.template.reasoning_tags)
        if not text.strip():
            return parsed(text, reason)
        text = self.encoder.opened_reasoning(request.messages, request.variables) + text
        # 3. its tokens, if training would tokenize the text differently
        message = Message("assistant", text, is_cut=finish != "eos")
        chat = Conversation("", (*request.messages, message), "", request.variables)
        try:
            row = self.encoder.encode(chat)[-1]
        except DataError:
            row = Row()
        if len(request.messages) not in row.answers:
            # training would leave the answer out, since the template renders earlier calls
            # differently
            return parsed(text, "refused")
        trained = row.ids[len(self.prompt(request)) :]
        is_same = answer_tokens in (trained, trained[:-1])  # the last may be the end token
        return parsed(text, reason, token_ids=None if is_same else tuple(answer_tokens))

    def _split_user_message(self, request: ChatRequest, text: str) -> tuple[str, bool]:
        """Return the user message at the start of `text`, and whether `text` contains its end."""
        after = self._around_user(request)[1].strip().split("\n")[0].strip()
        ends = [mark for mark in (after, *self.tokenizer.all_special_tokens) if mark]
        message, *rest = re.split("|".join(map(re.escape, ends)), text, maxsplit=1)
        return message.strip(), bool(rest)

    def _around_user(self, request: ChatRequest) -> tuple[str, str]:
        """Return the text that the template renders before and after the content of the next user
        message.
        """
        messages = (*request.messages, Message("user", _MARK))
        try:
            rendered = self.encoder.template.render(messages, prompt=True)
        except ChatTemplateError as error:
            raise DataError(str(error)) from None
        before, mark, after = rendered.rpartition(_MARK)
        if not mark:
            raise ConfigError(
                "the chat template does not render user messages verbatim, which self-talk needs; "
                "set another chat_template"
            )
        return before, after
