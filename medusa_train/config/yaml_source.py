"""Read YAML with the place of every key, for messages, and set keys by `key=value`.

PyYAML's loader drops line numbers and silently keeps the last of two equal keys, so the node tree
is walked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import remember_written

#: Path to a value in nested mappings and lists: ("datasets", 0, "path").
KeyPath = tuple[str | int, ...]
#: What is wrong with the value at a path; the path is empty for the whole source.
Problem = tuple[KeyPath, str]
#: How YAML writes null.
_NULLS = ("", "~", "null", "Null", "NULL")
#: A text in quotes of YAML.
_QUOTED = re.compile(r"""'([^']|'')*'|"([^"\\]|\\.)*\"""")


def format_path(path: KeyPath) -> str:
    """Format `("datasets", 0, "path")` as `datasets[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@dataclass
class Source:
    """The values of a configuration, and where each of them was set.

    Attributes:
        name: the file, or what messages say in its place.
        places: of every key, `FILE:LINE`, an override, or an option.
        problems: what is wrong with the value at a path; the path is empty for the whole source.
        ignored: settings without effect, since others replace them.
        is_run: it is a run's own config.yaml.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    is_run: bool = False

    def place(self, path: KeyPath) -> str:
        """Return the place of `path`, else of its nearest parent, else the source's name.

        The index of an item is left out where the file has it without a list.
        """
        for length in range(len(path), 0, -1):
            parent = path[:length]
            for written in (parent, tuple(part for part in parent if isinstance(part, str))):
                if written in self.places:
                    return self.places[written]
        return self.name

    def set(self, path: KeyPath, value: object, place: str) -> None:
        """Set the value at `path`, creating missing mappings; what is wrong becomes a problem."""
        remember_written(value, str(path[-1]))
        target: Any = self.values
        # 1. Go down to the mapping or the list that holds the value.
        for depth, part in enumerate(path[:-1], start=1):
            child = _child(target, part)
            if child is None and isinstance(target, dict) and isinstance(path[depth], str):
                child = target[str(part)] = {}
                self.places[path[:depth]] = place
            if not isinstance(child, (dict, list)):
                wrong = f"{format_path(path[:depth])} is not a mapping"
                self.problems.append(((), f"{place}: cannot set {format_path(path)}: {wrong}"))
                return
            target = child
        # 2. Set it.
        last = path[-1]
        if isinstance(target, dict):
            target[str(last)] = value
        elif isinstance(last, int) and last < len(target):
            target[last] = value
        else:
            wrong = f"{format_path(path[:-1])} has {len(target)} items, counted from 0"
            self.problems.append(((), f"{place}: {wrong}"))
            return
        # 3. The places of what it replaces are gone.
        kept = {below: at for below, at in self.places.items() if below[: len(path)] != path}
        self.places = {**kept, path: place}


def _child(target: Any, part: str | int) -> Any:
    """Return what a mapping or a list has under `part`, or None."""
    if isinstance(target, dict):
        return target.get(str(part))
    return target[part] if isinstance(part, int) and part < len(target) else None


class _Loader(yaml.SafeLoader):
    """Reads nodes to values, and notes places and problems.

    Dates and numbers such as 0123, 1_000, 12:30 and 0x1F stay text: they may be names, and numeric
    keys parse text.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self.places: dict[KeyPath, str] = {}
        self.problems: list[Problem] = []

    def read(self, node: yaml.Node, path: KeyPath = ()) -> Any:
        """Return the value of a node."""
        if isinstance(node, yaml.MappingNode):
            return dict(self._entries(node, path))
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                inner = (*path, index)
                self.places[inner] = self._place(item)
                items.append(self.read(item, inner))
            return items
        try:
            value = self.construct_object(node)
        except (ValueError, KeyError, AttributeError):  # 0b_, !!bool maybe, !!timestamp x
            where = f"{self._place(node)}: {format_path(path)}"
            raise ConfigError(f"{where}: cannot be read as a value") from None
        if isinstance(value, str):
            # JSON writes an emoji as two escapes, which PyYAML does not join
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        self._check_keys(node, path)
        # `<<: *base`: merged keys come first, so that explicit ones override them
        self.flatten_mapping(node)
        # an alias reads its node again
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
        for key, value in node.value:
            inner = (*path, str(key.value))
            self.places[inner] = self._place(key)
            yield str(key.value), self.read(value, inner)

    def _check_keys(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Report keys that are set twice; drop empty ones that are set elsewhere in the mapping, as
        in files that list every key.
        """
        filled = {str(key.value) for key, value in node.value if not _is_null(value)}
        lines: dict[str, int] = {}
        kept = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._place(key)}: keys must be plain names")
            if _is_null(value) and key.value in filled:
                continue
            line = _line(key)
            if key.value in lines and key.value != "<<":
                first = lines[key.value]
                where = "" if first == line else f", on lines {first} and {line}"
                self.problems.append(((*path, key.value), f"is set twice{where}; keep one"))
            lines.setdefault(key.value, line)
            kept.append((key, value))
        node.value = kept

    def _place(self, node: yaml.Node) -> str:
        return f"{self.name}:{_line(node)}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    is_decimal = re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value)
    return int(node.value) if is_decimal else str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: str(node.value))


def read_yaml(text: str, name: str) -> Source:
    """Parse `text`; `name` is the file in places and messages."""
    try:
        loader = _Loader(text, name)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(
                f"{name}: is empty; a configuration holds lines like `base_model: data/tiny`"
            )
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
            raise ConfigError(f"{name}:{_line(root)}: expected `key: value` lines, found {kind}")
        return Source(name, loader.read(root), loader.places, loader.problems)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        if isinstance(error, RecursionError):
            reason = "nested too deeply, or an alias contains itself"
        raise ConfigError(f"{name}{line}: not valid YAML: {reason}") from None


def read_yaml_file(path: Path, name: str) -> Source:
    """Parse the file at `path`."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not a text file in UTF-8; a configuration is YAML") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def read_value(text: str, *, is_text: bool) -> tuple[Any, list[Problem]]:
    """Parse the value of an override; return it and its problems.

    What is not valid YAML, such as some file names, is text.

    Args:
        is_text: the value is a text as it is typed: only null and quotes around all of it are YAML.
    """
    if text.strip() in _NULLS:
        return None, []
    if is_text and not _QUOTED.fullmatch(text):
        return text, []
    try:
        loader = _Loader(text, "")
        root = loader.get_single_node()
        # `&x` and `#x` are null for YAML, but whoever types them means a value
        if root is not None and not _is_null(root):
            return loader.read(root), loader.problems
    except (yaml.YAMLError, RecursionError, ConfigError):
        pass
    return text, []
