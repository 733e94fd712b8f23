"""Requests -> prompts, generated tokens -> answers, by the chat template, for both roles. Knows no model."""

from __future__ import annotations

import re
from typing import Any

from medusa_train.data.chat_template import ChatTemplateError
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import ConfigError, DataError
from medusa_train.inference.generate import FinishReason
from medusa_train.selfdistill.engines import Answer, AnswerFinishReason, Request

_REASONS: dict[FinishReason, AnswerFinishReason] = {"eos": "stop", "length": "length", "context": "context"}
_MARK = "\ue000words\ue001"  # characters for private use: no template holds them


class ChatPrompting:
    """Lets a model speak as the assistant or as the user.

    The assistant's turn begins with the template's generation prompt and ends with eos. The user's (in self-talk)
    begins with the template's header of a user's turn; it ends with what the template puts behind the user's words,
    which is eos in many templates and the assistant's header in others (Vicuna's), so special tokens are looked at
    before they are taken out of the text (SPEC 2).

    Args:
        tokenizer: the model's. template: by name; None for the tokenizer's own.

    Raises:
        ConfigError: no template of that name.
        DataError: the tokenizer has no chat template, and none was named.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer, template)

    def text(self, request: Request) -> str:
        """The chat as the model reads it, up to the header of the turn that is wanted. Raises as `prompt` does."""
        if request.speaker == "assistant":
            return self._render(request.messages)
        # A space that ends the header belongs to the first word's token.
        return self._around_user(request)[0].rstrip(" ")

    def prompt(self, request: Request) -> list[int]:
        """The same as token ids.

        Raises:
            DataError: the template does not take this chat.
            ConfigError: self-talk by a template that does not write out the user's words.
        """
        if request.speaker == "assistant":
            return self._encoder.prompt(request.messages)
        return list(self.tokenizer(self.text(request), add_special_tokens=False, verbose=False)["input_ids"])

    def answer(self, request: Request, prompt_tokens: int, tokens: list[int], finish: FinishReason) -> Answer:
        """What was said, from the generated `tokens`, a closing eos included."""
        kept = tokens[:-1] if finish == "eos" else tokens
        if request.speaker == "assistant":
            text = self._decode(kept, skip_special_tokens=True)
            return Answer(text, _REASONS[finish], prompt_tokens, len(tokens))
        said, ended = self._users_words(request, self._decode(kept, skip_special_tokens=False))
        return Answer(said, "stop" if ended else _REASONS[finish], prompt_tokens, len(tokens))

    def _decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return str(
            self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def _users_words(self, request: Request, text: str) -> tuple[str, bool]:
        """The user's words at the beginning of `text`, and whether they end within it."""
        behind = self._around_user(request)[1].strip().split("\n")[0].strip()
        ends = [mark for mark in (behind, *self.tokenizer.all_special_tokens) if mark]
        said, *rest = re.split("|".join(map(re.escape, ends)), text, maxsplit=1)
        return said.strip(), bool(rest)

    def _around_user(self, request: Request) -> tuple[str, str]:
        """The chat before the words of a user's turn that follows it, and what the template puts behind them."""
        outline = self._render((*request.messages, Message("user", _MARK)))
        before, mark, behind = outline.rpartition(_MARK)
        if not mark:
            raise ConfigError("the chat template hides the user's words; self-talk needs one that writes them out")
        return before, behind

    def _render(self, messages: tuple[Message, ...]) -> str:
        try:
            return self._encoder.template.render(messages, prompt=True)
        except ChatTemplateError as error:
            raise DataError(str(error)) from None
