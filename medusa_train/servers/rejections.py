"""Why a server rejects a request: the chat is too long, or a parameter is not supported."""

from __future__ import annotations

import re

_TOO_LONG = re.compile(
    r"context[ _](?:length|window|size)|too long|too many tokens|max_model_len"
    r"|maximum.{0,20}length|must have less|max_new_tokens`? must be <=",
    re.IGNORECASE,
)


def says_too_long(text: str) -> bool:
    """Return whether a rejection says that the chat does not fit into the model's context."""
    return _TOO_LONG.search(text) is not None


class RequestRejected(Exception):
    """The server rejected this request; other requests may succeed.

    `too_long`: the chat does not fit into the model's context.
    `failed`: the server did not reject it, but all attempts failed; another run may get an answer.
    `text`: the server's response.
    """

    def __init__(
        self, message: str, *, too_long: bool = False, failed: bool = False, text: str = ""
    ) -> None:
        super().__init__(message)
        self.too_long = too_long
        self.failed = failed
        self._text = text

    def names(self, parameter: str) -> bool:
        """Return whether the response names a parameter of the request, other than as a key of a
        request that it repeats.
        """
        name = rf"\b{re.escape(parameter)}\b(?!\\?[\"']\s*:)"
        return re.search(name, self._text, re.IGNORECASE) is not None
