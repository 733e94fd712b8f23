"""Keys never appear in what is printed or written: they are replaced by `***`.

A key is the value of an environment variable whose name says so (`OPENAI_API_KEY`, `HF_TOKEN`), one
that a connection uses (`remember`), or one that a user wrote into a configuration
(`remember_written`). These places mask, and everything passes through one of them:

- `ConsoleStream.write` and `print_uncaught` (console_streams.py): stdout and stderr of commands;
- `replace_text` (io.py) and `json_line` (json_lines.py): every text file of this project;
- `MedusaError`: messages, for whoever catches them;
- `wandb` (metrics_log.py): the configuration that it is sent.

A text that is shortened, or wrapped at the console's width, is masked before (`excerpt`,
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
#: Shorter values are placeholders of servers without keys (EMPTY, none), and occur in any text.
SHORTEST_KEY = 8

_SECRET_NAME = re.compile(
    r"(api[_-]?key|access[_-]?key|secret([_-]?key)?|token|password|passwd|kaggle[_-]key)$",
    re.IGNORECASE,
)
#: Names of tokens of a vocabulary, and of counts.
_VOCABULARY = re.compile(
    r"(bos|eos|eot|pad|unk|cls|sep|mask|special|max|num)_?(token|id)$", re.IGNORECASE
)
#: What people set for servers that need no key: a word, which occurs in other texts.
_WORD = re.compile(r"[a-z]{1,15}|not-needed|no-key-required|no-api-key|\d+")
#: User name and password in an address.
_ADDRESS = re.compile(r"(\w+://)[^/\s'\"]+@")
#: Keys of OpenAI, Hugging Face and GitHub, wherever they come from.
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
    """Mask `key` from now on, each of its lines and words, and how JSON, HTML and addresses write
    it.
    """
    for part in {key.strip(), *key.split()}:
        is_path = part.startswith(os.sep)
        if len(part) >= SHORTEST_KEY and not is_path and not _WORD.fullmatch(part):
            _keys.update((part, json.dumps(part)[1:-1], html.escape(part), quote(part, safe="")))


def remember_address(text: str) -> None:
    """Mask the user name with the password of an address, and keys in its query."""
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
    """Mask what is under a name such as `api_key` anywhere in a configuration, or behind such
    an option in a list of arguments.
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
    """Replace all known keys: for files, whose texts may hold addresses of other people."""
    for key in sorted(_keys, key=len, reverse=True):
        text = text.replace(key, MASK)
    return text


def mask(text: str) -> str:
    """Replace all known keys, everything of the shape of one, and passwords in addresses: for
    messages.
    """
    text = _ADDRESS.sub(rf"\1{MASK}@", text)
    text = _KNOWN_SHAPE.sub(MASK, text)
    return mask_keys(text)


def mask_values(value: Any) -> Any:
    """Return a copy of a configuration, all its texts masked: for dashboards."""
    if isinstance(value, Mapping):
        return {name: mask_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_values(item) for item in value]
    return mask(value) if isinstance(value, str) else value


def excerpt(text: str, length: int) -> str:
    """Return the first `length` characters on one line, masked before they are cut off."""
    return " ".join(mask(text).split())[:length]
