"""Requests that a server rejects, and what it says about the length of the context."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many"
    r" tokens|max_model_len|maximum.{0,20}length|must have less",
    re.IGNORECASE,
)
#: The context length: vLLM, SGLang, OpenAI, llama.cpp; then TGI, whose other limit is one of the
# prompt alone.
_CONTEXT = re.compile(
    r"(?:context (?:length|window|size)|maximum (?:model|sequence) length|maximum allowed (?:input"
    r" )?length"
    r"|max_model_len|\"n_ctx\"|tokens \+ `?max_new_tokens`? must be <=)[^\d.;]{0,25}(\d+)",
    re.IGNORECASE,
)
#: The length of the prompt, in the same servers' messages.
_PROMPT = re.compile(
    r"(\d+) in (?:the messages|(?:your|the) prompt)"
    r"|(?:request has|contains) (\d+) input tokens"
    r"|(\d+) tokens from the input"
    r"|(?:input|request|prompt) \((?:length )?(\d+)(?: tokens)?\)"
    r"|Input length \(?(\d+)"
    r"|messages resulted in (\d+) tokens"
    r"|Given: (\d+)"
    r"|\"n_prompt_tokens\"\s*:\s*(\d+)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ContextLimit:
    """The limits in tokens that a rejection names; None for those that it does not name."""

    context: int | None = None  # of prompt and answer together
    prompt: int | None = None  # its exact length; a lower bound (vLLM: "at least") does not count


def parse_rejection(text: str) -> ContextLimit | None:
    """Return the limits that a rejection's text names; None if it has another reason than the
    context.
    """
    context = _number(_CONTEXT, text)
    if context is None and not _TOO_LONG.search(text):
        return None
    return ContextLimit(context, _number(_PROMPT, text))


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    """Return the number that `pattern` captures in its first match; only one of its groups matches."""
    match = pattern.search(text)
    if match is None:
        return None
    captured = [group for group in match.groups() if group is not None]
    return int(captured[0])


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed. See `parse_rejection` for
    `limit`.

    `failed`: it did not reject it, but all attempts failed; another run may get an answer.
    `text`: the server's response.
    """

    def __init__(
        self,
        message: str,
        limit: ContextLimit | None = None,
        *,
        failed: bool = False,
        text: str = "",
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.failed = failed
        self._text = text

    def names(self, parameter: str) -> bool:
        """Return whether the response names a parameter of the request, other than as a key of a
        request that it repeats.
        """
        name = rf"\b{re.escape(parameter)}\b(?!\\?[\"']\s*:)"
        return re.search(name, self._text, re.IGNORECASE) is not None

    @property
    def too_long(self) -> bool:
        """Whether the chat does not fit into the model's context."""
        return self.limit is not None
