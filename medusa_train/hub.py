"""Access to the Hugging Face hub: whether it can be reached, downloads by its own client, and what
its errors mean.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from medusa_train.network import check_network

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

#: First word of the name of a download's progress.
FETCHING = "fetching"


class FetchError(Exception):
    """A file of the hub that could not be fetched; the message is the reason, a clause without a
    full stop.
    """


@cache
def hub_is_unreachable() -> bool:
    """Return True if the hub's host name cannot be resolved or `HF_HUB_OFFLINE` is set, so that
    only the cache is used.

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


def fetch_dataset_file(
    repo: str, filename: str, on_fetch: Callable[[int, int], None] | None = None
) -> Path:
    """Return the local path of a file of the dataset `repo`, downloaded if it is not in the cache.

    Args:
        on_fetch: called with (0, 0) before a download, whose size is not known.

    Raises:
        FetchError: it is not in the cache, and the hub does not have it, refuses it or cannot be
            reached.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, filename, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    if hub_is_unreachable():
        raise FetchError("no network, or HF_HUB_OFFLINE is set")
    check_network()
    if on_fetch is not None:
        on_fetch(0, 0)
    with _fetching(repo, "dataset"):
        return Path(hf_hub_download(repo, filename, repo_type="dataset"))


@contextmanager
def _fetching(
    repo: str, kind: Literal["model", "dataset"], advice: str | None = None
) -> Iterator[None]:
    """Turn the errors of a download in the block into FetchError.

    Args:
        advice: what an error means that the hub did not answer; None: its own message says it.
    """
    try:
        yield
    except Exception as error:  # the clients of the hub and of HTTP raise many unrelated exceptions
        reason = describe_hub_error(error, repo, kind) or advice
        if reason is None and not isinstance(error, OSError):
            raise
        raise FetchError(reason or " ".join(str(error).split())) from error


#: Small files of a repository of heads, including those of a tokenizer if it also has a target
#: model.
_SETTINGS_FILES = ("*.json", "README.md", "tokenizer.model", "*.jinja", "*.txt")
_WEIGHTS = ("*.safetensors",)
#: Weights to fetch if there are no safetensors. Only tensors are read from such files.
_PICKLED_WEIGHTS = ("medusa_lm_head.pt", "pytorch_model*.bin")


def fetch_heads(repo: str, *, weights: bool = True) -> Path:
    """Return the directory of a repository of heads in the hub's cache. Its files are fetched
    first, unless the hub cannot be reached.

    Args:
        weights: if false, fetch only config.json and other small files.

    Raises:
        FetchError: it is not in the cache, and the hub does not have it, refuses it or cannot be
            reached.
    """
    from huggingface_hub import snapshot_download

    offline = hub_is_unreachable()
    advice = None
    if offline:
        place = f"models/{Path(repo).name}"
        advice = f"{offline_advice(repo, 'model', place)}, then name {place}"
    else:
        check_network()

    def download(patterns: tuple[str, ...]) -> Path:
        directory = snapshot_download(repo, allow_patterns=list(patterns), local_files_only=offline)
        return Path(directory)

    with _fetching(repo, "model", advice):
        directory = download(_SETTINGS_FILES)
        if weights:
            directory = download(_WEIGHTS)
            if not any(directory.glob("*.safetensors")):
                directory = download(_PICKLED_WEIGHTS)
        return directory


def offline_advice(name: str, kind: Literal["model", "dataset"], directory: str) -> str:
    """Return why `name` cannot be fetched without a network, and how to download it."""
    repo_type = " --repo-type dataset" if kind == "dataset" else ""
    return (
        "there is no network (or HF_HUB_OFFLINE is set), and it is not in the hub's cache: where"
        f" there is one, run `hf download {name}{repo_type} --local-dir {directory}`"
    )


def describe_hub_error(
    error: BaseException, name: str, kind: Literal["model", "dataset"]
) -> str | None:
    """Return what the hub's answer to a request for `name` means and what to do; None if `error`
    does not come from the hub.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    folder = "datasets/" if kind == "dataset" else ""
    page = f"{constants.ENDPOINT}/{folder}{name}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(cause, GatedRepoError) and status == 403:
            return (
                f"{name} is gated and your account has no access to it yet: accept its terms at"
                f" {page}"
            )
        if isinstance(cause, GatedRepoError):
            return f"{name} is gated: accept its terms at {page}, then {login}"
        if isinstance(cause, RepositoryNotFoundError) or status == 401:
            return f"the hub has no {kind} {name}, or it is private: check the name, or {login}"
        if status == 403:
            return f"the hub does not let your account read {name}: see {page}"
        if isinstance(cause, EntryNotFoundError) and status == 404:
            return f"{page} does not have this file"
        if status is not None:
            return (
                f"the hub answered with HTTP status {status} to a request for {name}; try again"
                " later"
            )
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
    """Return whether an HTTP client lost its connection. Classes are compared by name, since the
    hub's client has its own httpx package.
    """
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith("httpx")]
    return any(kind.__name__ == "TransportError" for kind in kinds)
