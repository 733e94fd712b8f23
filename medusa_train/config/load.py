"""Load a configuration: a YAML file, then overrides `key=value`, then options of the command line.

All problems are reported at once, those of stage one included. Each has its place and, for a
mistyped key, the nearest valid one.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from medusa_train.config.keys import Config
from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.config.problems import explain, text_problems
from medusa_train.config.removed_keys import explain_removed
from medusa_train.config.schema import (
    NOT_IN_STAGE_ONE,
    NOT_INHERITED,
    TrainConfig,
    stage_one_values,
)
from medusa_train.config.types import STAGE_ONE
from medusa_train.config.yaml_source import (
    Place,
    Problem,
    Source,
    format_path,
    read_yaml_file,
)
from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import remember_written

C = TypeVar("C", bound=Config)

#: A run's own config.yaml cannot set this key, since a run may come from anywhere. Only the user's
#: command line or YAML file can allow code.
TRUST = "trust_remote_code"


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
        overrides: `key=value` with a YAML value. `a.b=c` sets a key of a mapping,
            `datasets.0.path=x` a key of an item of a list.
        flags: values of command-line options by key (`--bench` is `bench`); None means not set.

    Raises:
        ConfigError: all problems, in the order of their lines.
    """
    # 1. The file.
    source = Source("command line") if path is None else _read(path)
    if cls is not TrainConfig and "datasets" in source.values:
        run = source.values.get("output_dir") or "RUN"
        raise ConfigError(
            f"{path} is a configuration of medusa-train; to measure or export its run:"
            f" medusa-eval --model {run}, or medusa-export {run}"
        )
    # 2. The command line.
    _apply_settings(cls, source, overrides, flags or {})
    # 3. All problems, those of stage one included.
    cfg = _validate(cls, source)
    problems = source.problems
    written = source.values.get(STAGE_ONE)
    if cls is TrainConfig and isinstance(written, dict) and not source.values.get("lora_model_dir"):
        stage_one_source = _stage_one_source(source)
        stage_one = _validate(TrainConfig, stage_one_source)
        problems = problems + stage_one_source.problems
        if stage_one is not None:
            source.ignored += [f"{STAGE_ONE}.{key}" for key in stage_one.ignored if key in written]
    if cfg is None or problems:
        ordered = sorted(problems, key=lambda problem: problem.place.line or math.inf)
        raise ConfigError(list(dict.fromkeys(map(str, ordered))))
    return cfg


def stage_one_config(cfg: TrainConfig) -> TrainConfig | None:
    """Return the configuration of the stage that `cfg` trains first; None without one."""
    if not cfg.trains_stage_one:
        return None
    values = cfg.model_dump(mode="json", include=cfg.model_fields_set)
    source = _stage_one_source(replace(cfg._source, values=values))
    stage_one = _validate(TrainConfig, source)
    if stage_one is None or source.problems:
        raise ConfigError(list(map(str, source.problems)))
    return stage_one


def dump_config(cfg: Config) -> str:
    """Format the values as YAML for `load_config`; keys without a value or an
    effect are omitted.
    """
    return dump_yaml(
        cfg.model_dump(mode="json", exclude_none=True, exclude=set(cfg.ineffective_keys()))
    )


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Format values as YAML, in the form in which a run writes its config.yaml."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=110)


def _read(path: Path) -> Source:
    """Read a file, which may be a run's own config.yaml."""
    file = resolve_path(path)
    if file is None:
        raise ConfigError(f"{path}: no such file{_nearby_files(path)}")
    if file.is_dir():
        raise ConfigError(
            f"{path}: is a directory, not a YAML file (medusa-eval takes a run by --model)"
            f"{_nearby_files(file / 'config.yaml')}"
        )
    source = read_yaml_file(file, str(path))
    remember_written(source.values)
    run_files = (file.with_name("metrics.jsonl"), file.with_name(STAGE_ONE))
    source.is_run = file.name == "config.yaml" and any(map(os.path.exists, run_files))
    if source.is_run:
        source.values["output_dir"] = str(file.parent)  # the run may have been moved
    return source


def _nearby_files(path: Path) -> str:
    """Return a hint with the YAML files that have the most similar names, in the same directory,
    else in `configs/`.
    """
    for directory in (path.parent, PROJECT_ROOT / path.parent, PROJECT_ROOT / "configs"):
        if directory in (Path(), PROJECT_ROOT) or not os.path.isdir(directory):
            continue
        names = [file.name for file in directory.glob("*.y*ml")]
        if names:
            is_shipped = directory.is_relative_to(PROJECT_ROOT)
            short = directory.relative_to(PROJECT_ROOT) if is_shipped else directory
            nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0)
            return f"; did you mean {' or '.join(str(short / name) for name in nearest)}?"
    return ""


def _apply_settings(
    cls: type[Config], source: Source, overrides: Iterable[str], flags: Mapping[str, object]
) -> None:
    """Set the keys of the command line. If a key is set several times, the last value counts. The
    other values, and keys of the file that contradict the command line, become ignored.
    """
    set_keys = set()
    for override in overrides:
        name, equals, text = override.partition("=")
        place = Place(override, is_word=True)
        parts = re.sub(r"\[(\d+)\]", r".\1", name).strip().split(".")
        if not equals or not all(parts):
            message = "overrides are written key=value, or a.b=value"
            source.problems.append(Problem(place, (), message))
            continue
        path = tuple(int(part) if part.isdecimal() else part for part in parts)
        source.set_typed(path, text, place)
        set_keys.add(format_path(path))
    for name, value in flags.items():
        if value is not None:
            source.set((name,), value, Place(cls.option_of(name).split()[0], is_word=True))
            set_keys.add(name)
    _drop_contradicted(cls, source, set_keys)


def _drop_contradicted(cls: type[Config], source: Source, set_keys: set[str]) -> None:
    """Drop the keys that contradict a key in `set_keys`, which was set later."""
    for name, other in cls.replaces:
        value = source.values.get(name)
        is_set = value is not None and value is not False
        if name == "val_set_size":  # 0 holds nothing out, so test_datasets do not contradict it
            is_set = bool(value)
        if is_set and name in set_keys and other not in set_keys and source.values.pop(other, None):
            source.ignored.append(other)


def _stage_one_source(outer: Source) -> Source:
    """Return the configuration of stage one as it was written: that of the run, with the keys of
    `stage_one` on top.
    """
    values = {name: value for name, value in outer.values.items() if name not in NOT_INHERITED}
    source = Source(outer.name, values, dict(outer.places), is_run=outer.is_run)
    own_values = outer.values[STAGE_ONE]
    output_dir = outer.values.get("output_dir") or TrainConfig.model_fields["output_dir"].default
    defaults = stage_one_values(str(output_dir))
    for name, value in {**defaults, **own_values}.items():
        place = replace(outer.place((STAGE_ONE, name)), section=STAGE_ONE)
        source.set((name,), defaults.get(name) if value is None else value, place)
        if name in own_values and name in NOT_IN_STAGE_ONE:
            source.report((name,), "is set for the whole run; remove it")
        if name == "recipe" and value == "medusa2":
            source.report((name,), "stage one trains heads on a frozen target model: medusa1")
            source.values[name] = "medusa1"  # so that no rule of joint training is reported, too
    for path, text in outer.typed.items():
        if path[0] == STAGE_ONE:
            source.typed[path[1:]] = text  # after `set`, which drops what the run has there
    _drop_contradicted(TrainConfig, source, set(own_values))
    return source


def _validate(cls: type[C], source: Source) -> C | None:
    """Validate each key, and the rules between the valid keys, so that no problem hides another.

    Returns:
        The configuration; None if a key or a rule is wrong, which `source` reports.
    """
    # 1. Validate each key; and the rules, if all keys are valid.
    values = _keys_with_effect(cls, source)
    cfg, errors = _build(cls, values)
    # 2. If a key takes text and an override is something else in YAML, the text is meant as typed.
    not_text = {error["loc"] for error in errors if error["type"] == "string_type"}
    if typed := not_text & source.typed.keys():
        for path in typed:
            source.set(path, source.typed[path], source.place(path))
        values = {name: source.values[name] for name in values}
        cfg, errors = _build(cls, values)
    for path, wrong in text_problems(source.values):
        source.report(path, wrong)
    # 3. Validate the rules between the valid keys. Pydantic checks rules only if all keys are
    # valid, so invalid keys are left out, and required ones among them become "?".
    invalid = {error["loc"][0] for error in errors if error["type"] != "rule"}
    if invalid:
        required = {name: "?" for name, field in cls.model_fields.items() if field.is_required()}
        valid = {name: value for name, value in values.items() if name not in invalid}
        _, broken = _build(cls, {**required, **valid})
        errors += [error for error in broken if invalid.isdisjoint(error["ctx"]["keys"])]
    for error in errors:
        path = tuple(part for part in error["loc"] if part != "[key]")
        source.report(path, explain(error, cls, source))
    if cfg is not None:
        cfg._source = source
    return cfg


def _build(cls: type[C], values: dict[str, Any]) -> tuple[C | None, list[ErrorDetails]]:
    """Return the configuration of `values`, or None and what is wrong with them."""
    try:
        return cls.model_validate(values), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _keys_with_effect(cls: type[Config], source: Source) -> dict[str, Any]:
    """Return the keys that a command reads, and report removed ones.

    Axolotl keys without a meaning here are ignored, and in a run's own file removed keys too.
    """
    values: dict[str, Any] = {}
    for name, value in source.values.items():
        removed = explain_removed(name, value, cls.model_fields)
        is_from_run = source.is_run and source.place((name,)).source == source.name
        if removed and not is_from_run:
            source.report((name,), removed)
        elif removed or name in cls.ignored_axolotl_keys:
            source.ignored += [] if value is None else [name]
        elif is_from_run and name == TRUST:
            source.ignored += [name] if value else []
        else:
            values[name] = value
    return values
