"""Requests for a server, and what its responses say: text, reasoning, finish reason, length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_train.data.conversation import ReasoningTags, join_reasoning
from medusa_train.data.turns import reasoning_part
from medusa_train.hide_secrets import excerpt
from medusa_train.selfdistill.replay import Answer, AnswerFinishReason, Request
from medusa_train.servers.rejections import RequestRejected

#: Finish reasons of servers. `eos_token` and `stop_sequence` are TGI's.
_REASONS: dict[str, AnswerFinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "content_filter": "refused",
    "tool_calls": "refused",
    "function_call": "refused",
}


@dataclass(frozen=True)
class ServerSampling:
    """Parameters of every request; the last two, which not every server supports, are sent if set."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def body(self, model: str, request: Request) -> dict[str, Any]:
        """Return the request body. The seed is reduced to 31 bits, which every server accepts."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [message.as_dict() for message in request.messages],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_new_tokens,
            "seed": request.seed % 2**31,
        }
        if self.top_k is not None:
            body["top_k"] = self.top_k
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


def parse_answer(
    content: Mapping[str, Any], reasoning_tags: ReasoningTags, max_new_tokens: int
) -> Answer:
    """Convert a chat completion; without `usage` the token counts are 0.

    An answer that was cut before `max_new_tokens` reached the end of the context. One that is said
    to be whole was possibly cut if it has as many tokens as were allowed, or ends within its
    reasoning.

    Raises:
        RequestRejected: the finish reason is unknown, so nobody can say whether it is whole.
    """
    choice = content["choices"][0]
    message = choice["message"]
    # 1. its text; lone surrogates, which JSON can escape and UTF-8 cannot encode, are replaced
    content_part = str(message.get("content") or "")
    reasoning = reasoning_part(message)
    text = join_reasoning(reasoning, content_part, reasoning_tags)
    text = text.encode("utf-8", "replace").decode("utf-8")
    # 2. why it ends
    length = token_count(content, "completion_tokens")
    reason = _reason(choice.get("finish_reason"))
    if reason == "length" and 0 < length < max_new_tokens:
        reason = "context"
    # 3. whether it is whole
    if reason == "stop":
        allowed = content.get("max_tokens", max_new_tokens)
        opening, closing = reasoning_tags
        is_within_reasoning = text.lstrip().startswith(opening) and closing not in text
        if length >= allowed or is_within_reasoning:
            reason = "possibly cut"
        elif reasoning and not text:
            reason = "only reasoning"
    return Answer(text, reason, token_count(content, "prompt_tokens"), length)


def token_count(content: Mapping[str, Any], name: str) -> int:
    """Return a count of `usage`; 0 if the server names none."""
    usage = content.get("usage")
    if not isinstance(usage, Mapping):
        return 0
    count = usage.get(name)
    if not isinstance(count, int):
        return 0
    return count


def _reason(finish: object) -> AnswerFinishReason:
    """Map the finish reasons of OpenAI, vLLM, SGLang, llama.cpp and TGI.

    Raises:
        RequestRejected: an unknown one.
    """
    if finish is None or finish == "":
        return "possibly cut"
    if isinstance(finish, str) and finish in _REASONS:
        return _REASONS[finish]
    known = ", ".join(_REASONS)
    raise RequestRejected(
        f"unknown finish_reason {excerpt(str(finish), 60)!r} (known: {known})", failed=True
    )
