"""Access to the Hugging Face hub: check whether it is reachable, and fetch single files of datasets."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlparse

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@cache
def hub_is_unreachable() -> bool:
    """Return True if the hub's host name cannot be resolved or `HF_HUB_OFFLINE` is set, so that only the cache is used.

    Behind a proxy, host names need not resolve here, so the hub counts as reachable.
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
    """Return the local path of a file of the dataset `repo`, from the hub or its cache; None if it is in neither."""
    from huggingface_hub import hf_hub_download

    try:
        # the client would retry for a long time before it looked into its cache
        offline = hub_is_unreachable()
        return Path(hf_hub_download(repo, filename, repo_type="dataset", local_files_only=offline))
    except Exception:  # the hub client raises many unrelated exceptions if a file or the hub is not available
        return None
