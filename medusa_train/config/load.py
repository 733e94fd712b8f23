"""One validated configuration from a YAML file, `key=value` overrides and flags. Knows no particular key.

Every problem is reported at once, each with its place and, for a mistyped key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.config.types import Config, show
from medusa_train.config.yaml_lines import KeyPath, Source, StringDateLoader, format_path, read_yaml_file
from medusa_train.errors import ConfigError

C = TypeVar("C", bound=Config)

_LIMITS = {
    "greater_than_equal": ("ge", "has to be {:g} or more"),
    "greater_than": ("gt", "has to be more than {:g}"),
    "less_than_equal": ("le", "has to be {:g} or less"),
    "less_than": ("lt", "has to be less than {:g}"),
    "too_short": ("min_length", "needs {} or more items"),
}


def load_config(
    cls: type[C],
    path: Path | None,
    overrides: Iterable[str] = (),
    *,
    flags: Mapping[str, object] | None = None,
) -> C:
    """Read the configuration at `path` and put `overrides` and then `flags` over it.

    Args:
        cls: the configuration class.
        path: YAML file, looked for as `resolve_path` does; None for none.
        overrides: `key=value`, the value being YAML; `a.b=c` reaches into mappings, `datasets.0.path=x` into lists.
        flags: values of command-line options by key (`--bench` is `bench`); None means not given.

    Returns:
        The validated configuration, `resolved()`; its `ignored` lists what was set without effect.

    Raises:
        ConfigError: with every problem, in the order of the lines.
    """
    source = Source("command line") if path is None else _read(path)
    for override in overrides:
        _apply_override(source, override)
    for name, value in (flags or {}).items():
        if value is not None:
            _put(source, (name,), value, f"--{name.replace('_', '-')}")
    return _validate(cls, source)


def dump_config(cfg: Config) -> str:
    """Write the resolved values as YAML that `load_config` reads again; keys without a value or effect are left out."""
    cfg = cfg.resolved()
    values = cfg.model_dump(mode="json", exclude_none=True, exclude=set(cfg.ineffective_keys))
    ordered = {name: values[name] for name in type(cfg).model_fields if name in values}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)


def _read(path: Path) -> Source:
    found = resolve_path(path)
    if found is None:
        raise ConfigError(f"{path}: no such file{_nearby_files(path)}")
    if found.is_dir():
        raise ConfigError(f"{path}: is a directory, not a YAML file{_nearby_files(found / 'config.yaml')}")
    return read_yaml_file(found, str(path))


def _nearby_files(path: Path) -> str:
    """Say what may have been meant: files of the same directory, else of `configs/`."""
    shipped = PROJECT_ROOT / "configs"
    for directory in (path.parent, PROJECT_ROOT / path.parent, shipped):
        names = sorted(file.name for file in directory.glob("*.y*ml"))
        if names and directory not in (Path(), PROJECT_ROOT):
            inside = directory.is_relative_to(PROJECT_ROOT)
            shown = directory.relative_to(PROJECT_ROOT) if inside else directory
            near = difflib.get_close_matches(path.name, names, n=1)
            return (f"; did you mean {shown / near[0]}?" if near else ";") + f" {shown}/ holds {', '.join(names)}"
    return ""


def _apply_override(source: Source, override: str) -> None:
    name, equals, text = override.partition("=")
    place = f"override '{override}'"
    keys = re.sub(r"\[(\d+)\]", r".\1", name).strip().split(".")
    if not equals or not all(keys):
        source.problems.append(((), f"{place}: overrides are written key=value, or a.b=value"))
        return
    try:
        value = yaml.load(text, StringDateLoader)
    except (yaml.YAMLError, ValueError):
        value = text  # a file name or a word that happens to be no YAML
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in keys)
    _put(source, path, value, place)


def _put(source: Source, path: KeyPath, value: object, place: str) -> None:
    """Set the value at `path`, making the mappings on the way; note `place` for it and all below it."""
    target: Any = source.values
    for depth, part in enumerate(path[:-1]):
        if isinstance(target, dict) and target.get(str(part)) is None and isinstance(path[depth + 1], str):
            target[str(part)] = {}
            source.places[path[: depth + 1]] = place
        child = _child(target, part)
        if not isinstance(child, (dict, list)):
            above = format_path(path[: depth + 1])
            source.problems.append(((), f"{place}: {above} holds nothing that {format_path(path)} could be set in"))
            return
        target = child
    last = path[-1]
    if isinstance(target, list) and (not isinstance(last, int) or last >= len(target)):
        source.problems.append(((), f"{place}: {format_path(path[:-1])} has {len(target)} items, counted from 0"))
        return
    target[last if isinstance(target, list) else str(last)] = value
    for known in [known for known in source.places if known[: len(path)] == path]:
        del source.places[known]
    source.places[path] = place


def _child(target: Any, part: str | int) -> Any:
    if isinstance(target, dict):
        return target.get(str(part))
    return target[part] if isinstance(part, int) and part < len(target) else None


def _validate(cls: type[C], source: Source) -> C:
    """Check key by key, then the combinations of the keys that are usable, so that no mistake hides another."""
    problems: list[tuple[KeyPath, str]] = list(source.problems)
    cfg = cast(C, cls.model_construct())
    unusable: set[str] = set()
    given: set[str] = set()
    ignored: list[str] = []
    for name, value in source.values.items():
        if name in cls.ignored_axolotl_keys:
            ignored.extend([name] if value is not None else [])
        elif name not in cls.model_fields:
            problems.append(((name,), _unknown(name, cls)))
        elif (value := _without_nulls(value)) is not None:
            given.add(name)
            try:
                setattr(cfg, name, value)
            except ValidationError as error:
                unusable.add(name)
                problems.extend(_explain(detail, cls) for detail in error.errors(include_url=False))
    for name, info in cls.model_fields.items():
        if info.is_required() and name not in given:
            unusable.add(name)
            problems.append(((name,), f"is missing; it names {info.description}"))
    problems.extend(_combinations(cfg, given, unusable, source))
    if problems:
        raise ConfigError([_line_of(path, why, source) for path, why in _in_file_order(problems, source)])
    cfg._ignored = tuple(sorted(ignored))
    cfg._places = {name: _origin(source, name) for name in given}
    return cfg.resolved()


def _origin(source: Source, name: str) -> tuple[str, ...]:
    """Where a key stands, and the overrides that reach into its value."""
    own = source.place((name,))
    inside = (place for path, place in source.places.items() if path[0] == name and place.startswith("override "))
    return tuple(dict.fromkeys([own, *inside]))


def _without_nulls(value: Any) -> Any:
    """Drop null entries of mappings, which mean the default, at every depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _combinations(cfg: Config, given: set[str], unusable: set[str], source: Source) -> Iterable[tuple[KeyPath, str]]:
    for rule in type(cfg).constraints:
        if unusable.isdisjoint(rule.keys) and rule.when(cfg):
            shown, *others = [name for name in rule.keys if name in given] or rule.keys[:1]
            also = ", ".join(f"{name}: {source.place((name,))}" for name in others)
            yield (shown,), f"{show(getattr(cfg, shown))}: {rule.why}" + (f" ({also})" if also else "")


def _unknown(name: str, owner: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name.lower(), owner.model_fields, n=1, cutoff=0.55)
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key; the README lists the keys"


def _explain(detail: ErrorDetails, cls: type[BaseModel]) -> tuple[KeyPath, str]:
    """Say in the user's words what pydantic found wrong, and at which key."""
    path = tuple(detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, _unknown(str(path[-1]), _owner(cls, path))
    if kind == "missing":
        return path, "is missing"
    if kind in _LIMITS:
        name, wording = _LIMITS[kind]
        return path, f"{wording.format(context[name])}, got {show(value)}"
    if kind == "literal_error":
        return path, f"has to be {str(context['expected']).replace(chr(39), '')}, got {show(value)}"
    if kind == "list_type":
        return path, f"expected a list, got {show(value)}"
    if kind in ("model_type", "dict_type"):
        return path, f"expected `key: value` lines, got {show(value)}"
    return path, detail["msg"] if kind == "config_type" else f"{detail['msg']}, got {show(value)}"


def _owner(cls: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """The class that the last key of `path` belongs to."""
    owner = cls
    for part in path[:-1]:
        if isinstance(part, str) and part in owner.model_fields:
            annotation = owner.model_fields[part].annotation
            inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            owner = next((kind for kind in inner if issubclass(kind, BaseModel)), owner)
    return owner


def _in_file_order(problems: list[tuple[KeyPath, str]], source: Source) -> list[tuple[KeyPath, str]]:
    def line(problem: tuple[KeyPath, str]) -> float:
        number = source.place(problem[0]).removeprefix(f"{source.name}:")
        return int(number) if number.isdigit() else float("inf")

    return sorted(problems, key=line)


def _line_of(path: KeyPath, why: str, source: Source) -> str:
    return f"{source.place(path)}: {format_path(path)}: {why}" if path else why
