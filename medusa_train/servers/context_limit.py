"""Parse the messages with which servers reject a request that does not fit into the model's context."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many tokens|max_model_len|maximum.{0,20}length", re.IGNORECASE
)
#: The context length: vLLM, SGLang, OpenAI, llama.cpp; then TGI's two limits.
_CONTEXT = re.compile(
    r"(?:context (?:length|window|size)|maximum (?:model|sequence) length|maximum allowed (?:input )?length"
    r"|max_model_len|\"n_ctx\"|tokens \+ `?max_new_tokens`? must be <=|must have less than)[^\d.;]{0,25}(\d+)",
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
#: A limit on the answer alone (OpenAI).
_ANSWER = re.compile(r"at most (\d+) (?:completion|output) tokens", re.IGNORECASE)


@dataclass(frozen=True)
class ContextLimit:
    """The limits that a rejection names; None for those that it does not name.

    Attributes:
        context: maximum number of tokens of prompt and answer together.
        prompt: exact number of tokens of the prompt; a lower bound (vLLM: "at least") does not count.
        answer: maximum number of tokens of an answer of any request.
    """

    context: int | None = None
    prompt: int | None = None
    answer: int | None = None


def parse_rejection(text: str) -> ContextLimit | None:
    """Return the limits that a server's message names; None if the rejection has another reason.

    Covers vLLM, SGLang, text-generation-inference, llama.cpp and OpenAI.

    Args:
        text: the message or the body of the response.
    """
    answer = _number(_ANSWER, text)
    context = _number(_CONTEXT, text)
    if context is None and answer is None and not _TOO_LONG.search(text):
        return None
    return ContextLimit(context, _number(_PROMPT, text), answer)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(next(group for group in match.groups() if group is not None))
