"""The Hugging Face hub: whether it can be reached at all, and single files from it. Knows no model and no data."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@cache
def hub_is_unreachable() -> bool:
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


def fetch_dataset_file(repo: str, filename: str) -> Path | None:
    """A file of the data set `repo`, from the hub or its local cache; None where neither has it."""
    from huggingface_hub import hf_hub_download

    try:
        # Where the hub is out of reach the client would try again and again before it looked into its cache.
        offline = hub_is_unreachable()
        return Path(hf_hub_download(repo, filename, repo_type="dataset", local_files_only=offline))
    except Exception:  # the hub client raises a dozen unrelated kinds for "not reachable" and "not there"
        return None
