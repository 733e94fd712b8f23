"""Read YAML into plain values, remembering on which line each key stands. Knows no key.

PyYAML's own loader keeps the last of two equal keys in silence and forgets lines, so the node tree is walked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from medusa_train.errors import ConfigError


class StringDateLoader(yaml.SafeLoader):
    """SafeLoader that leaves dates as the text they are: no key holds one, and run names often look like one."""


StringDateLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

#: A place in the tree of values: ("datasets", 0, "path").
KeyPath = tuple[str | int, ...]


@dataclass
class Source:
    """Values as the user wrote them.

    Attributes:
        name: what to call the source as a whole ("configs/x.yaml").
        values: the tree of plain values.
        places: where each key or list item stands ("configs/x.yaml:12").
        problems: what is wrong already (duplicates).
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[tuple[KeyPath, str]] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """Where `path` stands, else its nearest parent, else the source as a whole."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name


def format_path(path: KeyPath) -> str:
    """`("datasets", 0, "path")` as `datasets[0].path`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_yaml(text: str, name: str) -> Source:
    """Parse `text` into a Source called `name`.

    Raises:
        ConfigError: it is no YAML, holds no mapping, or is empty.
    """
    source = Source(name)
    try:
        loader = StringDateLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{name}: is empty; a configuration holds lines like `base_model: data/tiny`")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{name}:{_line(root)}: expected `key: value` lines, found {_kind(root)}")
        source.values = _Walk(loader, source).value(root, ())
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    return source


def read_yaml_file(path: Path, name: str) -> Source:
    """Parse the file at `path`; raises ConfigError as `read_yaml` does, and where it is no readable text."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not a text file in UTF-8; a configuration is YAML") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "plain text"


class _Walk:
    """Turns nodes into values; holds what the recursion shares."""

    def __init__(self, loader: yaml.SafeLoader, source: Source) -> None:
        self.loader = loader
        self.source = source
        self.open: set[int] = set()  # nodes being walked: an alias to one of them would never end

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if id(node) in self.open:
            raise ConfigError(f"{self.source.name}:{_line(node)}: {format_path(path)}: an alias that holds itself")
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
            return self.loader.construct_object(node)
        except ValueError:  # looks like a number to YAML and is none: 0b_, or thousands of digits
            raise ConfigError(
                f"{self.source.name}:{_line(node)}: {format_path(path)}: cannot be read as a value"
            ) from None

    def _item(self, node: yaml.Node, path: KeyPath) -> Any:
        self.source.places[path] = f"{self.source.name}:{_line(node)}"
        return self.value(node, path)

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        self._drop_empty_duplicates(node)
        self._note_duplicates(node, path)
        self.loader.flatten_mapping(node)  # `<<: *base`: merged keys come first, so the node's own ones win
        for key, value in node.value:
            below = (*path, str(key.value))
            self.source.places[below] = f"{self.source.name}:{_line(key)}"
            yield str(key.value), self.value(value, below)

    def _drop_empty_duplicates(self, node: yaml.MappingNode) -> None:
        """Leave out an empty key that is set elsewhere in its mapping, as happens in YAMLs with every key in them."""
        entries = [(key.value, _is_null(value)) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        filled = {name for name, empty in entries if not empty}
        node.value = [
            (key, value)
            for key, value in node.value
            if not (isinstance(key, yaml.ScalarNode) and _is_null(value) and key.value in filled)
        ]

    def _note_duplicates(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self.source.name}:{_line(key)}: a key has to be a plain name")
            if key.value in first and key.value != "<<":
                below = (*path, key.value)
                why = f"is set twice, on lines {first[key.value]} and {_line(key)}; keep one"
                self.source.problems.append((below, why))
            first.setdefault(key.value, _line(key))
