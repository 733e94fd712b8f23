"""Define the files of a run directory, check `output_dir` and the inputs before training, and write
config.yaml.

This module does not import torch, so that a wrong configuration is rejected before anything is
loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from medusa_train.config.load import dump_config, dump_yaml, stage_one_config
from medusa_train.config.paths import absolute_name, resolve_path
from medusa_train.config.schema import NOT_IN_STAGE_ONE, DatasetConfig, TrainConfig
from medusa_train.config.types import STAGE_ONE, TEMPLATE_SUFFIX
from medusa_train.data.sources import BUILDERS, MAX_NAMED, is_data_file_name
from medusa_train.errors import CheckpointError, ConfigError, MedusaError, TargetModelError
from medusa_train.io import (
    WRITE_ERRORS,
    existing_parent,
    locked,
    parse_json,
    replace_text,
    write_failure,
)
from medusa_train.models.model_files import find_target_model

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
HEADS = "heads"
ADAPTER = "adapter"
MODEL = "model"
TREE = "tree.json"
TREE_TRACES = "tree_traces.npz"
CHECKPOINTS = "checkpoints"
#: Choices that evaluations made by timing steps: dtype and compilation.
DECISIONS = "decoding.json"
#: Results of a run; only overwrite_output_dir deletes them.
RESULTS = (HEADS, ADAPTER, MODEL, "eval", "export")
#: Everything that a run writes; nothing else in its directory is ever deleted.
RUN_FILES = (
    CONFIG,
    METRICS,
    HEADS,
    ADAPTER,
    MODEL,
    TREE,
    TREE_TRACES,
    DECISIONS,
    CHECKPOINTS,
    "eval",
    "export",
    "tensorboard",
    "wandb",
    STAGE_ONE,
)
#: Keys in every config.yaml of a run. No other program writes all of them.
_RUN_KEYS = {"base_model", "datasets", "recipe", "medusa_only_heads", "output_dir"}
#: Keys of a line of metrics.jsonl.
_METRICS_KEYS = {"kind", "step", "time"}
#: Keys of a checkpoint's manifest.
_MANIFEST_KEYS = {"format", "step", "files", "crc32"}
#: Name patterns of the files that any command writes below the directories of a run. Some patterns
#: include the name of the file's directory.
_WRITTEN_NAMES = (
    # heads, adapter, model, export
    *("README.md", "config.json", "generation_config.json", "adapter_config.json"),
    *("medusa_lm_head.*", "draft.safetensors", "model*.safetensors", "adapter_model.safetensors"),
    *("model.safetensors.index.json", "medusa_choices.json", ".unfinished-export"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template.*"),
    *(
        "generate.py",
        "requirements.txt",
        "configuration_*.py",
        "modeling_*.py",
        "tokenization_*.py",
    ),
    # eval
    *("report.*", "served.*", "compare.*", "answers.jsonl", "ranks.jsonl", "turns.jsonl"),
    *("model_answer/*.jsonl", "model_judgment/*.jsonl", "blocks.jsonl", "vllm-*.log"),
    *(TREE, TREE_TRACES, DECISIONS),
    # temporary files of a process that was killed
    ".*.tmp",
)
#: Directory of a run -> path patterns of the files in it, for directories with other names.
_WRITTEN_PATHS = {
    CHECKPOINTS: ("*-*/manifest.json", "*-*/state.json", "*-*/*.safetensors"),
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("run-*", "offline-run-*", "latest-run*", "debug*.log", "run_id.txt", "settings"),
}
#: Value of `resume_from_checkpoint` that selects the newest checkpoint in `output_dir`.
NEWEST = "latest"


def check_writable(directory: Path) -> None:
    """Raise ConfigError unless `directory` is a directory that is writable or can be created."""
    existing = existing_parent(directory)
    if not existing.is_dir():
        raise ConfigError(f"output_dir: {existing} is a file, not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {existing} cannot be written to: permission denied")


def check_output_dir(cfg: TrainConfig) -> None:
    """Check that `output_dir` is writable, and empty unless the configuration resumes or overwrites
    the run in it.
    """
    # 1. Check the directory itself.
    run_dir = cfg.run_dir
    check_writable(run_dir)
    resume = cfg.resume_from_checkpoint
    checkpoint = named_checkpoint(resume, run_dir)
    _check_links(run_dir)
    # 2. Check for files of the user or of another program.
    files = [name for name in RUN_FILES if _is_used(run_dir / name)]
    is_new = resume is None and not _is_run(run_dir)
    check_only_run_files(run_dir, inner=cfg.overwrite_output_dir or is_new)
    # 3. Check a run that is overwritten.
    if cfg.overwrite_output_dir:
        _check_overwriting(cfg, files)
        return
    # 4. Check a run that is resumed.
    if not files:
        return
    if resume is None:
        raise ConfigError(
            f"output_dir: {run_dir} already holds a run ({', '.join(files)}). Choose one:\n"
            "  output_dir=OTHER                a new run elsewhere\n"
            "  resume_from_checkpoint=auto     resume this run from its newest checkpoint\n"
            "  overwrite_output_dir=true       delete this run and start again"
        )
    if checkpoint is None and not any(run_dir.glob(f"{CHECKPOINTS}/*step-*")):
        check_nothing_is_lost(run_dir)
    # the directory of checkpoints may be a link to another disk
    own_directories = (run_dir.resolve(), (run_dir / CHECKPOINTS).resolve())
    if checkpoint is not None and not any(
        map(checkpoint.resolve().is_relative_to, own_directories)
    ):
        raise ConfigError(
            f"output_dir: {run_dir} already holds a run, and {resume} is a checkpoint of another"
            " run; "
            "set output_dir to that run's directory, or to a new one"
        )


def _check_overwriting(cfg: TrainConfig, files: Sequence[str]) -> None:
    """Check that overwriting deletes neither the run's inputs nor the content of links and mounts.

    Args:
        files: the names from `RUN_FILES` that exist in `output_dir`.
    """
    run_dir = cfg.run_dir
    if cfg.initial_run is not None and cfg.initial_run.resolve() == run_dir.resolve():
        raise ConfigError(
            "overwrite_output_dir: would delete the heads of lora_model_dir; set another output_dir"
        )
    target_model = resolve_path(cfg.base_model)
    deleted = [(run_dir / name).resolve() for name in files]
    if target_model is not None and any(map(target_model.resolve().is_relative_to, deleted)):
        raise ConfigError(
            "overwrite_output_dir: would delete the target model, base_model; set another"
            " output_dir"
        )
    linked = [name for name in files if name != CHECKPOINTS and _is_elsewhere(run_dir / name)]
    if linked:
        raise ConfigError(
            f"overwrite_output_dir: {run_dir / linked[0]} is a link or a mount point, whose content"
            " is not deleted; empty it, or set another output_dir"
        )


def check_only_run_files(run_dir: Path, *, inner: bool) -> None:
    """Raise ConfigError if a run in `run_dir` would replace files that no run wrote.

    Args:
        inner: also check the files within the run's directories, because a new run deletes them.
    """
    foreign_files = list(_files_of_others(run_dir, inner))
    if not foreign_files:
        return
    listed = ", ".join(str(path.relative_to(run_dir)) for path in foreign_files[:MAX_NAMED])
    if len(foreign_files) > MAX_NAMED:
        listed += f" and {len(foreign_files) - MAX_NAMED} more"
    raise ConfigError(
        f"output_dir: {run_dir} holds files that no run wrote, or that were edited, and a run would"
        f" replace or delete them: {listed}; move them, or set another output_dir"
    )


def _files_of_others(run_dir: Path, inner: bool) -> Iterator[Path]:
    """Yield the files of `RUN_FILES` in `run_dir` that no run wrote, judged by content and name."""
    if not os.path.isdir(run_dir):
        return
    is_run = _is_run(run_dir)
    for name in RUN_FILES:
        path = run_dir / name
        if name == STAGE_ONE:
            yield from _files_of_others(path, inner)
        elif os.path.isfile(path):
            is_ours = _is_run_config(path) if name == CONFIG else is_run
            if not is_ours and os.path.getsize(path) > 0:
                yield path
        elif inner and not is_run:
            yield from _files_below(path)
        elif inner and not _is_elsewhere(path):
            yield from other_files(path)


def other_files(directory: Path) -> Iterator[Path]:
    """Yield the files below a run's directory or an export that this program does not write."""
    return (file for file in _files_below(directory) if not _is_written(file, directory))


def _files_below(directory: Path) -> Iterator[Path]:
    for folder, _, files in os.walk(directory):
        yield from (Path(folder) / file for file in sorted(files))


def _is_written(file: Path, directory: Path) -> bool:
    """Return whether a file below a run's directory has a name that a run writes."""
    if directory.name in _WRITTEN_PATHS:
        names = {file.relative_to(directory).as_posix()}
        patterns = _WRITTEN_PATHS[directory.name]
    else:
        names = {file.name, f"{file.parent.name}/{file.name}"}
        patterns = _WRITTEN_NAMES
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def _is_run(run_dir: Path) -> bool:
    """Return whether a run wrote to `run_dir`, judged by content that no other program writes."""
    if _is_run_config(run_dir / CONFIG) or _is_run_config(run_dir / STAGE_ONE / CONFIG):
        return True
    if not os.path.isdir(run_dir):  # because glob raises for a name that is too long
        return False
    for path in (run_dir / METRICS, *run_dir.glob(f"{CHECKPOINTS}/step-*/manifest.json")):
        with suppress(OSError, ValueError), path.open("rb") as file:
            record = parse_json(file.readline() if path.name == METRICS else file.read())
            keys = set(record) if isinstance(record, dict) else set()
            if keys >= _METRICS_KEYS or keys >= _MANIFEST_KEYS:
                return True
    return False


def _is_run_config(path: Path) -> bool:
    """Return whether a run wrote this config.yaml and nobody added comments or spaces."""
    try:
        text = path.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and set(values) >= _RUN_KEYS and dump_yaml(values) == text


def named_checkpoint(resume: str | None, run_dir: Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names; None if it is unset or selects the
    newest checkpoint in `run_dir`.
    """
    if resume in (None, NEWEST):
        return None
    path = resolve_path(resume)
    if path is None or not path.is_dir():
        listing = _list_checkpoints(run_dir)
        raise CheckpointError(
            f"resume_from_checkpoint: {resume}: no such checkpoint{listing}; "
            "`resume_from_checkpoint=auto` takes the newest one in output_dir"
        )
    if re.fullmatch(r"best-\d+", path.name):
        raise CheckpointError(
            f"resume_from_checkpoint: {resume}: holds weights only, those of the best evaluation;"
            f" resume from a checkpoint step-N{_list_checkpoints(path.parent.parent)}"
        )
    return path


def check_nothing_is_lost(run_dir: Path) -> None:
    """Check that resuming without a checkpoint does not overwrite results of an earlier run."""
    results = [f"{name}/" for name in RESULTS if _is_used(run_dir / name)]
    if results:
        raise CheckpointError(
            f"resume_from_checkpoint: no checkpoint to resume from: {run_dir} holds"
            f" {', '.join(results)} but no complete checkpoint. Replace resume_from_checkpoint by"
            " one of:\n  output_dir=OTHER                a new run elsewhere\n "
            " overwrite_output_dir=true       delete this run and start again"
        )


def prepare_output_dir(run_dir: Path, step: int, initial_run: Path | None = None) -> None:
    """Create `run_dir` for a new run (`step` 0) or for a run that is resumed after `step`.

    A new run deletes the files of the run that it overwrites, but not `initial_run`, from which it
    starts. A resumed run deletes checkpoints of later steps, and incomplete checkpoints. Other
    files are kept, and so are links to directories and mount points: in a linked `checkpoints`
    directory, only checkpoints are deleted.

    Raises:
        ConfigError: a new run would delete files that no run wrote.
    """
    if step == 0:  # check again, because files may have appeared while the data were loaded
        check_only_run_files(run_dir, inner=True)
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        if step > 0 or _is_elsewhere(run_dir / CHECKPOINTS):
            for path in _stale_checkpoints(run_dir, step):
                shutil.rmtree(path)
        if step > 0:
            return
        start = (initial_run or run_dir).resolve()
        for path in [run_dir / name for name in RUN_FILES]:
            if start.is_relative_to(path.resolve()) or _is_elsewhere(path):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _is_used(path: Path) -> bool:
    """Return whether a file of a run exists. A link to an empty directory does not count: the user
    made it for a new run.
    """
    if _is_elsewhere(path):
        return any(path.iterdir())
    return os.path.exists(path)  # False, and no error, for an impossible name


def _is_elsewhere(path: Path) -> bool:
    """Return whether a directory is a link or a mount point. Files are written into it, but it is
    never replaced.
    """
    return os.path.isdir(path) and (os.path.islink(path) or os.path.ismount(path))


def _check_links(run_dir: Path) -> None:
    """Check that links in a run directory lead to writable directories."""
    for name in RUN_FILES:
        path = run_dir / name
        if os.path.islink(path) and not path.exists():
            raise ConfigError(
                f"output_dir: {path} links to {path.readlink()}, which does not exist; create that"
                " directory, or remove the link"
            )
        if _is_elsewhere(path):
            check_writable(path)


def write_config(cfg: TrainConfig, run_dir: Path) -> None:
    """Write the resolved configuration as config.yaml, with local paths made absolute."""
    portable = _with_absolute_paths(cfg)
    stage_one = stage_one_config(cfg)
    if stage_one is not None:
        stage = _stage_one_values(portable, _with_absolute_paths(stage_one))
        portable = portable.model_copy(update={STAGE_ONE: stage})
    with writing(run_dir):
        replace_text(run_dir / CONFIG, dump_config(portable))


def _stage_one_values(cfg: TrainConfig, stage_one: TrainConfig) -> dict[str, Any]:
    """Return the keys in which stage one differs from a stage one without keys of its own. A value
    is null if only the latter has the key.
    """
    run_values = yaml.safe_load(dump_config(cfg.model_copy(update={STAGE_ONE: {}})))
    default_stage_one = stage_one_config(TrainConfig(**run_values))
    assert default_stage_one is not None
    default_values = yaml.safe_load(dump_config(default_stage_one))
    values = yaml.safe_load(dump_config(stage_one))
    names = [name for name in {**default_values, **values} if name not in NOT_IN_STAGE_ONE]
    run_values = {name for name in names if values.get(name) != default_values.get(name)}
    # A written key replaces the run's value of another key, as num_epochs replaces max_steps. If
    # stage one has both, both are written.
    for name, other in TrainConfig.replaces:
        if name in run_values and values.get(name) and values.get(other):
            run_values.add(other)
    return {name: values.get(name) for name in names if name in run_values}


def _with_absolute_paths(cfg: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths, without keys that are for one command only."""
    update: dict[str, Any] = {
        "chat_template": _absolute_template(cfg.chat_template),
        "resume_from_checkpoint": None,
        "overwrite_output_dir": False,
    }
    for key in ("base_model", "lora_model_dir", "deepspeed"):
        name = getattr(cfg, key)
        if name and isinstance(name, str):
            update[key] = absolute_name(name)
    for key in ("datasets", "test_datasets"):
        entries = getattr(cfg, key)
        if entries:
            update[key] = [_absolute_dataset(entry) for entry in entries]
    if cfg.prepared_dir:
        update["dataset_prepared_path"] = str(cfg.prepared_dir.absolute())
    return cfg.model_copy(update=update)


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn a failed write in the block into a CheckpointError that names `directory`."""
    try:
        yield
    except WRITE_ERRORS as error:
        raise CheckpointError(write_failure("run files", directory, error)) from error


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Lock `directory`; raise CheckpointError if another process trains, evaluates or calibrates in
    it, because each would delete files of the other.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    busy = CheckpointError(
        f"output_dir: another process is working in {directory}; wait for it, or set another"
        " directory"
    )
    try:
        with locked(directory, busy):
            yield
    finally:
        with suppress(OSError):  # the directory is not empty
            directory.rmdir()


def _absolute_dataset(entry: DatasetConfig) -> DatasetConfig:
    update: dict[str, Any] = {
        "path": absolute_name(entry.path),
        "conversation": _absolute_template(entry.conversation),
    }
    if entry.data_files is not None and entry.path in BUILDERS:
        update["path"] = entry.path
        update["data_files"] = [absolute_name(file) for file in entry.data_files]
    return entry.model_copy(update=update)


def _absolute_template(name: str | None) -> str | None:
    """Return the path of a template's file; names of built-in templates are unchanged."""
    if name is None or not name.endswith(TEMPLATE_SUFFIX):
        return name
    return absolute_name(name)


def _stale_checkpoints(run_dir: Path, step: int) -> Iterator[Path]:
    """Yield checkpoints and best weights of steps after `step`, and incomplete ones of a killed
    process.
    """
    for path in sorted((run_dir / CHECKPOINTS).glob("*-*")):
        match = re.fullmatch(r"(\.tmp-|\.old-)?(?:step|best)-(\d+)", path.name)
        if match is not None and (match[1] == ".tmp-" or int(match[2]) > step):
            yield path


def _list_checkpoints(run_dir: Path) -> str:
    """List the checkpoints of a run, for messages."""
    names = sorted(path.name for path in (run_dir / CHECKPOINTS).glob("step-*"))
    if not names:
        return ""
    return f" ({run_dir / CHECKPOINTS} holds {', '.join(names)})"


def check_inputs(cfg: TrainConfig) -> None:
    """Check that local inputs exist, before torch is imported.

    Raises:
        MedusaError: lists all missing inputs. It is a ConfigError if the file of `deepspeed` is
            among them, because that file is a part of the configuration.
    """
    missing = missing_inputs(cfg)
    stage_one = stage_one_config(cfg)
    if stage_one is not None:
        missing = list(dict.fromkeys(missing + missing_inputs(stage_one)))
    if not missing:
        return
    lines = "\n".join(f"  {line}" for line in missing)
    message = missing[0] if len(missing) == 1 else f"{len(missing)} inputs are missing:\n{lines}"
    if any(line.startswith("deepspeed: ") for line in missing):
        raise ConfigError(message)
    raise MedusaError(message)


def missing_inputs(cfg: TrainConfig) -> list[str]:
    """List files and directories in the configuration that do not exist or cannot be read. Hub
    names are not checked, except for a target model if the hub is unreachable.
    """
    missing = []
    try:
        find_target_model(cfg.base_model)
    except TargetModelError as error:
        missing.append(str(error))
    for key, entries in (("datasets", cfg.datasets), ("test_datasets", cfg.test_datasets or ())):
        for entry in entries:
            if resolve_path(entry.path) is None and is_data_file_name(entry.path):
                missing.append(f"{key}: {entry.path}: no such file or directory")
    if cfg.lora_model_dir is not None and resolve_path(cfg.lora_model_dir) is None:
        advice = "train these heads first, or leave lora_model_dir empty to start with new ones"
        missing.append(f"lora_model_dir: {cfg.lora_model_dir}: no such directory; {advice}")
    if isinstance(cfg.deepspeed, str) and resolve_path(cfg.deepspeed) is None:
        missing.append(f"deepspeed: {cfg.deepspeed}: no such file")
    return missing
