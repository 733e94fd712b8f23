"""Load a configuration from a YAML file, `key=value` overrides and flags; with `stage_one`, that of
the first stage.

All problems are reported at once, each with file and line and, for a mistyped key, the nearest
valid one.
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

from medusa_train.config.paths import PROJECT_ROOT, expand_variables, resolve_path
from medusa_train.config.schema import NOT_IN_STAGE_ONE, SHARED_WITH_STAGE_ONE, TrainConfig
from medusa_train.config.types import STAGE_ONE, Config, format_value
from medusa_train.config.yaml_lines import (
    KeyPath,
    YamlSource,
    format_path,
    read_value,
    read_yaml_file,
)
from medusa_train.errors import ConfigError
from medusa_train.masking import remember_written

C = TypeVar("C", bound=Config)

#: The key that a run's own config.yaml cannot set.
TRUST = "trust_remote_code"

#: pydantic's error type -> (limit in its context, message).
_LIMITS = {
    "greater_than_equal": ("ge", "must be {:g} or more"),
    "greater_than": ("gt", "must be more than {:g}"),
    "less_than_equal": ("le", "must be {:g} or less"),
    "less_than": ("lt", "must be less than {:g}"),
    "too_short": ("min_length", "needs {} or more items"),
}


def load_config(
    cls: type[C],
    path: Path | None,
    overrides: Iterable[str] = (),
    *,
    flags: Mapping[str, object] | None = None,
) -> C:
    """Load the configuration at `path`, then apply `overrides` and then `flags`.

    Args:
        cls: configuration class.
        path: YAML file, resolved by `resolve_path`; None for an empty configuration.
        overrides: `key=value` with a YAML value; `a.b=c` sets a key of a mapping,
            `datasets.0.path=x` one of a list.
        flags: values of command-line options by key (`--bench` is `bench`); None means not set.

    Raises:
        ConfigError: all problems, in the order of their lines.
    """
    source = YamlSource("command line") if path is None else _read(path)
    overrides = list(overrides)
    last: dict[str, str] = {}  # override of each key
    for override in overrides:
        _apply_override(source, override)
        name = override.partition("=")[0].strip()
        if last.get(name, override) != override:
            source.replaced.append(last[name])
        last[name] = override
    for name, value in (flags or {}).items():
        if value is not None:
            _set_value(source, (name,), value, cls.option_of(name).split()[0])
            source.replaced += [last[name]] if name in last else []
    given = {override.partition("=")[0].strip() for override in overrides}
    given |= {name for name, value in (flags or {}).items() if value is not None}
    if TRUST in given and TRUST in source.replaced:
        source.replaced.remove(TRUST)
    _drop_replaced(source, given, cls)
    cfg, problems = _validate(cls, source)
    lines = _problem_lines(problems, source)
    if isinstance(cfg, TrainConfig) and cfg.trains_stage_one:
        lines += _load_stage_one(cfg, source, {str(path[0]) for path, _ in problems if path})[1]
    if lines:
        raise ConfigError(list(dict.fromkeys(lines)))
    return cfg.resolved()


def stage_one_config(cfg: TrainConfig) -> TrainConfig | None:
    """Return the configuration of the stage that `cfg` trains first; None without one."""
    if not cfg.trains_stage_one:
        return None
    given = set(cfg._origins) or cfg.model_fields_set
    locations: dict[KeyPath, str] = {(name,): origin[0] for name, origin in cfg._origins.items()}
    source = YamlSource("configuration", cfg.model_dump(mode="json", include=given), locations)
    first, problems = _load_stage_one(cfg, source, set())
    if problems:
        raise ConfigError(problems)
    return first


def dump_config(cfg: Config) -> str:
    """Format the resolved values as YAML for `load_config`; keys without a value or an effect are
    omitted.
    """
    cfg = cfg.resolved()
    values = cfg.model_dump(mode="json", exclude_none=True, exclude=set(cfg.ineffective_keys))
    ordered = {name: values[name] for name in type(cfg).model_fields if name in values}
    return yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)


def _read(path: Path) -> YamlSource:
    resolved = resolve_path(path)
    if resolved is None:
        raise ConfigError(f"{path}: no such file{_nearby_files(path)}")
    if resolved.is_dir():
        nearby = _nearby_files(resolved / "config.yaml")
        raise ConfigError(
            f"{path}: is a directory, not a YAML file (medusa-eval takes a run by --model){nearby}"
        )
    source = read_yaml_file(resolved, str(path))
    remember_written(source.values)
    run = resolved.parent
    if resolved.name == "config.yaml" and any(
        (run / name).exists() for name in ("metrics.jsonl", STAGE_ONE)
    ):
        # a run's own file names its directory, wherever it is read from
        source.values["output_dir"] = str(run)
        # a run may come from anywhere: only the user's own command or YAML allows its code
        for values in (source.values, source.values.get(STAGE_ONE)):
            if isinstance(values, dict):
                trusted = values.pop(TRUST, None)
                if trusted and TRUST not in source.replaced:
                    source.replaced.append(TRUST)
    stage = source.values.get(STAGE_ONE)
    values, key = (stage, "config") if isinstance(stage, dict) else (source.values, STAGE_ONE)
    name = values.get(key)
    if isinstance(name, str) and "$" in name:
        name = values[key] = expand_variables(name)
    if isinstance(name, str) and resolve_path(name) is None and (resolved.parent / name).is_file():
        values[key] = str(resolved.parent / name)  # relative to this file
    return source


def _nearby_files(path: Path) -> str:
    """Suggest a file of the same directory, else of `configs/`, and list the directory's YAML
    files.
    """
    for directory in (path.parent, PROJECT_ROOT / path.parent, PROJECT_ROOT / "configs"):
        names = sorted(file.name for file in directory.glob("*.y*ml"))
        if names and directory not in (Path(), PROJECT_ROOT):
            short = (
                directory.relative_to(PROJECT_ROOT)
                if directory.is_relative_to(PROJECT_ROOT)
                else directory
            )
            nearest = difflib.get_close_matches(path.name, names, n=1)
            suggestion = f"; did you mean {short / nearest[0]}?" if nearest else ";"
            return f"{suggestion} {short}/ contains {', '.join(names)}"
    return ""


def _apply_override(source: YamlSource, override: str) -> None:
    name, equals, text = override.partition("=")
    location = f"override '{override}'"
    keys = re.sub(r"\[(\d+)\]", r".\1", name).strip().split(".")
    if not equals or not all(keys):
        source.problems.append(((), f"{location}: overrides are written key=value, or a.b=value"))
        return
    parsed = read_value(text, location)
    path: KeyPath = tuple(int(part) if part.isdecimal() else part for part in keys)
    _set_value(source, path, parsed.values[""], location)
    source.problems += [((*path, *below), message) for below, message in parsed.problems]


def _set_value(source: YamlSource, path: KeyPath, value: object, location: str) -> None:
    """Set the value at `path`, creating missing mappings, and record `location` for it."""
    remember_written(value, str(path[-1]))
    target: Any = source.values
    if path[0] == STAGE_ONE and len(path) > 1 and isinstance(target.get(STAGE_ONE), str):
        target[STAGE_ONE] = {"config": target[STAGE_ONE]}
    for depth, part in enumerate(path[:-1]):
        if (
            isinstance(target, dict)
            and target.get(str(part)) is None
            and isinstance(path[depth + 1], str)
        ):
            target[str(part)] = {}
            source.locations[path[: depth + 1]] = location
        child = _child(target, part)
        if not isinstance(child, (dict, list)):
            parent = format_path(path[: depth + 1])
            source.problems.append(
                ((), f"{location}: cannot set {format_path(path)}: {parent} is not a mapping")
            )
            return
        target = child
    last = path[-1]
    if isinstance(target, list) and (not isinstance(last, int) or last >= len(target)):
        source.problems.append(
            ((), f"{location}: {format_path(path[:-1])} has {len(target)} items, counted from 0")
        )
        return
    target[last if isinstance(target, list) else str(last)] = value
    for below in [below for below in source.locations if below[: len(path)] == path]:
        del source.locations[below]
    source.locations[path] = location


def _drop_replaced(source: YamlSource, given: set[str], cls: type[Config]) -> None:
    """Drop the keys of the file that stand against a key that was `given` beside it."""
    for name, other in cls.replaces:
        replaces = name in given and other not in given and bool(source.values.get(name))
        if replaces and source.values.pop(other, None):
            source.replaced.append(other)


def _child(target: Any, part: str | int) -> Any:
    if isinstance(target, dict):
        return target.get(str(part))
    return target[part] if isinstance(part, int) and part < len(target) else None


def _load_stage_one(
    cfg: TrainConfig, outer: YamlSource, invalid: set[str]
) -> tuple[TrainConfig, list[str]]:
    """Build the configuration of stage one: its file, then the keys that it shares with `cfg`, then
    its overrides.
    """
    written, location = outer.values[STAGE_ONE], outer.location((STAGE_ONE,))
    overrides = dict(written) if isinstance(written, dict) else {"config": str(written)}
    file = overrides.pop("config", None)
    try:
        source = YamlSource(location) if file is None else _read(Path(expand_variables(str(file))))
    except ConfigError as error:
        return cfg, [f"{location}: {STAGE_ONE}: {error}"]
    if source.values.get(STAGE_ONE):
        source.problems.append(((STAGE_ONE,), "a stage one cannot have a stage one itself"))
    for key in NOT_IN_STAGE_ONE:
        source.values.pop(key, None)
    for key in SHARED_WITH_STAGE_ONE:
        if outer.values.get(key) is not None and key not in invalid:
            source.values[key] = outer.values[key]
            source.locations = {
                path: where for path, where in source.locations.items() if path[0] != key
            }
            source.locations |= {
                path: where for path, where in outer.locations.items() if path[0] == key
            }
    source.values |= cfg.stage_one_values
    for key, value in overrides.items():
        source.locations[(key,)] = f"{outer.location((STAGE_ONE, key))}: {STAGE_ONE}"
        if key in NOT_IN_STAGE_ONE:
            source.problems.append(((key,), "is set for the whole run; remove it"))
        else:
            source.values[key] = value
    _drop_replaced(source, set(overrides), TrainConfig)
    first, problems = _validate(TrainConfig, source)
    unknown = invalid.intersection(SHARED_WITH_STAGE_ONE)  # reported for the whole run
    problems = [(path, text) for path, text in problems if not path or path[0] not in unknown]
    if not unknown and not any(path and path[0] in SHARED_WITH_STAGE_ONE for path, _ in problems):
        first = first.resolved()
        problems += [
            ((*key.split("."),), message)
            for key, message in cfg.stage_one_mismatches(first).items()
        ]
    return first, _problem_lines(problems, source)


def _validate(cls: type[C], source: YamlSource) -> tuple[C, list[tuple[KeyPath, str]]]:
    """Validate every key, then the constraints between the valid ones, so that no problem hides
    another.
    """
    problems: list[tuple[KeyPath, str]] = list(source.problems)
    problems.extend(_missing_spaces(source.values, ()))
    cfg = cast(C, cls.model_construct())
    invalid: set[str] = set()
    given: set[str] = set()
    ignored = list(source.replaced)
    for name, value in source.values.items():
        if name in cls.ignored_axolotl_keys:
            ignored.extend([name] if value is not None else [])
        elif name not in cls.model_fields:
            problems.append(((name,), _unknown(name, cls)))
        elif value is not None:
            given.add(name)
            kept = _without_nulls(value, cls.model_fields[name].annotation)
            try:
                setattr(cfg, name, kept)
            except ValidationError as error:
                invalid.add(name)
                problems.extend(_explain(detail, cls) for detail in error.errors(include_url=False))
    for name, info in cls.model_fields.items():
        if info.is_required() and name not in given:
            invalid.add(name)
            how = f"set it in the file, or add {name}=... to the command"
            problems.append(((name,), f"is missing ({info.description}); {how}"))
    problems.extend(_violations(cfg, given, invalid, source))
    cfg._ignored = tuple(sorted(ignored))
    cfg._origins = {name: _origin(source, name) for name in given}
    return cfg, problems


def _origin(source: YamlSource, name: str) -> tuple[str, ...]:
    """Return the location of a key and those of overrides within its value."""
    overrides = (
        where
        for path, where in source.locations.items()
        if path[0] == name and where.startswith("override ")
    )
    return tuple(dict.fromkeys([source.location((name,)), *overrides]))


def _without_nulls(value: Any, annotation: Any) -> Any:
    """Drop the keys of a section that are null, which means the default.

    Unknown keys stay, to be refused, and so does null in mappings of free names, where it is a
    value.
    """
    if isinstance(value, list):
        return [_without_nulls(item, annotation) for item in value]
    section = _section(annotation)
    if section is None or not isinstance(value, dict):
        return value
    return {
        key: _without_nulls(item, section.model_fields[key].annotation)
        if key in section.model_fields
        else item
        for key, item in value.items()
        if item is not None or key not in section.model_fields
    }


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the configuration class in an annotation, such as that of `list[X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (_section(inner) for inner in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def _missing_spaces(value: Any, path: KeyPath) -> Iterable[tuple[KeyPath, str]]:
    """Yield keys such as `x:1` in `{x:1}`, which YAML reads as a name without a value."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _missing_spaces(item, (*path, index))
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        name, colon, rest = str(key).partition(":")
        if item is None and colon and rest:
            yield (*path, str(key)), f"a space is missing after the colon: {name}: {rest}"
        yield from _missing_spaces(item, (*path, str(key)))


def _violations(
    cfg: Config, given: set[str], invalid: set[str], source: YamlSource
) -> Iterable[tuple[KeyPath, str]]:
    for constraint in type(cfg).constraints:
        if invalid.isdisjoint(constraint.keys) and constraint.violated(cfg):
            key, *others = [name for name in constraint.keys if name in given] or constraint.keys[
                :1
            ]
            also = ", ".join(f"{name}: {source.location((name,))}" for name in others)
            yield (
                (key,),
                f"{format_value(getattr(cfg, key))}: {constraint.message}"
                + (f" ({also})" if also else ""),
            )


#: Short names that other programs use, with the keys that they mean here.
_COMMON_NAMES = {
    "lr": ("learning_rate",),
    "bs": ("micro_batch_size", "batch_size"),
    "bsz": ("micro_batch_size", "batch_size"),
    "grad_accum": ("gradient_accumulation_steps",),
    "heads": ("medusa_num_heads",),
    "num_heads": ("medusa_num_heads",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
    "clip": ("max_grad_norm",),
    "max_length": ("sequence_len", "max_new_tokens"),
    "max_tokens": ("max_new_tokens",),
    "model_name_or_path": ("base_model",),
    "out": ("output_dir", "output"),
    "temp": ("temperature",),
}


def _unknown(name: str, owner: type[BaseModel]) -> str:
    for meant in _COMMON_NAMES.get(name.lower(), ()):
        if meant in owner.model_fields:
            return f"unknown key; did you mean {meant}?"
    if name in (hints := getattr(owner, "axolotl_hints", {})):
        return str(hints[name])
    nearest = difflib.get_close_matches(name.lower(), owner.model_fields, n=1, cutoff=0.65)
    return (
        f"unknown key; did you mean {nearest[0]}?"
        if nearest
        else "unknown key; see docs/configuration.md"
    )


def _switches_like(name: str, cls: type[BaseModel]) -> list[str]:
    """Return the keys with true or false whose names hold `name`."""
    return [
        key for key, field in cls.model_fields.items() if field.annotation is bool and name in key
    ]


def _explain(detail: ErrorDetails, cls: type[BaseModel]) -> tuple[KeyPath, str]:
    """Convert a pydantic error to the key's path and a message."""
    path = tuple(detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return path, _unknown(str(path[-1]), _owner(cls, path))
    if kind == "missing":
        return path, "is missing"
    if kind in _LIMITS:
        name, wording = _LIMITS[kind]
        return path, f"{wording.format(context[name])}, got {format_value(value)}"
    if kind == "literal_error":
        return (
            path,
            f"must be {str(context['expected']).replace(chr(39), '')}, got {format_value(value)}",
        )
    if kind == "list_type":
        return path, f"expected a list, got {format_value(value)}"
    if kind in ("model_type", "dict_type"):
        text = f"expected `key: value` lines, got {format_value(value)}"
        switches = _switches_like(str(path[-1]), cls) if isinstance(value, bool) else []
        return path, f"{text}; did you mean {switches[0]}?" if switches else text
    return path, detail[
        "msg"
    ] if kind == "config_type" else f"{detail['msg']}, got {format_value(value)}"


def _owner(cls: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """Return the configuration class that the last key of `path` belongs to."""
    owner = cls
    for part in path[:-1]:
        if isinstance(part, str) and part in owner.model_fields:
            annotation = owner.model_fields[part].annotation
            inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            owner = next((kind for kind in inner if issubclass(kind, BaseModel)), owner)
    return owner


def _problem_lines(problems: list[tuple[KeyPath, str]], source: YamlSource) -> list[str]:
    """Format problems in the order of the file."""

    def line(problem: tuple[KeyPath, str]) -> float:
        number = source.location(problem[0]).removeprefix(f"{source.name}:")
        return int(number) if number.isdigit() else float("inf")

    return [_problem_line(path, message, source) for path, message in sorted(problems, key=line)]


def _problem_line(path: KeyPath, message: str, source: YamlSource) -> str:
    if not path:
        return message
    location, key = source.location(path), format_path(path)
    return (
        f"{location}: {message}"
        if location == f"--{key.replace('_', '-')}"
        else f"{location}: {key}: {message}"
    )
