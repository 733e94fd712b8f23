"""Resolve file names in configurations: relative to the working directory, else to the project's
root.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from medusa_train.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
#: Directory that holds `configs/` and `data/`: the parent of the package, or `shipped/` inside it
#: in a wheel.
PROJECT_ROOT = next(
    (
        root
        for root in (_PACKAGE.parent, _PACKAGE / "shipped")
        if (root / "configs" / "tiny_m1.yaml").is_file()
    ),
    _PACKAGE.parent,
)


#: `$NAME` or `${NAME}`.
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def expand_variables(text: str) -> str:
    """Replace `$NAME` and `${NAME}` by environment variables.

    Raises ConfigError if a variable is unset or empty, because `${SCRATCH}/run` would become `/run`
    without it. Also raises it for text that only a shell expands, such as `$(NAME)`.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        setting = os.environ.get(name, "")
        if not setting:
            raise ConfigError(
                f"{text}: the environment variable {name} is not set; set it, or write the value"
            )
        return setting

    for beginning in ("${", "$("):
        if beginning in _VARIABLE.sub("", text):
            raise ConfigError(
                f"{text}: of what begins with $, only $NAME and ${{NAME}} are replaced, by"
                " environment variables; write the value"
            )
    return _VARIABLE.sub(value, text)


def looks_like_path(name: str) -> bool:
    """Return whether `name` cannot be a hub name (`NAME` or `OWNER/NAME`), so that it must be a
    local path.
    """
    return name.startswith((".", "/", "~")) or name.endswith("/") or len(Path(name).parts) > 2


def resolve_path(name: str | Path) -> Path | None:
    """Return the file or directory `name`, as given or below the project's root; None if neither
    exists.

    So `configs/tiny_m1.yaml` and `data/tiny` work from every directory. A name that cannot be
    looked up, since it is too long, counts as missing.
    """
    path = expand_user(name)
    if os.path.exists(path):
        return path
    if not path.is_absolute() and os.path.exists(PROJECT_ROOT / path):
        return PROJECT_ROOT / path
    return None


def absolute_name(name: str) -> str:
    """Return the absolute path of an existing file or directory; return other names unchanged."""
    local = resolve_path(name)
    if local is None:
        return name
    return str(local.resolve())


def expand_user(name: str | Path) -> Path:
    """Replace a leading `~` or `~USER` by the home directory; `./~x` is a name."""
    if not str(name).startswith("~"):
        return Path(name)
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{name}: the home of {Path(name).parts[0]} is not known; write the whole path"
        ) from None


def user_cache_dir() -> Path:
    """Return this project's folder in the user's cache directory (XDG_CACHE_HOME or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "medusa-train"


def public_name(name: str) -> str:
    """Return a name without private directories.

    Hub names and relative paths are unchanged. An absolute path becomes relative to the project or
    the working directory; outside of both only its last part is kept.
    """
    path = expand_user(name)
    if not path.is_absolute():
        return name
    for root in (PROJECT_ROOT, Path.cwd()):
        if path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
    return path.name


def nearest_path(name: str) -> str | None:
    """Return the existing path that is most similar to a mistyped relative path; None if no name in
    its directory is similar.
    """
    path = Path(name)
    if path.parent == Path():
        return None
    directory = resolve_path(path.parent)
    if directory is None or not directory.is_dir():
        return None
    names = [entry.name for entry in directory.iterdir()]
    matches = get_close_matches(path.name, names, n=1)
    if not matches:
        return None
    return (path.parent / matches[0]).as_posix()
