"""Whether the Hugging Face hub can be reached at all, asked before a client retries for half a minute."""

from __future__ import annotations

import os
import socket
from functools import cache
from urllib.parse import urlparse

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@cache
def hub_is_out_of_reach() -> bool:
    """True when the hub's name can't be resolved, or `HF_HUB_OFFLINE` is set: then only cached files can be had.

    Behind a proxy names need not resolve here, so the question is left to the client.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        return True
    if any(os.environ.get(name) for name in _PROXIES):
        return False
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return True
    return False
