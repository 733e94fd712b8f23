"""Mask keys: `***` replaces them in everything that is printed or written.

A key is the value of an environment variable with the name of a secret (`OPENAI_API_KEY`,
`HF_TOKEN`), a key that a connection uses (`remember`), or one that a user wrote into a
configuration (`remember_written`). Everything passes through one of these places, which mask keys:

- `ConsoleStream.write` and `print_uncaught` (console_streams.py): stdout and stderr of commands;
- `replace_text` (io.py) and `json_line` (json_lines.py): every text file of this project;
- `MedusaError`: messages, for whoever catches them;
- `wandb` (metrics_log.py): the configuration that is sent to it.

If a text is shortened, or wrapped at the console's width, it is masked first (`excerpt`,
`MaskingConsole`): half a key would not be found.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"
#: Shorter values are not masked: they are placeholders for servers without keys (EMPTY, none), and
#: occur in any text.
SHORTEST_KEY = 8

_SECRET_NAME = re.compile(
    r"(api[_-]?key|access[_-]?key|secret([_-]?key)?|token|password|passwd|kaggle[_-]key)$",
    re.IGNORECASE,
)
#: Names that look like secrets, but are tokens of a vocabulary or counts.
_VOCABULARY = re.compile(
    r"(bos|eos|eot|pad|unk|cls|sep|mask|special|max|num)_?(token|id)$", re.IGNORECASE
)
#: Placeholders for servers without keys. They are not masked: such words occur in other texts.
_WORD = re.compile(r"[a-z]{1,15}|not-needed|no-key-required|no-api-key|\d+")
#: User name and password in an address.
_ADDRESS = re.compile(r"(\w+://)[^/\s'\"]+@")
#: Keys of OpenAI, Hugging Face and GitHub, recognized by their form.
_KNOWN_SHAPE = re.compile(r"\b(sk-[\w-]{20,}|hf_\w{30,}|gh[pousr]_\w{30,})")

_keys: set[str] = set()


def forget_and_read_environment() -> None:
    """Forget the keys that are known, and read those of the environment; each command does so."""
    _keys.clear()
    for name, value in os.environ.items():
        if _is_secret_name(name):
            remember(value)
        remember_address(value)


def remember(key: str) -> None:
    """Mask `key` from now on: the whole, each of its words, and its escaped forms in JSON, HTML and
    addresses.
    """
    for part in {key.strip(), *key.split()}:
        is_path = part.startswith(os.sep)
        if len(part) >= SHORTEST_KEY and not is_path and not _WORD.fullmatch(part):
            _keys.update((part, json.dumps(part)[1:-1], html.escape(part), quote(part, safe="")))


def remember_address(text: str) -> None:
    """Mask the user name and the password in an address, and keys in its query."""
    _, scheme, rest = text.partition("://")
    if not scheme:
        return
    user, at, place = rest.rpartition("@")
    if at:
        password = user.partition(":")[2]
        for part in (f"{user}@", password, *password.split("/")):
            remember(part)
    for pair in re.split("[&;#?]", place or rest):
        name, _, value = pair.partition("=")
        if _is_secret_name(name):
            remember(value)


def remember_written(value: object, name: str = "") -> None:
    """Mask the values of names such as `api_key` anywhere in a configuration, and the values after
    such options in a list of arguments.
    """
    if isinstance(value, dict):
        for inner, item in value.items():
            remember_written(item, str(inner))
    elif isinstance(value, list):
        before = ""
        for item in value:
            option, equals, text = str(item).partition("=")
            if equals and option.startswith("--"):
                remember_written(text, option)
            remember_written(item, before if before.startswith("--") else name)
            before = str(item)
    elif isinstance(value, str):
        is_variable = value.isidentifier() and (value.upper() == value or value in os.environ)
        if _is_secret_name(name) or (name.endswith("_key_env") and not is_variable):
            remember(value)
        remember_address(value)


def _is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _VOCABULARY.search(name) is None


def mask_keys(text: str) -> str:
    """Replace all known keys. For files: addresses in their texts may be data, and stay."""
    for key in sorted(_keys, key=len, reverse=True):
        text = text.replace(key, MASK)
    return text


def mask(text: str) -> str:
    """Replace all known keys, everything that looks like a key, and passwords in addresses. For
    messages.
    """
    text = _ADDRESS.sub(rf"\1{MASK}@", text)
    text = _KNOWN_SHAPE.sub(MASK, text)
    return mask_keys(text)


def mask_values(value: Any) -> Any:
    """Return a copy of a configuration with all its texts masked. For dashboards."""
    if isinstance(value, Mapping):
        return {name: mask_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_values(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def excerpt(text: str, length: int) -> str:
    """Return the first `length` characters on one line, masked before they are cut off."""
    return " ".join(mask(text).split())[:length]
