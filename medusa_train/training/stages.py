"""Train a run: load its data, train stage one if the key `stage_one` is set, then train the stage
that starts from its heads.

Both stages train in the same processes, one after the other. So every launcher can start a
two-stage run like a run with one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console

from medusa_train.checkpoint.run_directory import (
    check_output_dir,
    only_writer,
    prepare_output_dir,
    write_config,
)
from medusa_train.config.load import stage_one_config
from medusa_train.config.schema import DATA_KEYS, TrainConfig
from medusa_train.models.architecture import describe_without_trees
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.precision import release_memory
from medusa_train.models.vllm_eagle3_models import vllm_eagle3_warnings
from medusa_train.progress import LoadingProgress, RunProgress
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext
from medusa_train.training.load_data import TrainingData, load_data
from medusa_train.training.preflight import check_run
from medusa_train.training.resume import NEW_STAGE, plan_resume
from medusa_train.training.schedule import TrainingSchedule, plan_steps
from medusa_train.training.stop_signals import signals_as_interrupts
from medusa_train.training.train_stage import train

TITLES = ("stage 1 of 2", "stage 2 of 2")


def train_stages(
    cfg: TrainConfig,
    console: Console,
    results: Console,
    distributed: DistributedContext = SINGLE_PROCESS,
) -> int:
    """Train stage one, unless `cfg` has none or its heads are finished; then train `cfg`.

    The data of both stages are loaded and checked before stage one trains. With
    `resume_from_checkpoint`, the run continues in the stage in which it was stopped.

    Args:
        console: console for progress and notes; only rank 0 prints.
        results: console for the closing tables.
        distributed: the processes that train together. All of them must call this function.

    Returns:
        The exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM. After a signal, a printed
        line says what is saved and how to resume.

    Raises:
        MedusaError: an error in the configuration, the data or the environment.
        KeyboardInterrupt: Ctrl-C before there was anything to save; for SIGTERM its subclass
            Terminated.
    """
    stage_one = stage_one_config(cfg)
    progress = RunProgress(console)
    with signals_as_interrupts(), ExitStack() as lock:
        # 1. Lock the run directory, and decide where the run resumes.
        distributed.run_on_main(check_output_dir, cfg)
        distributed.run_on_main(lock.enter_context, only_writer(cfg.run_dir))
        plan = distributed.run_on_main(plan_resume, cfg, stage_one)
        if stage_one is not None and plan.stage_one_is_finished:
            console.print(f"{TITLES[0]}: the heads in {stage_one.output_dir} are finished")
            progress.title = TITLES[1]
            stage_one = None

        # 2. Check all stages, and load their data.
        stages = [cfg] if stage_one is None else [stage_one, cfg]
        with LoadingProgress(progress) as shown:
            for stage in stages:
                distributed.run_on_main(check_run, stage, distributed.size)
            data = load_stages(stages, console, distributed, shown)
        schedules = [
            plan_steps(stage, read.train, distributed.rank, distributed.size)[1]
            for stage, read in zip(stages, data, strict=True)
        ]
        if plan.note is not None:
            console.print(plan.note)

        # 3. Train one stage, or both.
        if stage_one is not None:
            for line in _describe_stages(stages, schedules):
                console.print(line)
            distributed.run_on_main(_begin, cfg)
            console.print(f"\n{TITLES[0]}", style="bold")
            progress.title = TITLES[0]
            code = train(
                stage_one, data[0], progress, results, distributed, plan, parent_run_dir=cfg.run_dir
            )
            if code != 0:
                return code
            release_memory()
            console.print(f"\n{TITLES[1]}", style="bold")
            progress.title = TITLES[1]
            progress.seconds = {"stage one": progress.total_seconds}
            plan = NEW_STAGE
        return train(cfg, data[-1], progress, results, distributed, plan)


def load_stages(
    stages: Sequence[TrainConfig],
    console: Console,
    distributed: DistributedContext,
    shown: LoadingProgress,
) -> list[TrainingData]:
    """Load the data of all stages. If both stages read the same data, they are loaded once. Rank 0
    loads them, and the other processes receive the result.
    """
    loaded: list[TrainingData] = []
    for cfg in stages:
        if loaded and _read_the_same(cfg, stages[0]):
            loaded.append(loaded[0])
        else:
            loaded.append(distributed.run_on_main(load_data, cfg, console, shown.update))
    # print these before hours of training, not only at the export
    for warning in _notes(stages[-1]):
        console.print(f"note: {warning}", style="yellow")
    return loaded


def _notes(cfg: TrainConfig) -> list[str]:
    """Return notes if this package cannot decode with the draft, or if vLLM cannot serve it."""
    _, config = resolve_target_model(cfg.base_model, trust_remote_code=cfg.trust_remote_code)
    notes = []
    if (note := describe_without_trees(config, cfg.base_model)) is not None:
        notes.append(note)
    if cfg.draft == "eagle3":
        notes += vllm_eagle3_warnings(config)
    return notes


def _read_the_same(cfg: TrainConfig, other: TrainConfig) -> bool:
    """Return whether two stages train on the same rows."""
    if cfg.mixes_rows != other.mixes_rows:
        return False
    return all(getattr(cfg, key) == getattr(other, key) for key in DATA_KEYS)


def _describe_stages(
    stages: Sequence[TrainConfig], schedules: Sequence[TrainingSchedule]
) -> list[str]:
    lines = []
    for title, cfg, schedule in zip(TITLES, stages, schedules, strict=True):
        trained = f"heads and {cfg.adapter or 'target model'}"
        if cfg.recipe == "medusa1":
            trained = cfg.draft_config.describe()
        lines.append(
            f"{title}: {trained}, {schedule.total_steps:,} steps; output: {cfg.output_dir}"
        )
    if stages[1].max_steps is not None and stages[0].max_steps is None:
        lines.append(
            "note: max_steps shortens stage 2 alone; stage_one.max_steps=N shortens stage 1"
        )
    return lines


def _begin(cfg: TrainConfig) -> None:
    """Delete the run that this one overwrites, including its stage one, and write the configuration
    of both stages.
    """
    run_dir = cfg.run_dir
    if cfg.resume_from_checkpoint is None:
        prepare_output_dir(run_dir, 0)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_config(cfg, run_dir)
