"""Access to the Hugging Face hub: whether it can be reached, what its errors mean, and single files
of datasets.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from medusa_train.network import check_network

#: Attempts to continue a broken download, after each of which more time passes.
MAX_ATTEMPTS = 5
_TIMEOUT = 30.0  # seconds without a byte
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")

#: First word of the name of a download's progress, which is counted in bytes.
FETCHING = "fetching"
#: Receives the number of fetched bytes, and of all bytes.
OnBytes = Callable[[int, int], None]


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


def fetch_dataset_file(repo: str, filename: str, on_bytes: OnBytes | None = None) -> Path:
    """Return the local path of a file of the dataset `repo`, downloaded if it is not in a cache.

    The hub's client starts a download over in every process, so files of hundreds of megabytes are
    fetched here: a broken download continues in the same call or in a later one. Size and, where
    the hub knows it, SHA-256 are checked before the file gets its name.

    Raises:
        FetchError: it is in no cache, and the hub does not have it, refuses it or cannot be
            reached.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, filename, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    target = Path(constants.HF_HOME) / "medusa-train" / repo.replace("/", "--") / filename
    if target.is_file():
        return target
    if hub_is_unreachable():
        raise FetchError("no network, or HF_HUB_OFFLINE is set")
    check_network()
    try:
        url = hf_hub_url(repo, filename, repo_type="dataset")
        metadata = get_hf_file_metadata(url)
        if metadata.size is None or metadata.etag is None:
            raise FetchError("the hub does not say how large it is")
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(url, target, metadata.size, metadata.etag, on_bytes)
    except FetchError:
        raise
    except Exception as error:  # the clients of the hub and of HTTP raise many unrelated exceptions
        reason = describe_hub_error(error, repo, "dataset")
        if reason is None and not isinstance(error, OSError):
            raise
        raise FetchError(
            reason or f"{target.parent}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return target


#: Small files of a repository of heads, with a tokenizer's where a backbone lies beside them.
_SETTINGS_FILES = ("*.json", "README.md", "tokenizer.model", "*.jinja", "*.txt")
_WEIGHTS = ("*.safetensors",)
#: Weights that are fetched where there are no safetensors; of such files only tensors are read.
_PICKLED_WEIGHTS = ("medusa_lm_head.pt", "pytorch_model*.bin")


def fetch_heads(repo: str, *, weights: bool = True) -> Path:
    """Return the directory of the files of a repository of heads in the hub's cache, fetched unless
    the hub cannot be reached.

    Args:
        weights: without them only config.json and other small files are fetched.

    Raises:
        FetchError: it is not in the cache, and the hub does not have it, refuses it or cannot be
            reached.
    """
    from huggingface_hub import snapshot_download

    offline = hub_is_unreachable()
    if not offline:
        check_network()

    def download(patterns: tuple[str, ...]) -> Path:
        directory = snapshot_download(repo, allow_patterns=list(patterns), local_files_only=offline)
        return Path(directory)

    try:
        directory = download(_SETTINGS_FILES)
        if weights:
            directory = download(_WEIGHTS)
            if not any(directory.glob("*.safetensors")):
                directory = download(_PICKLED_WEIGHTS)
        return directory
    except Exception as error:  # the clients of the hub and of HTTP raise many unrelated exceptions
        reason = describe_hub_error(error, repo, "model")
        if reason is None and offline:
            place = f"models/{Path(repo).name}"
            reason = f"{offline_advice(repo, 'model', place)}, then name {place}"
        if reason is None and not isinstance(error, OSError):
            raise
        raise FetchError(reason or str(error)) from error


def _download(url: str, target: Path, size: int, etag: str, on_bytes: OnBytes | None) -> None:
    """Download a file of `size` bytes to `target`, or continue where an earlier process stopped."""
    from filelock import FileLock

    part = target.with_name(f"{target.name}.{re.sub(r'[^0-9A-Za-z]', '', etag)[:16]}.part")
    with FileLock(target.with_name(f"{target.name}.lock")):
        if target.is_file():  # by another process
            return
        done = _size_of(part)
        furthest = done
        attempt = 0  # attempts without progress
        while done < size:
            # 1. The bytes from `done` on.
            broken: Exception | None = None
            try:
                _append(url, part, done, size, on_bytes)
            except Exception as error:
                if not _is_connection_error(error):
                    raise
                broken = error
            done = _size_of(part)
            # 2. Progress: a server that starts over from the first byte makes it only beyond the
            # last time.
            if done > furthest:
                attempt = 1
                furthest = done
            else:
                attempt += 1
            # 3. Once more, unless it has failed too often.
            if done < size and attempt >= MAX_ATTEMPTS:
                if broken is not None:
                    raise broken
                part.unlink(missing_ok=True)  # it may hold another text than the file's
                raise FetchError(
                    f"{MAX_ATTEMPTS} answers in a row ended after {done:,} of {size:,} bytes:"
                    " perhaps pages of a proxy; check the network, or a proxy's settings"
                )
            if done < size:
                time.sleep(attempt)
        is_damaged = done != size
        if not is_damaged and re.fullmatch("[0-9a-f]{64}", etag):
            is_damaged = _sha256(part) != etag
        if is_damaged:
            part.unlink()
            raise FetchError("the download was damaged and is deleted; run the command again")
        part.replace(target)


def _size_of(part: Path) -> int:
    if not part.exists():
        return 0
    return part.stat().st_size


def _append(url: str, part: Path, done: int, size: int, on_bytes: OnBytes | None) -> None:
    """Append the bytes from `done` on to `part`, or all bytes where the server starts over.

    Raises:
        FetchError: the answer is another file's or a page of a proxy: it names another length, or
            goes on after `size` bytes. `part` keeps what it had.
        TransportError (of the hub's HTTP client): the connection breaks.
    """
    from huggingface_hub.utils import build_hf_headers, get_session

    headers = {**build_hf_headers(), "Range": f"bytes={done}-", "Accept-Encoding": "identity"}
    with get_session().stream(
        "GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True
    ) as answer:
        answer.raise_for_status()
        if answer.status_code != HTTPStatus.PARTIAL_CONTENT:
            done = 0
        check_length(answer.headers.get("Content-Length"), size - done)
        with part.open("ab" if done else "wb") as file:
            for block in answer.iter_raw():
                if done + len(block) > size:
                    raise FetchError(f"the answer is longer than the file's {size:,} bytes")
                file.write(block)
                done += len(block)
                if on_bytes is not None:
                    on_bytes(done, size)


def offline_advice(name: str, kind: Literal["model", "dataset"], directory: str) -> str:
    """Say why `name` cannot be fetched without a network, and how it comes into `directory`."""
    of_dataset = " --repo-type dataset" if kind == "dataset" else ""
    return (
        "there is no network (or HF_HUB_OFFLINE is set), and it is not in the hub's cache: where"
        f" there is one, run `hf download {name}{of_dataset} --local-dir {directory}`"
    )


def check_length(stated: str | None, expected: int) -> None:
    """Check the `Content-Length` of an answer, None if it has none, against the bytes that it
    should hold.

    Raises:
        FetchError: they differ.
    """
    if stated is not None and stated != str(expected):
        raise FetchError(
            f"the answer has {stated} bytes in place of {expected:,}: perhaps a page of a proxy;"
            " check the network, or a proxy's settings"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def describe_hub_error(
    error: BaseException, name: str, kind: Literal["model", "dataset"]
) -> str | None:
    """Return what the hub's answer to a request for `name` means and what to do, or None if `error`
    is not from it.
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
            return (
                f"the connection to {constants.ENDPOINT} failed ({what}); run the command again to"
                " continue"
            )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _is_connection_error(error: Any) -> bool:
    """Return whether a client of HTTP lost its connection; the hub's client has an httpx package of
    its own.
    """
    kinds = [kind for kind in type(error).__mro__ if kind.__module__.startswith("httpx")]
    return any(kind.__name__ == "TransportError" for kind in kinds)
