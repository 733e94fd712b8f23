"""The run directory: may a run begin or go on there, and its config.yaml. Knows nothing of training; no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from medusa_train.config.load import dump_config
from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.sources import names_a_file
from medusa_train.errors import CheckpointError, ConfigError, MedusaError
from medusa_train.io import WRITE_ERRORS, replace_text, write_failure

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
HEADS = "heads"
ADAPTER = "adapter"
MODEL = "model"
TREE = "tree.json"
CHECKPOINTS = "checkpoints"
#: What a run was for; never removed unless the user says so.
RESULTS = (HEADS, ADAPTER, MODEL)
#: What belongs to a run; nothing else in its directory is ever removed.
OWN = (CONFIG, METRICS, HEADS, ADAPTER, MODEL, TREE, CHECKPOINTS, "eval", "export", "tensorboard", "wandb")
#: Values of `resume_from_checkpoint` that mean the newest checkpoint of `output_dir`.
NEWEST = ("latest", "auto")


def check_output_dir(cfg: TrainConfig) -> None:
    """Refuse an `output_dir` that holds a run, unless the config says what is to become of it.

    Raises:
        ConfigError: it can't be made or written to, or holds a run that is neither to be overwritten nor resumed.
        CheckpointError: `resume_from_checkpoint` names no checkpoint, or there is none beside the run's results.
    """
    out = Path(cfg.output_dir).expanduser()
    there = next((path for path in (out, *out.parents) if path.exists()), Path())
    if not there.is_dir():
        raise ConfigError(f"output_dir: {there} is a file; a run needs a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir: {there} can't be written to: permission denied")
    resume = cfg.resume_from_checkpoint
    named = named_checkpoint(cfg)
    found = [name for name in OWN if (out / name).exists()]
    if not found or cfg.overwrite_output_dir:
        return
    if resume is None:
        raise ConfigError(
            f"output_dir: {out} already holds a run ({', '.join(found)}). Choose one:\n"
            f"  output_dir=OTHER                a new run elsewhere\n"
            f"  resume_from_checkpoint=auto     go on with this run from its newest checkpoint\n"
            f"  overwrite_output_dir=true       delete this run and start anew"
        )
    if named is None and not any(out.glob(f"{CHECKPOINTS}/*step-*")):
        check_nothing_is_lost(cfg)
    if named is not None and not named.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"output_dir: {out} already holds a run, and {resume} is a checkpoint of another; "
            "set output_dir to that run's directory, or to a new one"
        )


def named_checkpoint(cfg: TrainConfig) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; None where it names none, or means the newest.

    Raises:
        CheckpointError: it is not there.
    """
    resume = cfg.resume_from_checkpoint
    if resume is None or resume in NEWEST:
        return None
    path = resolve_path(resume)
    if path is None or not path.is_dir():
        others = _checkpoints_of(Path(cfg.output_dir).expanduser())
        raise CheckpointError(
            f"resume_from_checkpoint: {resume}: no such checkpoint{others}; "
            "`resume_from_checkpoint=auto` takes the newest one in output_dir"
        )
    return path


def check_nothing_is_lost(cfg: TrainConfig) -> None:
    """Refuse to start anew over results; asked where a run is to go on and no checkpoint was found.

    Raises:
        CheckpointError: `output_dir` holds heads, an adapter or a model.
    """
    out = Path(cfg.output_dir).expanduser()
    if kept := [f"{name}/" for name in RESULTS if (out / name).exists()]:
        raise CheckpointError(
            f"resume_from_checkpoint: nothing to go on from: {out} holds {', '.join(kept)} but no whole checkpoint. "
            "Choose one in place of resume_from_checkpoint:\n"
            "  output_dir=OTHER                a new run elsewhere\n"
            "  overwrite_output_dir=true       starts anew, and deletes what is there"
        )


def prepare_output_dir(cfg: TrainConfig, step: int) -> Path:
    """Make `output_dir` ready for a run that goes on after `step` (0: a new one).

    A new run removes an earlier one that it was told to overwrite; a resumed one removes checkpoints of later
    steps, which belong to a future that will not come. Nothing but a run's own files is touched.

    Raises:
        CheckpointError: it can't be written to.
    """
    out = Path(cfg.output_dir).expanduser()
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        doomed = [out / name for name in OWN] if step == 0 else list(_later_checkpoints(out, step))
        for path in doomed:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    return out


def write_config(cfg: TrainConfig, out: Path) -> None:
    """Write the resolved configuration, what it names locally by absolute paths, so that the run can be moved about.

    Raises:
        CheckpointError: `out` can't be written to; an earlier config.yaml is as it was.
    """
    lasting = {
        "base_model": _absolute(cfg.base_model),
        "lora_model_dir": cfg.lora_model_dir and _absolute(cfg.lora_model_dir),
        "datasets": [source.model_copy(update={"path": _absolute(source.path)}) for source in cfg.datasets],
        "deepspeed": _absolute(cfg.deepspeed) if isinstance(cfg.deepspeed, str) else cfg.deepspeed,
        "resume_from_checkpoint": None,
        "overwrite_output_dir": False,
    }
    with writing(out):
        replace_text(out / CONFIG, dump_config(cfg.model_copy(update=lasting)))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Within, a write that fails is told as a CheckpointError that names the run directory `out`."""
    try:
        yield
    except WRITE_ERRORS as error:
        raise CheckpointError(write_failure("run files", out, error)) from error


def _absolute(name: str) -> str:
    local = resolve_path(name)
    return name if local is None else str(local.resolve())


def _later_checkpoints(out: Path, step: int) -> list[Path]:
    found = []
    for path in (out / CHECKPOINTS).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            found.append(path)
    return found


def _checkpoints_of(out: Path) -> str:
    names = sorted(path.name for path in (out / CHECKPOINTS).glob("step-*"))
    return f" ({out / CHECKPOINTS} holds {', '.join(names)})" if names else ""


def check_inputs(cfg: TrainConfig) -> None:
    """Refuse a configuration of which several inputs are missing, all of them at once and before anything loads.

    A single one is left to whoever reads it, who has more to say about it.

    Raises:
        MedusaError: two or more are missing.
    """
    missing = missing_inputs(cfg)
    if len(missing) > 1:
        raise MedusaError(f"{len(missing)} inputs are missing:\n" + "\n".join(f"  {line}" for line in missing))


def missing_inputs(cfg: TrainConfig) -> list[str]:
    """Name every file or directory of this machine that is not there; names that the hub might know are left out."""
    missing = []
    if resolve_path(cfg.base_model) is None and looks_like_path(cfg.base_model):
        missing.append(f"base_model: {cfg.base_model}: no such directory")
    for entry in cfg.datasets:
        if resolve_path(entry.path) is None and names_a_file(entry.path):
            missing.append(f"datasets: {entry.path}: no such file or directory")
    if cfg.lora_model_dir is not None and resolve_path(cfg.lora_model_dir) is None:
        missing.append(f"lora_model_dir: {cfg.lora_model_dir}: no such directory")
    if isinstance(cfg.deepspeed, str) and resolve_path(cfg.deepspeed) is None:
        missing.append(f"deepspeed: {cfg.deepspeed}: no such file")
    return missing
