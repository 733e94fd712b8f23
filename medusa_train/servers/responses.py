"""What a server's response holds: an answer, its models, an error, a time to wait."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from medusa_train.servers.streaming import ABORTED


def parse_models(response: httpx.Response) -> dict[str, dict[str, Any]]:
    """Return the entries of a list of models by name; empty if the response is anything else."""
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return {}


def usable_answer(response: httpx.Response) -> dict[str, Any] | None:
    """Return the response's JSON if it holds a text message; else None (an error page, a truncated
    body, `ABORTED`).
    """
    try:
        answer = response.json()
        choice = answer["choices"][0]
        content = choice["message"].get("content")
        finish_reason = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    is_text = content is None or isinstance(content, str)
    if not isinstance(answer, dict) or not is_text or finish_reason == ABORTED:
        return None
    return answer


def error_message(response: httpx.Response) -> str:
    """Return the server's message: OpenAI's `error.message`, FastAPI's `detail`, or the body."""
    try:
        content = response.json()
        error = content.get("error", content.get("detail", content))
    except (ValueError, AttributeError):
        return response.text
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


def retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the Retry-After header, a number or a date; None if there is none."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    if not seconds < float("inf"):  # nor is it a number, where it is nan
        return None
    return max(seconds, 0.0)
