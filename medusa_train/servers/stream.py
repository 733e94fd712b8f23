"""Read a streamed chat completion (server-sent events) and record when its first and last tokens arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

END = "[DONE]"


class StreamError(Exception):
    """The stream reports an error, or ended before the answer did; the message says which."""


def read_completion(
    lines: Iterable[str],
    started: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Assemble the chunks of a streamed answer to the response of a request without `stream`, with its times.

    Args:
        lines: lines of the response's body.
        started: when the request was sent, by `clock`.
        check: called after every line; an exception that it raises ends reading.

    Returns:
        `choices` with one message and its finish reason, `usage` where the server sends it, and `timing`: `started`,
        `first_token` (None for an empty answer) and `finished`, in seconds of `clock`.

    Raises:
        StreamError: the server reports an error in the stream, or closed it before the end of the answer.
    """
    message = {"content": "", "reasoning_content": ""}
    usage: dict[str, Any] | None = None
    finish_reason = first_token = None
    for line in lines:
        now = clock()
        check()
        if not line.startswith("data:"):
            continue  # comments that keep the connection alive, names of events, empty lines
        data = line.removeprefix("data:").strip()
        if data == END:
            break
        chunk = _parse(data)
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices") or ():
            try:
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                message["content"] += content
                message["reasoning_content"] += reasoning
            except (AttributeError, TypeError):
                raise StreamError(f"a part of the stream is no text message: {data[:80]}") from None
            if first_token is None and (content or reasoning):
                first_token = now
            finish_reason = choice.get("finish_reason") or finish_reason
    if finish_reason is None:
        raise StreamError("the server closed the stream before the end of the answer")
    return {
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}],
        "usage": usage,
        "timing": {"started": started, "first_token": first_token, "finished": clock()},
    }


def _parse(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
    except (ValueError, AttributeError):
        raise StreamError(f"the stream holds something else than JSON objects: {data[:80]}") from None
    if error is not None:
        text = error.get("message", error) if isinstance(error, dict) else error
        raise StreamError(f"error within the stream: {' '.join(str(text).split())[:300]}")
    return dict(chunk)
