"""Decide where a run resumes, once and before anything is loaded. Then compare the loaded
checkpoint with the run, and print what differs.

Only `plan_resume` looks for checkpoints; stages, setup and trainer read its plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from medusa_train.checkpoint.resolve import find_heads
from medusa_train.checkpoint.run_directory import (
    CONFIG,
    HEADS,
    check_nothing_is_lost,
    named_checkpoint,
)
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.load import load_config
from medusa_train.config.paths import absolute_name
from medusa_train.config.schema import WEIGHT_KEYS, TrainConfig
from medusa_train.config.types import STAGE_ONE
from medusa_train.errors import CheckpointError, ConfigError
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.schedule import TrainingSchedule
from medusa_train.training.snapshot import LoadedCheckpoint, TrainState, rng_states


@dataclass(frozen=True)
class ResumePlan:
    """Where the first stage that still has to train resumes; a stage after it starts new.

    Attributes:
        checkpoint: the checkpoint that is restored; None: the stage starts with step 1.
        changed: `key: was A, now B` for each setting that affects weights and changed since then.
        stage_one_is_finished: whether the run starts with stage two.
        note: message on what the user asked for and did not get, or on what is not known.
    """

    checkpoint: Path | None = None
    changed: tuple[str, ...] = ()
    stage_one_is_finished: bool = False
    note: str | None = None


NEW_STAGE = ResumePlan()


def plan_resume(cfg: TrainConfig, stage_one: TrainConfig | None) -> ResumePlan:
    """Return where the run of `cfg` resumes.

    Raises:
        CheckpointError: the named checkpoint does not exist or belongs to stage one, or results in
            `output_dir` or in its first stage would be lost.
        ConfigError: stage one is finished, but was trained with other settings.
    """
    if cfg.resume_from_checkpoint is None:
        return NEW_STAGE

    # 1. Look for a checkpoint of the run itself. If there are two stages, this is stage two.
    resume_from = named_checkpoint(cfg.resume_from_checkpoint, cfg.run_dir)
    if (
        resume_from
        and stage_one
        and resume_from.resolve().is_relative_to(stage_one.run_dir.resolve())
    ):
        raise CheckpointError(
            f"resume_from_checkpoint: {resume_from} is a checkpoint of stage one;"
            " resume_from_checkpoint=auto continues stage one from its newest checkpoint"
        )
    checkpoint = resume_from or CheckpointStore(cfg.run_dir).latest()
    if checkpoint is not None:
        return _resume_from(checkpoint, cfg, stage_one_is_finished=stage_one is not None)

    # 2. There is none. Look for the finished heads that stage two starts from.
    if stage_one is not None and _has_finished_heads(stage_one, cfg):
        return ResumePlan(stage_one_is_finished=True)

    # 3. Look for a checkpoint of the stage that trains first; without one, start a new run.
    trained_first = cfg if stage_one is None else stage_one
    store = CheckpointStore(trained_first.run_dir)
    checkpoint = store.latest()
    if checkpoint is not None:
        return _resume_from(checkpoint, trained_first)
    check_nothing_is_lost(trained_first.run_dir)
    run = cfg.run_dir
    if stage_one is None and (run / STAGE_ONE).exists():  # a run with one stage would delete it
        raise CheckpointError(
            f"resume_from_checkpoint: {run / STAGE_ONE} is the first stage of a run, but the"
            f" configuration has no stage_one. Resume with {run / CONFIG}, or set output_dir to a"
            " new directory"
        )
    return ResumePlan(
        note=f"resume_from_checkpoint: no checkpoint in {store.root}, starting a new run"
    )


def _resume_from(
    checkpoint: Path, cfg: TrainConfig, stage_one_is_finished: bool = False
) -> ResumePlan:
    """Return the plan to resume from a checkpoint, with the settings that changed since then."""
    run = checkpoint.parent.parent
    before = config_of(run)
    if before is None:
        note = (
            f"note: {run / CONFIG} is missing or cannot be read: whether settings changed since"
            f" {checkpoint} is not known"
        )
        return ResumePlan(checkpoint, stage_one_is_finished=stage_one_is_finished, note=note)
    changed = tuple(changed_weight_keys(cfg, before))
    return ResumePlan(checkpoint, changed, stage_one_is_finished)


def config_of(run: Path) -> TrainConfig | None:
    """Return the configuration of a run; None if it has no readable config.yaml."""
    try:
        return load_config(TrainConfig, run / CONFIG)
    except ConfigError:
        return None


def changed_weight_keys(cfg: TrainConfig, before: TrainConfig) -> list[str]:
    """List `key: was A, now B` for the changed keys that affect weights and optimizer."""
    earlier = _weight_keys(before)
    changed = []
    for key, value in _weight_keys(cfg).items():
        if key not in earlier or earlier[key] == value:
            continue
        came_with_adapter = key.startswith("lora_") and cfg.lora_model_dir is not None
        if came_with_adapter and key not in cfg.model_fields_set:
            continue
        changed.append(f"{key}: was {json.dumps(earlier[key])}, now {json.dumps(value)}")
    return changed


def _weight_keys(cfg: TrainConfig) -> dict[str, Any]:
    """Return the keys that affect weights and optimizer -> their values."""
    weight_values = {
        name: getattr(cfg, name) for name in WEIGHT_KEYS if name not in cfg.ineffective_keys()
    }
    return {**cfg.heads_keys, "base_model": absolute_name(cfg.base_model), **weight_values}


def _has_finished_heads(stage_one: TrainConfig, cfg: TrainConfig) -> bool:
    """Return whether stage one saved its heads; ConfigError if other heads are configured now."""
    run = stage_one.run_dir
    # a crash may have left weights without config.json, which is written after them
    if find_heads(run / HEADS).layout is None or not (run / HEADS / "config.json").is_file():
        return False
    before = config_of(run)
    changed = [] if before is None else changed_weight_keys(stage_one, before)
    changed = [line for line in changed if line.partition(":")[0] in cfg.heads_keys]
    if changed:
        raise ConfigError(
            f"stage_one: the heads in {run} were trained with other settings"
            f" ({'; '.join(changed)}). Set these back, set output_dir to a new directory, or"
            " replace this run with overwrite_output_dir=true"
        )
    return True


# Describing


def check_target_model(
    checkpoint: LoadedCheckpoint, target_model: str, digest: str | None, console: Console
) -> None:
    """Raise CheckpointError if the checkpoint was trained on other weights of the target model. If
    that cannot be checked, print a note.

    Args:
        digest: the digest of the weights of `target_model`; None if no weight files were found.
    """
    saved_digest = checkpoint.snapshot["run"].get("base_model_digest")
    unknown = f"whether the weights of {target_model} are those that it was trained on is not known"
    if digest is None:
        console.print(
            f"note: {checkpoint.path}: no weight files of {target_model} were found to compare;"
            f" {unknown}",
        )
    elif saved_digest is None:
        console.print(
            f"note: {checkpoint.path} was written by an earlier version, or where no weight files"
            f" were found: {unknown}",
        )
    elif saved_digest != digest:
        raise CheckpointError(
            f"{checkpoint.path}: was trained on other weights than those of base_model"
            f" {target_model} now. Restore these, or name the directory that holds them; or start a"
            " new run from the trained heads: lora_model_dir=RUN output_dir=OTHER"
        )


def describe_differences(
    checkpoint: LoadedCheckpoint,
    state: TrainState,
    schedule: TrainingSchedule,
    processes: int,
    saved: Sequence[int],
    console: Console,
) -> None:
    """Print where a stage resumes, and what differs from an uninterrupted run.

    Args:
        processes: number of processes now.
        saved: the steps of the checkpoints in `output_dir`.
    """
    console.print(f"resuming after step {state.step}, from {checkpoint.path}")
    later = [f"step-{step}" for step in saved if step > state.step]
    if later:
        console.print(f"note: deleting the checkpoints of later steps: {', '.join(later)}")
    if state.step > schedule.total_steps:
        console.print(
            f"note: the checkpoint has more steps than the {schedule.total_steps} of this run:"
            f" nothing is trained, and the heads are those of step {state.step}",
            style="yellow",
        )
    for line in checkpoint.changed:
        console.print(f"warning: changed since that checkpoint: {line}", style="yellow")
    before = len(rng_states(checkpoint.snapshot))
    if before != processes:
        now = "1 process" if processes == 1 else f"{processes} processes"
        console.print(f"note: resuming on {now} (was {before}): dropout masks will differ")
    if not math.isclose(state.epoch, schedule.epoch(state.step), rel_tol=1e-6):
        console.print(
            f"note: the batch differs from that of the checkpoint: its {state.step} steps were"
            f" {state.epoch:.2f} epochs, here they count as {schedule.epoch(state.step):.2f}. To"
            " keep the batch, change gradient_accumulation_steps along with the number of"
            " processes",
            style="yellow",
        )


def forget_incomparable_best(
    state: TrainState,
    validation: str,
    objective: Mapping[str, Any],
    store: CheckpointStore,
    patience: int | None,
    distributed: DistributedContext,
    console: Console,
) -> None:
    """Forget the best evaluation if later evaluations cannot be compared with it, and print why.

    The reasons: the validation data or the objective changed, or early stopping would return
    weights that are in another directory.

    Args:
        validation: the fingerprint of the validation data now.
        objective: the names and values of the settings that define the objective now.
    """
    # 1. Collect the reasons.
    reasons = []
    if state.validation not in (None, validation):
        reasons.append("the validation data changed")
    for name, before in (state.objective or {}).items():
        now = objective.get(name)
        if before != now:
            reasons.append(f"{name} was {before}, now {now}")
    if patience is not None and state.best_loss is not None:
        best = distributed.run_on_main(store.best, state.best_step)
        if best is None:
            reasons.append(f"its weights are not in {store.root}")
    state.validation = validation
    state.objective = dict(objective)
    # 2. Forget it.
    if not reasons:
        return
    if state.evaluated:
        console.print(
            f"note: the best evaluation so far ({state.best}) is forgotten, since later ones cannot"
            f" be compared with it: {'; '.join(reasons)}",
            style="yellow",
        )
    state.best_loss = None
    state.best_step = 0
    state.evals_since_best = 0
