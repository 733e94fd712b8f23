"""Generate answers with OpenAI-compatible servers: build requests, and parse the responses (text,
reasoning, finish reason, length).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from medusa_train.data.conversation import REASONING_TAGS, Message, ReasoningTags, join_reasoning
from medusa_train.data.json_values import RecordError
from medusa_train.data.report import Unread
from medusa_train.data.tool_calls import TOOLS
from medusa_train.data.tool_forms import openai_messages
from medusa_train.data.turns import TurnKeys, parse_turns, reasoning_part
from medusa_train.errors import ServerError
from medusa_train.hide_secrets import excerpt
from medusa_train.selfdistill.replay import (
    AnswerFinishReason,
    ChatRequest,
    GeneratedAnswer,
    RunningChat,
)
from medusa_train.servers.responses import RequestRejected, token_count

if TYPE_CHECKING:
    from medusa_train.servers.client import Servers

GREETING_TOKENS = 16
SHOWN_REASONS = 5  # the summary shows at most this many reasons of refused requests
#: Finish reasons of servers, and what they mean here. `eos_token` and `stop_sequence` are TGI's.
_REASONS: dict[str, AnswerFinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "content_filter": "refused",
    "tool_calls": "stop",
    "function_call": "stop",
}


class ServerAnswers:
    """Generates answers with `model` on `servers`.

    Args:
        parameters: parameters of every request, see `request_parameters`.
        reasoning_tags: tags that mark the reasoning in the text, if a server returns reasoning and
            content separately.
    """

    def __init__(
        self,
        servers: Servers,
        model: str,
        parameters: Mapping[str, Any],
        reasoning_tags: ReasoningTags = REASONING_TAGS,
    ) -> None:
        self.refusals: Counter[str] = Counter()  # number of refused requests by reason
        self.servers = servers
        self._parameters = {"model": model, **parameters}
        self._reasoning_tags = reasoning_tags
        self._has_answered = False
        self._parsed_calls = 0
        self._greeting = asyncio.Lock()

    def generate(
        self, chats: Iterator[RunningChat], on_answer: Callable[[GeneratedAnswer], None]
    ) -> None:
        """Generate all conversations, with as many concurrent requests as the servers take. See
        `AnswerSource`.

        Raises:
            ServerError: the servers refuse all requests or do not answer, or the key or address is
                wrong.
        """

        async def converse(chat: RunningChat) -> None:
            request = next(chat)
            with suppress(StopIteration):  # the conversation is complete
                while True:
                    answer = await self._answer(request)
                    on_answer(answer)
                    request = chat.send(answer)

        async def run() -> None:
            async with self.servers:
                await self.servers.for_each(converse, chats)

        asyncio.run(run())

    def stats(self) -> Mapping[str, str]:
        """Return the number of requests that were sent again, the number of answers whose tool
        calls the server parsed, and the number of refused requests by reason.
        """
        counts = {
            "requests repeated": self.servers.retries,
            "answers whose calls the server parsed": self._parsed_calls,
        }
        stats = {name: f"{count:,}" for name, count in counts.items() if count}
        for reason, count in self.refusals.most_common(SHOWN_REASONS):
            stats[reason] = f"{count:,}"
        return stats

    async def _answer(self, request: ChatRequest) -> GeneratedAnswer:
        """Return the answer to a request. It has no text if the request was refused, too long or
        failed.
        """
        try:
            # tool calls may contain special tokens, which the server would remove from the text
            raw = {"skip_special_tokens": False, "return_token_ids": True}
            changes = raw if request.variables else {}
            return await self._ask(request.messages, request.seed, request.variables, **changes)
        except RequestRejected as rejected:
            if rejected.too_long:
                return GeneratedAnswer("", "context", 0, 0)
            self.refusals[str(rejected)] += 1
            await self._greet()
            return GeneratedAnswer("", "failed" if rejected.failed else "refused", 0, 0)

    async def _greet(self) -> None:
        """Send a greeting, unless a server has answered before; raise ServerError if it is refused
        too.
        """
        async with self._greeting:
            if self._has_answered:
                return
            length = min(GREETING_TOKENS, self._parameters["max_tokens"])
            try:
                await self._ask([Message("user", "Hello")], 0, max_tokens=length)
            except RequestRejected as rejected:
                count = f"refused {self.refusals.total()} requests and answered none in between"
                raise ServerError(f"{self.servers.name}: {count}; last: {rejected}") from None

    async def _ask(
        self, messages: Sequence[Message], seed: int, variables: str = "", **changes: Any
    ) -> GeneratedAnswer:
        body = {**request_body(self._parameters, messages, seed, variables), **changes}
        response = await self.servers.complete(body)
        answer = parse_answer(response, self._reasoning_tags, body["max_tokens"])
        self._has_answered = True
        self._parsed_calls += bool(answer.parts)
        return answer


def request_parameters(
    *,
    temperature: float,
    max_new_tokens: int,
    top_p: float = 1.0,
    top_k: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the parameters that all requests share. `top_k` and `chat_template_kwargs` are left
    out if they are not set, because not every server supports them.
    """
    parameters = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_new_tokens,
        "top_k": top_k,
        "chat_template_kwargs": dict(chat_template_kwargs or {}) or None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def request_body(
    parameters: Mapping[str, Any], messages: Sequence[Message], seed: int, variables: str = ""
) -> dict[str, Any]:
    """Return the body of a request. The seed is reduced to 31 bits, which every server accepts.

    With `tool_choice: none`, vLLM renders the tools into the prompt and returns tool calls as the
    text that the model generates. It needs no tool-call parser for that.

    Args:
        variables: as in `Conversation`.
    """
    body = {**parameters, "messages": openai_messages(messages), "seed": seed % 2**31}
    values = json.loads(variables) if variables else {}
    tools = values.pop(TOOLS, None)
    if tools:
        body |= {"tools": tools, "tool_choice": "none"}
    if values:
        body["chat_template_kwargs"] = {**parameters.get("chat_template_kwargs", {}), **values}
    return body


def parse_answer(
    response: Mapping[str, Any], reasoning_tags: ReasoningTags, max_new_tokens: int
) -> GeneratedAnswer:
    """Convert a chat completion to an answer. Without `usage` the token counts are 0.

    If the finish reason is "length" before `max_new_tokens`, the context is full. If it is "stop",
    the answer was possibly cut anyway if it has as many tokens as were allowed, or ends within its
    reasoning.

    Tool calls that the server parsed become `parts` of the answer. The token ids are read if the
    server returns them.

    Raises:
        RequestRejected: the finish reason is unknown, so the answer may be incomplete; or its tool
            calls cannot be read.
    """
    choice = response["choices"][0]
    message = choice["message"]
    parts: Mapping[str, Any] = {}
    if message.get("tool_calls"):
        turn = {**message, "role": "assistant"}
        try:
            (parsed,) = parse_turns([turn], TurnKeys(is_prompt=True), Unread())
        except RecordError as error:
            raise RequestRejected(f"its answer cannot be read: {error}") from None
        parts = parsed.parts
    # 1. the text; lone surrogates are replaced, since JSON can escape them, but UTF-8 cannot
    # encode them
    content = str(message.get("content") or "")
    reasoning = "" if parts else reasoning_part(message)
    text = join_reasoning(reasoning, content, reasoning_tags)
    text = text.encode("utf-8", "replace").decode("utf-8")
    # 2. the finish reason, and the token ids
    length = token_count(response, "completion_tokens")
    reason = _finish_reason(choice.get("finish_reason"))
    if reason == "length" and 0 < length < max_new_tokens:
        reason = "context"
    ids = choice.get("token_ids") or ()
    token_ids = tuple(ids[:-1] if reason == "stop" else ids) or None  # without the end token
    # 3. whether the answer is complete
    if reason == "stop":
        allowed = response.get("max_tokens", max_new_tokens)
        opening, closing = reasoning_tags
        is_within_reasoning = text.lstrip().startswith(opening) and closing not in text
        if length >= allowed or is_within_reasoning:
            reason = "possibly cut"
        elif reasoning and not text:
            reason = "only reasoning"
    prompt_tokens = token_count(response, "prompt_tokens")
    return GeneratedAnswer(text, reason, prompt_tokens, length, token_ids, parts)


def _finish_reason(finish: object) -> AnswerFinishReason:
    """Map a finish reason of OpenAI, vLLM, SGLang, llama.cpp or TGI.

    Raises:
        RequestRejected: the finish reason is unknown.
    """
    if finish is None or finish == "":
        return "possibly cut"
    if isinstance(finish, str) and finish in _REASONS:
        return _REASONS[finish]
    reasons = ", ".join(_REASONS)
    raise RequestRejected(
        f"unknown finish_reason {excerpt(str(finish), 60)!r} (known: {reasons})", failed=True
    )
