"""Access to the Hugging Face hub: whether it can be reached, what its errors mean, and single files of datasets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

#: First word of the name of a download's progress, which is counted in bytes.
FETCHING = "fetching"
#: Receives the number of fetched bytes, and of all bytes.
OnBytes = Callable[[int, int], None]


class FetchError(Exception):
    """A file of the hub that could not be fetched; the message is the reason, a clause without a full stop."""


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


def fetch_dataset_file(repo: str, filename: str, on_bytes: OnBytes | None = None) -> Path:
    """Return the local path of a file of the dataset `repo`, downloaded if it is not in the hub's cache.

    Args:
        on_bytes: called while the file is downloaded.

    Raises:
        FetchError: it is not in the cache, and the hub does not have it, refuses it or cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Reported(tqdm):
        """Passes the bytes to `on_bytes` instead of showing a bar of its own."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if on_bytes is not None:
                on_bytes(int(self.n), int(self.total or 0))

    offline = hub_is_unreachable()
    try:
        path = hf_hub_download(repo, filename, repo_type="dataset", local_files_only=offline, tqdm_class=Reported)
    except Exception as error:  # the clients of the hub and of HTTP raise many unrelated exceptions
        if offline:
            raise FetchError("no network, or HF_HUB_OFFLINE is set") from error
        reason = describe_hub_error(error, repo, "dataset")
        if reason is None and not isinstance(error, OSError):
            raise
        raise FetchError(reason or getattr(error, "strerror", None) or str(error)) from error
    return Path(path)


def describe_hub_error(error: BaseException, name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Return what the hub's answer to a request for `name` means and what to do, or None if `error` is not from it.

    Args:
        error: raised by `huggingface_hub`, or by `transformers` from such an error.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, GatedRepoError) and status == 403:
            return f"{name} is gated and your account has no access to it yet: accept its terms at {page}"
        if isinstance(cause, GatedRepoError):
            return f"{name} is gated: accept its terms at {page}, then {login}"
        if isinstance(cause, RepositoryNotFoundError) or status == 401:
            return f"the hub has no {kind} {name}, or it is private: check the name, or {login}"
        if status == 403:
            return f"the hub does not let your account read {name}: see {page}"
        if isinstance(cause, EntryNotFoundError) and status == 404:
            return f"{page} does not have this file"
        if status is not None:
            return f"the hub answered with HTTP status {status} to a request for {name}; try again later"
        if _is_connection_error(cause):
            what = str(cause) or type(cause).__name__
            return f"the connection to {constants.ENDPOINT} failed ({what}); run the command again"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_connection_error(error: Any) -> bool:
    """Return whether a client of HTTP lost its connection; the hub's client has an httpx package of its own."""
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith("httpx")]
    return any(kind.__name__ == "TransportError" for kind in kinds)
