"""A configuration as it was written: its values, where each was set, and what is wrong with them.

`read_yaml` reads a file, with the line of every key. `Source.set` sets a key of the command line.
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
#: How YAML writes null.
_NULLS = ("", "~", "null", "Null", "NULL")
_STR, _INT, _NULL, _TIMESTAMP = (
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "null", "timestamp")
)


def format_path(path: KeyPath) -> str:
    """Format `("datasets", 0, "path")` as `datasets[0].path`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


@dataclass(frozen=True)
class Place:
    """Where a value was set: on a line of a file, or by a word of the command line.

    Attributes:
        source: the file, or the word as it was typed: `key=value` or `--option`.
        line: line number in the file, counted from 1.
        is_word: whether it is a word of the command line.
        section: `stage_one`, for values of stage one that come from this key.
    """

    source: str
    line: int | None = None
    is_word: bool = False
    section: str = ""

    @property
    def is_override(self) -> bool:
        """Whether it is `key=value`."""
        return self.is_word and not self.source.startswith("--")

    def __str__(self) -> str:
        text = f"override '{self.source}'" if self.is_override else self.source
        if self.line is not None:
            text += f":{self.line}"
        return f"{text}: {self.section}" if self.section else text


@dataclass(frozen=True)
class Problem:
    """What is wrong with the value at `path`, which was set at `place`. If the path is empty, the
    place itself is wrong.
    """

    place: Place
    path: KeyPath
    message: str

    def __str__(self) -> str:
        name = format_path(self.path)
        is_said = not name or str(self.place) == f"--{name.replace('_', '-')}"
        return (
            f"{self.place}: {self.message}" if is_said else f"{self.place}: {name}: {self.message}"
        )


@dataclass
class Source:
    """The values of a configuration, and where each of them was set.

    Attributes:
        name: the file's name, or a description in place of it, for messages.
        typed: texts of overrides, by path, if YAML does not read them as text.
        ignored: settings without effect, since other settings replace them.
        is_run: it is a run's own config.yaml.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    typed: dict[KeyPath, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    is_run: bool = False

    def place(self, path: KeyPath) -> Place:
        """Return the place of `path`, else of its nearest parent, else the source.

        If the file has a single item in place of a list, the index of the item is left out.
        """
        for length in range(len(path), 0, -1):
            parent = path[:length]
            for written in (parent, tuple(part for part in parent if isinstance(part, str))):
                if written in self.places:
                    return self.places[written]
        return Place(self.name)

    def report(self, path: KeyPath, message: str) -> None:
        """Add the problem of the value at `path`."""
        self.problems.append(Problem(self.place(path), path, message))

    def set(self, path: KeyPath, value: object, place: Place) -> None:
        """Set the value at `path`, creating missing mappings. An error becomes a problem.

        Words of the command line that the value replaces become ignored.
        """
        remember_written(value, str(path[-1]))
        # 1. Go down to the mapping or the list that holds the value.
        target: Any = self.values
        for depth, part in enumerate(path):
            within = format_path(path[:depth])
            wrong = "" if isinstance(target, dict) else f"{within} is not a mapping"
            if isinstance(target, list):
                has_item = isinstance(part, int) and part < len(target)
                wrong = "" if has_item else f"{within} has {len(target)} items, counted from 0"
            if wrong:
                self.problems.append(Problem(place, (), f"cannot set {format_path(path)}: {wrong}"))
                return
            name = part if isinstance(target, list) else str(part)
            if depth == len(path) - 1:
                target[name] = value
            elif isinstance(target, dict) and target.get(name) is None:
                target[name] = {} if isinstance(path[depth + 1], str) else None
                self.places[path[: depth + 1]] = place
            target = target[name]
        # 2. Remove what was set there before.
        replaced = [below for below in self.places if below[: len(path)] == path]
        for earlier in dict.fromkeys(self.places.pop(below) for below in replaced):
            if earlier.is_word and earlier != place:
                self.ignored.append(earlier.source)
        for below in replaced:
            self.typed.pop(below, None)
        self.places[path] = place

    def set_typed(self, path: KeyPath, text: str, place: Place) -> None:
        """Set the value of `text` read as YAML. `typed` keeps the text, for keys that take text."""
        read = Source("")
        try:
            value = _parse(text, read)
        except (yaml.YAMLError, RecursionError, ConfigError):
            value = text
        is_block = isinstance(value, (list, dict)) and not text.startswith(("[", "{"))
        is_comment = value is None and text.strip() not in _NULLS
        is_plain = isinstance(value, str) and not text.strip().startswith(("'", '"'))
        is_meant_as_typed = is_block or is_comment or is_plain  # `a: b`, `#3` and `a # b`
        self.set(path, text if is_meant_as_typed else value, place)
        if value is not None and not is_meant_as_typed:
            self.typed[path] = text  # after `set`, which drops the texts of earlier overrides
        self.problems += [Problem(place, (*path, *at.path), at.message) for at in read.problems]


class _Loader(yaml.SafeLoader):
    """Reads dates, and numbers such as 0123, 1_000, 12:30 and 0x1F, as text: they may be names."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _TIMESTAMP)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):  # !!int x, !!bool maybe, !!timestamp x
            reason = "cannot be read as a value"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None
        if isinstance(value, str):
            # JSON writes an emoji as two escapes, which PyYAML does not join
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value


_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))


def read_yaml(text: str, name: str) -> Source:
    """Parse `text`. `name` is the file's name in places and messages."""
    source = Source(name)
    try:
        source.values = _parse(text, source)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark and mark.line + 1
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        if isinstance(error, yaml.reader.ReaderError):  # a control character
            line = text.count("\n", 0, error.position) + 1
            reason = f"the character #x{error.character:04x}: {error.reason}"
        if isinstance(error, RecursionError):
            reason = "nested too deeply, or an alias contains itself"
        raise ConfigError(f"{Place(name, line)}: not valid YAML: {reason}") from None
    if source.values is None:
        raise ConfigError(
            f"{name}: is empty; a configuration holds lines like `base_model: data/tiny`"
        )
    if not isinstance(source.values, dict):
        kind = "a list" if isinstance(source.values, list) else "plain text"
        line = _Loader(text).get_single_node().start_mark.line + 1
        raise ConfigError(f"{name}:{line}: expected `key: value` lines, found {kind}")
    return source


def read_yaml_file(path: Path, name: str) -> Source:
    """Parse the file at `path`."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: is not a text file in UTF-8; a configuration is YAML") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def _parse(text: str, source: Source) -> Any:
    """Return the value of a YAML text; its places and problems are added to `source`."""
    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return None
    _note_places(root, (), source)
    return loader.construct_document(root)


def _note_places(node: yaml.Node, path: KeyPath, source: Source) -> None:
    """Note the line of every key and item below a node; the keys of a mapping are text."""
    entries: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        entries = [(index, item, item) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        node.value = list(_kept_entries(node, path, source))
        for key, value in node.value:
            if key.value == "<<":  # merged keys; keys of the mapping itself overwrite their places
                _note_places(value, path, source)
            else:
                key.tag = _STR
                entries.append((key.value, key, value))
    for name, written, value in entries:
        inner = (*path, name)
        source.places[inner] = Place(source.name, written.start_mark.line + 1)
        _note_places(value, inner, source)


def _kept_entries(
    node: yaml.MappingNode, path: KeyPath, source: Source
) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield the entries of a mapping.

    An empty key is left out if the mapping also sets it, since some files list every key as empty
    first. Other keys that are set twice become problems.
    """
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            place = Place(source.name, key.start_mark.line + 1)
            raise ConfigError(f"{place}: keys must be plain names")
    filled = {key.value for key, value in node.value if value.tag != _NULL}
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if value.tag == _NULL and key.value in filled:
            continue
        if key.value in lines and key.value != "<<":
            first = lines[key.value]
            where = "" if first == line else f", on lines {first} and {line}"
            problem = f"is set twice{where}; keep one"
            place = Place(source.name, line)
            source.problems.append(Problem(place, (*path, key.value), problem))
        lines.setdefault(key.value, line)
        yield key, value
