"""Load a configuration from a YAML file, `key=value` overrides and flags; with `stage_one`, that of
the first stage.

All problems are reported at once, each with file and line and, for a mistyped key, the nearest
valid one.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from medusa_train.config.paths import PROJECT_ROOT, expand_variables, resolve_path
from medusa_train.config.schema import (
    NOT_IN_STAGE_ONE,
    SHARED_WITH_STAGE_ONE,
    DatasetConfig,
    TrainConfig,
)
from medusa_train.config.types import STAGE_ONE, Config, format_value
from medusa_train.config.yaml_lines import (
    KeyPath,
    Problem,
    YamlSource,
    format_path,
    read_value,
    read_yaml_file,
)
from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import remember_written

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
    # 1. The file.
    if path is None:
        source = YamlSource("command line")
    else:
        source = _read(path)
    # 2. The overrides; of several for a key the last counts.
    last: dict[KeyPath, str] = {}  # override of each key
    for override in overrides:
        path_in_values = _apply_override(source, override, cls)
        _name_replaced(source, last, path_in_values, override)
        last[path_in_values] = override
    given = set(map(format_path, last))
    # 3. The flags, which count before overrides.
    for name, value in (flags or {}).items():
        if value is None:
            continue
        option = cls.option_of(name).split()[0]
        _set_value(source, (name,), value, option)
        given.add(name)
        _name_replaced(source, last, (name,), option)
    # 4. What stands against a key of the command.
    if TRUST in given and TRUST in source.replaced:
        source.replaced.remove(TRUST)
    _drop_replaced(source, given, cls)
    # 5. All problems, those of stage one included.
    cfg, problems = _validate(cls, source)
    lines = _problem_lines(problems, source)
    if isinstance(cfg, TrainConfig) and cfg.trains_stage_one:
        invalid = {problem.key for problem in problems if problem.key is not None}
        _, stage_one_lines = _load_stage_one(cfg, source, invalid)
        lines += stage_one_lines
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
    stage_one, lines = _load_stage_one(cfg, source, set())
    if lines:
        raise ConfigError(lines)
    return stage_one


def dump_config(cfg: Config) -> str:
    """Format the resolved values as YAML for `load_config`; keys without a value or an effect are
    omitted.
    """
    cfg = cfg.resolved()
    values = cfg.model_dump(mode="json", exclude_none=True, exclude=set(cfg.ineffective_keys))
    ordered = {name: values[name] for name in type(cfg).model_fields if name in values}
    return dump_yaml(ordered)


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Format values as YAML, in the form in which a run writes its config.yaml."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110)


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
    directory = resolved.parent
    is_run = (directory / "metrics.jsonl").exists() or (directory / STAGE_ONE).exists()
    if resolved.name == "config.yaml" and is_run:
        # a run's own file names its directory, wherever it is read from
        source.values["output_dir"] = str(directory)
        _drop_trust(source)
    stage = source.values.get(STAGE_ONE)
    if isinstance(stage, dict):
        _resolve_stage_file(stage, "config", directory)
    else:
        _resolve_stage_file(source.values, STAGE_ONE, directory)
    return source


def _drop_trust(source: YamlSource) -> None:
    """Drop the key that allows a model's code from a run's own file, and that of its stage one.

    A run may come from anywhere: only the user's own command or YAML allows code.
    """
    allowed = bool(source.values.pop(TRUST, False))
    stage = source.values.get(STAGE_ONE)
    if isinstance(stage, dict):
        allowed_in_stage = bool(stage.pop(TRUST, False))
        allowed = allowed or allowed_in_stage
    if allowed:
        source.replaced.append(TRUST)


def _resolve_stage_file(values: dict[str, Any], key: str, directory: Path) -> None:
    """Complete the name of stage one's file, which may be relative to the `directory` of the file
    that names it.
    """
    name = values.get(key)
    if not isinstance(name, str):
        return
    if "$" in name:
        name = expand_variables(name)
    if resolve_path(name) is None and os.path.isfile(directory / name):
        name = str(directory / name)
    values[key] = name


def _nearby_files(path: Path) -> str:
    """Suggest the YAML files with the most similar names: of the same directory, else of
    `configs/`.
    """
    for directory in (path.parent, PROJECT_ROOT / path.parent, PROJECT_ROOT / "configs"):
        names = []
        if os.path.isdir(directory):  # False for a name that is too long
            names = [file.name for file in directory.glob("*.y*ml")]
        if names and directory not in (Path(), PROJECT_ROOT):
            short = directory
            if directory.is_relative_to(PROJECT_ROOT):
                short = directory.relative_to(PROJECT_ROOT)
            nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0)
            return f"; did you mean {' or '.join(str(short / name) for name in nearest)}?"
    return ""


def _name_replaced(
    source: YamlSource, last: dict[KeyPath, str], path: KeyPath, setting: str
) -> None:
    """Name the overrides of `last` that `setting`, of the key at `path`, replaces: those of the key
    itself, however they are written, and of what stands below it.
    """
    for below in list(last):
        if below[: len(path)] != path:
            continue
        earlier = last.pop(below)
        if earlier != setting:
            source.replaced.append(earlier)


def _apply_override(source: YamlSource, override: str, cls: type[Config]) -> KeyPath:
    """Set the value of an override, and return the path of its key."""
    name, equals, text = override.partition("=")
    location = f"override '{override}'"
    keys = re.sub(r"\[(\d+)\]", r".\1", name).strip().split(".")
    if not equals or not all(keys):
        message = f"{location}: overrides are written key=value, or a.b=value"
        source.problems.append(Problem((), message))
        return (name,)
    parts: list[str | int] = []
    for part in keys:
        if part.isdecimal():
            parts.append(int(part))
        else:
            parts.append(part)
    path = tuple(parts)
    parsed = read_value(text, location, is_text=_is_text(text, cls, path))
    _set_value(source, path, parsed.values[""], location)
    for problem in parsed.problems:
        source.problems.append(Problem((*path, *problem.path), problem.message))
    return path


def _types_of(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, such as str and None of `Text | None`."""
    if get_origin(annotation) is Annotated:
        return _types_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _types_of(part)]
    return [annotation]


def _types_at(cls: type[BaseModel], path: KeyPath) -> list[Any]:
    """Return the types that the value at `path` may have; none where that is not known."""
    found: list[Any] = [cls]
    for part in path:
        inner: list[Any] = []
        for kind in found:
            if isinstance(part, int) and get_origin(kind) is list:
                inner += _types_of(get_args(kind)[0])
            elif isinstance(part, str) and get_origin(kind) is dict:
                inner += _types_of(get_args(kind)[1])
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                field = kind.model_fields.get(str(part))
                inner += [] if field is None else _types_of(field.annotation)
        found = inner
        if part == STAGE_ONE:
            found.append(TrainConfig)
    return found


def _is_text(text: str, cls: type[BaseModel], path: KeyPath) -> bool:
    """Return whether `text` is the value at `path` as it is typed: not where only a number or a
    name of a list is allowed, nor a list or a mapping in brackets.
    """
    kinds = [kind for kind in _types_at(cls, path) if kind is not type(None)]
    if kinds == [str]:
        return True
    for kind in list(kinds):
        if get_origin(kind) in (list, tuple):  # a single item may stand for a list
            kinds += _types_of(get_args(kind)[0])
    may_be_text = str in kinds or DatasetConfig in kinds
    return may_be_text and not text.startswith(("[", "{"))


def _set_value(source: YamlSource, path: KeyPath, value: object, location: str) -> None:
    """Set the value at `path`, creating missing mappings, and record `location` for it."""
    remember_written(value, str(path[-1]))
    target: Any = source.values
    if path[0] == STAGE_ONE and len(path) > 1 and isinstance(target.get(STAGE_ONE), str):
        target[STAGE_ONE] = {"config": target[STAGE_ONE]}
    # 1. Go down to the mapping or list that holds the value.
    for depth, part in enumerate(path[:-1]):
        is_missing = isinstance(target, dict) and target.get(str(part)) is None
        if is_missing and isinstance(path[depth + 1], str):
            target[str(part)] = {}
            source.locations[path[: depth + 1]] = location
        child = _child(target, part)
        if not isinstance(child, (dict, list)):
            parent = format_path(path[: depth + 1])
            message = f"{location}: cannot set {format_path(path)}: {parent} is not a mapping"
            source.problems.append(Problem((), message))
            return
        target = child
    # 2. Set it.
    last = path[-1]
    if isinstance(target, dict):
        target[str(last)] = value
    elif isinstance(last, int) and last < len(target):
        target[last] = value
    else:
        parent = format_path(path[:-1])
        message = f"{location}: {parent} has {len(target)} items, counted from 0"
        source.problems.append(Problem((), message))
        return
    # 3. What stood below it in the file is gone.
    for below in list(source.locations):
        if below[: len(path)] == path:
            del source.locations[below]
    source.locations[path] = location


def _drop_replaced(source: YamlSource, given: set[str], cls: type[Config]) -> None:
    """Drop the keys of the file that stand against a key that was `given` beside it."""
    for name, other in cls.replaces:
        replaces = name in given and other not in given and bool(source.values.get(name))
        if replaces and source.values.pop(other, None):
            source.replaced.append(other)


def _child(target: Any, part: str | int) -> Any:
    """Return what a mapping or a list has under `part`, or None."""
    if isinstance(target, dict):
        return target.get(str(part))
    if isinstance(part, int) and part < len(target):
        return target[part]
    return None


def _load_stage_one(
    cfg: TrainConfig, outer: YamlSource, invalid: set[str]
) -> tuple[TrainConfig, list[str]]:
    """Build the configuration of stage one; `invalid` are the keys of the whole run, `cfg`, that
    have problems.

    Its file comes first, then the keys that it shares with the whole run, then its own keys.

    Returns: It, and a line for each of its problems.
    """
    # 1. What stands under `stage_one`: a file, and keys that are set beside it.
    location = outer.location((STAGE_ONE,))
    written = outer.values[STAGE_ONE]
    if not isinstance(written, dict):
        written = {"config": str(written)}
    own_keys = dict(written)
    file = own_keys.pop("config", None)
    # 2. Its file.
    source = YamlSource(location)
    if file is not None:
        try:
            source = _read(Path(expand_variables(str(file))))
        except ConfigError as error:
            return cfg, [f"{location}: {STAGE_ONE}: {error}"]
    if source.values.get(STAGE_ONE):
        source.problems.append(Problem((STAGE_ONE,), "a stage one cannot have a stage one itself"))
    # 3. The keys that it has from the whole run.
    for key in NOT_IN_STAGE_ONE:
        source.values.pop(key, None)
    for key in SHARED_WITH_STAGE_ONE:
        is_set = outer.values.get(key) is not None
        if is_set and key not in invalid:
            source.take(key, outer)
    source.values |= cfg.stage_one_values
    # 4. Its own keys.
    for key, value in own_keys.items():
        source.locations[(key,)] = f"{outer.location((STAGE_ONE, key))}: {STAGE_ONE}"
        if key in NOT_IN_STAGE_ONE:
            source.problems.append(Problem((key,), "is set for the whole run; remove it"))
        else:
            source.values[key] = value
    _drop_replaced(source, set(own_keys), TrainConfig)
    # 5. Its problems. Those of shared keys that are invalid in the whole run are reported there.
    stage_one, found = _validate(TrainConfig, source)
    reported = invalid.intersection(SHARED_WITH_STAGE_ONE)
    problems = [problem for problem in found if problem.key not in reported]
    # 6. Its heads have to be those of the run: they are compared where all shared keys are valid.
    has_invalid_shared_key = any(problem.key in SHARED_WITH_STAGE_ONE for problem in problems)
    if not reported and not has_invalid_shared_key:
        stage_one = stage_one.resolved()
        for name, message in cfg.stage_one_mismatches(stage_one).items():
            problems.append(Problem(tuple(name.split(".")), message))
    return stage_one, _problem_lines(problems, source)


def _validate(cls: type[C], source: YamlSource) -> tuple[C, list[Problem]]:
    """Validate every key, then the constraints between the valid ones, so that no problem hides
    another.
    """
    problems: list[Problem] = list(source.problems)
    problems.extend(_text_problems(source.values, ()))
    cfg = cast(C, cls.model_construct())
    invalid: set[str] = set()
    given: set[str] = set()
    ignored = list(source.replaced)
    # 1. Each key that is written; null means the default.
    for name, value in source.values.items():
        is_ignored = name in cls.ignored_axolotl_keys
        if not is_ignored and name not in cls.model_fields:
            problems.append(Problem((name,), _unknown(name, cls)))
            continue
        if value is None:
            continue
        if is_ignored:
            ignored.append(name)
            continue
        given.add(name)
        kept = _without_nulls(value, cls.model_fields[name].annotation)
        try:
            setattr(cfg, name, kept)
        except ValidationError as error:
            invalid.add(name)
            problems.extend(_explain(detail, cls) for detail in error.errors(include_url=False))
    # 2. Each key that has to be.
    for name, info in cls.model_fields.items():
        if info.is_required() and name not in given:
            invalid.add(name)
            how = f"set it in the file, or add {name}=... to the command"
            problems.append(Problem((name,), f"is missing ({info.description}); {how}"))
    # 3. What does not go together.
    problems.extend(_violations(cfg, given, invalid, source))
    cfg._ignored = tuple(sorted(ignored))
    cfg._origins = {name: _origin(source, name) for name in given}
    return cfg, problems


def _origin(source: YamlSource, name: str) -> tuple[str, ...]:
    """Return the location of a key and those of overrides within its value."""
    locations = [source.location((name,))]
    for path, location in source.locations.items():
        if path[0] == name and location.startswith("override "):
            locations.append(location)
    return tuple(dict.fromkeys(locations))


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
    kept = {}
    for key, item in value.items():
        if key not in section.model_fields:
            kept[key] = item
        elif item is not None:
            kept[key] = _without_nulls(item, section.model_fields[key].annotation)
    return kept


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the configuration class in an annotation, such as that of `list[X] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (_section(inner) for inner in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def _text_problems(value: Any, path: KeyPath) -> Iterable[Problem]:
    """Yield text that no file can hold, and keys such as `x:1` in `{x:1}`, which YAML reads as a
    name without a value.
    """
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        yield Problem(path, "contains characters that are not UTF-8, or a null byte; remove them")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _text_problems(item, (*path, index))
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        name, colon, rest = str(key).partition(":")
        if item is None and colon and rest:
            message = f"a space is missing after the colon: {name}: {rest}"
            yield Problem((*path, str(key)), message)
        yield from _text_problems(item, (*path, str(key)))


def _violations(
    cfg: Config, given: set[str], invalid: set[str], source: YamlSource
) -> Iterable[Problem]:
    """Yield the constraints between valid keys that `cfg` violates, each at the first key that was
    given.
    """
    for constraint in type(cfg).constraints:
        if not invalid.isdisjoint(constraint.keys) or not constraint.violated(cfg):
            continue
        # the message stands at the first of its keys that was given, and names the other ones
        given_keys = [name for name in constraint.keys if name in given]
        if not given_keys:
            given_keys = [constraint.keys[0]]
        key, *others = given_keys
        message = f"{format_value(getattr(cfg, key))}: {constraint.message}"
        if others:
            places = [f"{name}: {source.location((name,))}" for name in others]
            message += f" ({', '.join(places)})"
        yield Problem((key,), message)


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
    hints = getattr(owner, "axolotl_hints", {})
    if name in hints:
        return str(hints[name])
    nearest = difflib.get_close_matches(name.lower(), owner.model_fields, n=1, cutoff=0.65)
    if nearest:
        return f"unknown key; did you mean {nearest[0]}?"
    return "unknown key; see docs/configuration.md"


def _switches_like(name: str, cls: type[BaseModel]) -> list[str]:
    """Return the keys with true or false whose names hold `name`."""
    return [
        key for key, field in cls.model_fields.items() if field.annotation is bool and name in key
    ]


def _explain(detail: ErrorDetails, cls: type[BaseModel]) -> Problem:
    """Say what is wrong in an error of pydantic."""
    path = tuple(detail["loc"])
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, _unknown(str(path[-1]), _owner(cls, path)))
    if kind == "missing":
        return Problem(path, "is missing")
    if kind in _LIMITS:
        name, wording = _LIMITS[kind]
        return Problem(path, f"{wording.format(context[name])}, got {format_value(value)}")
    if kind == "literal_error":
        expected = str(context["expected"]).replace("'", "")
        return Problem(path, f"must be {expected}, got {format_value(value)}")
    if kind == "list_type":
        return Problem(path, f"expected a list, got {format_value(value)}")
    if kind in ("model_type", "dict_type"):
        text = f"expected `key: value` lines, got {format_value(value)}"
        if isinstance(value, bool):
            switches = _switches_like(str(path[-1]), cls)
            if switches:
                text += f"; did you mean {switches[0]}?"
        return Problem(path, text)
    if kind == "config_type":
        return Problem(path, detail["msg"])
    return Problem(path, f"{detail['msg']}, got {format_value(value)}")


def _owner(cls: type[BaseModel], path: KeyPath) -> type[BaseModel]:
    """Return the configuration class that the last key of `path` belongs to."""
    owner = cls
    for part in path[:-1]:
        if isinstance(part, str) and part in owner.model_fields:
            annotation = owner.model_fields[part].annotation
            inner = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            owner = next((kind for kind in inner if issubclass(kind, BaseModel)), owner)
    return owner


def _problem_lines(problems: list[Problem], source: YamlSource) -> list[str]:
    """Format problems in the order of the file."""

    def line_number(problem: Problem) -> float:
        number = source.location(problem.path).removeprefix(f"{source.name}:")
        if not number.isdigit():
            return math.inf
        return int(number)

    ordered = sorted(problems, key=line_number)
    return [_problem_line(problem, source) for problem in ordered]


def _problem_line(problem: Problem, source: YamlSource) -> str:
    if not problem.path:
        return problem.message
    location = source.location(problem.path)
    key = format_path(problem.path)
    if location == f"--{key.replace('_', '-')}":  # the option says the key already
        return f"{location}: {problem.message}"
    return f"{location}: {key}: {problem.message}"
