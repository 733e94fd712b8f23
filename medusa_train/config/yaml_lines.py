"""Parse YAML into plain values and record the line of every key, for error messages.

PyYAML's loader drops line numbers and silently keeps the last of two equal keys, so the node tree
is walked here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from medusa_train.errors import ConfigError


class StringDateLoader(yaml.SafeLoader):
    """SafeLoader that reads dates as text: no key takes a date, and names of runs often look like
    one.
    """


StringDateLoader.yaml_implicit_resolvers = {}
for _first, _resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
    StringDateLoader.yaml_implicit_resolvers[_first] = [
        (tag, pattern) for tag, pattern in _resolvers if tag != "tag:yaml.org,2002:timestamp"
    ]


def _plain_integer(loader: StringDateLoader, node: yaml.ScalarNode) -> int | str:
    """Read only decimal literals as numbers: 0123, 1_000, 12:30 and 0x1F may be names (numeric keys
    parse text).
    """
    if re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", node.value):
        return int(node.value)
    return str(node.value)


StringDateLoader.add_constructor("tag:yaml.org,2002:int", _plain_integer)

#: Path to a value in nested mappings and lists: ("datasets", 0, "path").
KeyPath = tuple[str | int, ...]


class Problem(NamedTuple):
    """What is wrong with the value at `path`; an empty path stands for the whole source."""

    path: KeyPath
    message: str

    @property
    def key(self) -> str | None:
        """The key of the configuration that has the problem."""
        if not self.path:
            return None
        return str(self.path[0])


@dataclass
class YamlSource:
    """Values of a configuration as the user wrote them, with their locations.

    Attributes:
        name: name of the whole source ("configs/x.yaml").
        values: nested plain values.
        locations: location of each key and list item ("configs/x.yaml:12").
        problems: what is known to be wrong from parsing: duplicate keys, bad overrides.
        replaced: keys that were dropped, since another one on the command line takes their place.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)

    def location(self, path: KeyPath) -> str:
        """Return the location of `path`, else of its nearest parent, else the source's name."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return self.name

    def take(self, key: str, other: YamlSource) -> None:
        """Replace the value of `key` and its locations by those of `other`."""
        self.values[key] = other.values[key]
        for path in list(self.locations):
            if path[0] == key:
                del self.locations[path]
        for path, location in other.locations.items():
            if path[0] == key:
                self.locations[path] = location


def format_path(path: KeyPath) -> str:
    """Format `("datasets", 0, "path")` as `datasets[0].path`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif text:
            text += f".{part}"
        else:
            text = part
    return text


def read_yaml(text: str, name: str) -> YamlSource:
    """Parse `text`; `name` stands for the file in locations and messages."""
    source = YamlSource(name)
    try:
        loader = StringDateLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(
                f"{name}: is empty; a configuration holds lines like `base_model: data/tiny`"
            )
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
            raise ConfigError(f"{name}:{_line(root)}: expected `key: value` lines, found {kind}")
        source.values = _NodeReader(loader, source).read(root, ())
    except yaml.MarkedYAMLError as error:
        place = name
        if error.problem_mark:
            place += f":{error.problem_mark.line + 1}"
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    return source


#: How YAML writes null.
_NULLS = ("", "~", "null", "Null", "NULL")
#: A text in quotes of YAML.
_QUOTED = re.compile(r"""'([^']|'')*'|"([^"\\]|\\.)*\"""")


def read_value(text: str, name: str, *, is_text: bool = False) -> YamlSource:
    """Parse a single value; it stands under the key "" of the source called `name`.

    What is not valid YAML, such as some file names, is text.

    Args:
        is_text: the value is a text as it is typed: only null and quotes around all of it are YAML.
    """
    source = YamlSource(name, {"": text})
    if text.strip() in _NULLS:
        source.values[""] = None
        return source
    if is_text and not _QUOTED.fullmatch(text):
        return source
    try:
        loader = StringDateLoader(text)
        root = loader.get_single_node()
        # `&x` and `#x` are null for YAML, but whoever types them means a value
        if root is not None and not _is_null(root):
            source.values[""] = _NodeReader(loader, source).read(root, ())
    except (yaml.YAMLError, RecursionError, ConfigError):
        return YamlSource(name, {"": text})
    return source


def read_yaml_file(path: Path, name: str) -> YamlSource:
    """Parse the file at `path`."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not a text file in UTF-8; a configuration is YAML") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


class _NodeReader:
    """Converts YAML nodes to plain values and records their locations."""

    def __init__(self, loader: yaml.SafeLoader, source: YamlSource) -> None:
        self.loader = loader
        self.source = source
        # ids of the nodes being read, to detect an alias that contains itself
        self.open: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        if id(node) in self.open:
            raise ConfigError(
                f"{self._location(node)}: {format_path(path)}: the alias contains itself"
            )
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return dict(self._entries(node, path))
            if isinstance(node, yaml.SequenceNode):
                return [self._item(item, (*path, i)) for i, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self.open.discard(id(node))

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        try:
            value = self.loader.construct_object(node)
        # 0b_, thousands of digits, !!bool maybe, !!timestamp x
        except (ValueError, KeyError, AttributeError):
            raise ConfigError(
                f"{self._location(node)}: {format_path(path)}: cannot be read as a value"
            ) from None
        if isinstance(value, str):
            # JSON writes an emoji as two escapes, which PyYAML does not join
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.source.locations[path] = self._location(node)
        return self.read(node, path)

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        self._drop_empty_duplicates(node)
        self._report_duplicates(node, path)
        # `<<: *base`: merged keys come first, so that explicit ones override them
        self.loader.flatten_mapping(node)
        # an alias is read again
        node.value = list({key.value: (key, value) for key, value in node.value}.values())
        for key, value in node.value:
            child = (*path, str(key.value))
            self.source.locations[child] = self._location(key)
            yield str(key.value), self.read(value, child)

    def _drop_empty_duplicates(self, node: yaml.MappingNode) -> None:
        """Drop an empty key that is set elsewhere in its mapping, common in YAML files that list
        every key.
        """
        filled = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and not _is_null(value):
                filled.add(key.value)
        kept = []
        for key, value in node.value:
            is_name = isinstance(key, yaml.ScalarNode)
            if not (is_name and _is_null(value) and key.value in filled):
                kept.append((key, value))
        node.value = kept

    def _report_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self._location(key)}: keys must be plain names")
            if key.value in first and key.value != "<<":
                lines = f", on lines {first[key.value]} and {_line(key)}"
                if first[key.value] == _line(key):
                    lines = ""
                message = f"is set twice{lines}; keep one"
                self.source.problems.append(Problem((*path, key.value), message))
            first.setdefault(key.value, _line(key))

    def _location(self, node: yaml.Node) -> str:
        return f"{self.source.name}:{_line(node)}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")
