"""Train one stage on loaded data, and finish it: heads/, tree.json and the closing tables."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.next_command import after_training, permission
from medusa_train.checkpoint.resolve import find_heads
from medusa_train.checkpoint.run_directory import CONFIG, HEADS, METRICS, TREE, writing
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, MedusaError, signal_exit_code
from medusa_train.inference.cuda_graphs import use_cuda_graphs
from medusa_train.io import describe_size
from medusa_train.models.precision import WeightMemory, free_memory, is_out_of_memory
from medusa_train.models.prepack import prepack_linears
from medusa_train.models.target_model import TargetModel
from medusa_train.progress import RunProgress, duration
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext
from medusa_train.training.load_data import TrainingData
from medusa_train.training.resume import NEW_STAGE, ResumePlan
from medusa_train.training.setup import build_trainer
from medusa_train.training.stop_signals import StopRequest
from medusa_train.training.target_model_recipe import TargetModelRecipe
from medusa_train.training.trainer import Trainer
from medusa_train.training.validation import NODES, ValidationResult
from medusa_train.tree_search.choose_tree import (
    MIN_CONVERSATIONS,
    TreeChoice,
    answer_prompts,
    choose_tree,
    timing_budget,
)
from medusa_train.tree_search.traces import prompts_by_conversation

#: Approximate time to generate a token for the tree, divided by the time to train on a token: 8 to
#: 14 on CPUs. In a long run the time for these answers is negligible.
ANSWERING_FACTOR = 10


def train(
    cfg: TrainConfig,
    data: TrainingData,
    progress: RunProgress,
    results: Console,
    distributed: DistributedContext = SINGLE_PROCESS,
    start: ResumePlan = NEW_STAGE,
    parent_run_dir: Path | None = None,
) -> int:
    """Train the heads that `cfg` describes, then write heads/ and tree.json and print the closing
    tables.

    Args:
        start: where the stage resumes.
        parent_run_dir: if this is stage one, the directory of its two-stage run.

    Returns:
        The exit code, see `stages.train_stages`.
    """
    try:
        trainer = build_trainer(cfg, data, progress, distributed, start, parent_run_dir)
        try:
            return _train_and_finish(trainer, data, results)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nAfter fixing this, resume with:\n  {resume_command(trainer)}"
            ) from error
        except KeyboardInterrupt as interrupt:
            progress.console.print(_describe_interruption(trainer), style="yellow")
            return signal_exit_code(interrupt)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MedusaError(
            f"not enough memory for this run ({str(error).partition('. ')[0]}).\nTo use less"
            f" memory: {'; '.join(_keys_for_less_memory(cfg))}.\n--inspect"
            " estimates the parts. Where torch reports much memory as reserved but unallocated,"
            " set PYTORCH_ALLOC_CONF=expandable_segments:True."
        ) from error


def _train_and_finish(trainer: Trainer, data: TrainingData, results: Console) -> int:
    """Train to the end or until a request to stop; return the exit code."""
    console = trainer.progress.console
    state = trainer.state
    # 1. Train the steps.
    first_step = state.step  # 0, or the step of the checkpoint that is resumed
    seconds_before = state.seconds
    with trainer.loggers, StopRequest(lambda line: console.print(line, style="yellow")) as stop:
        interrupted = trainer.run(stop, lambda seconds: _print_time_left(trainer, data, seconds))
    trainer.progress.seconds["training"] = state.seconds - seconds_before
    if interrupted:
        console.print(
            f"stopped after step {state.step}, saved. To resume:\n  {resume_command(trainer)}",
        )
        # the signal may have reached only one of the processes
        return max(trainer.distributed.gather(stop.exit_code))

    # 2. Load the weights to save, and evaluate them if no evaluation of them exists.
    step = state.step
    if trainer.out_of_patience:
        step = trainer.restore_best()
        console.print(
            "stopped early: no lower validation loss in"
            f" {trainer.cfg.early_stopping_patience} evaluations ({state.best}); using the weights"
            f" of step {step}"
        )
    if trainer.last_validation is None and trainer.validation_batches is not None:
        trainer.last_validation = trainer.evaluate(trainer.validation_batches())
    # 3. Release the strategy and describe the cache, together with all processes.
    trainer.strategy.release([*trainer.draft.parameters(), *trainer.recipe.saved])
    cache_summary = None
    if trainer.recipe.cache is not None:
        cache_summary = trainer.recipe.cache.describe()
    # 4. In rank 0 alone, write the files, choose the tree and print the closing tables.
    try:
        if trainer.distributed.is_main:
            with writing(trainer.run_dir):
                choice = _save(trainer, data, took_no_step=first_step == state.step)
                _print_results(trainer, step, choice, cache_summary, results)
    finally:
        # the other processes wait here, because NCCL's connections must be closed together
        trainer.distributed.gather(None)
    return 0


def _save(trainer: Trainer, data: TrainingData, *, took_no_step: bool) -> TreeChoice | None:
    """Save the trainer's weights, and choose the tree unless these weights already have one."""
    cfg, run_dir, progress = trainer.cfg, trainer.run_dir, trainer.progress
    heads, tree = run_dir / HEADS, run_dir / TREE
    # 1. Check for a tree from an earlier, finished run, which wrote its tree after its heads.
    has_tree = took_no_step and tree.is_file() and heads.is_dir()
    has_tree = has_tree and tree.stat().st_mtime >= heads.stat().st_mtime
    # 2. Save the weights in the dtype used for decoding; checkpoints keep float32.
    before = digest_files(find_heads(heads).files)
    trainer.recipe.save_trained(run_dir)
    save_draft(trainer.draft.to(trainer.recipe.precision.dtype), heads, cfg.base_model)
    # 3. Choose the tree, unless it was already fitted to these heads.
    if has_tree and digest_files(find_heads(heads).files) == before:
        os.utime(tree)  # keep it newer than the heads, which were just saved again
        progress.print(f"{tree} is kept; medusa-eval --calibrate chooses the tree again")
        return None
    if not cfg.calibration_tokens or trainer.strategy.partitioned:
        return None
    if trainer.last_validation is not None and not data.prompts_held_out:
        progress.print(
            f"fewer than {MIN_CONVERSATIONS} chats are held out: fitting the tree to prompts of the"
            " training set",
            style="yellow",
        )
    return _choose_and_save_tree(trainer, data)


def _print_results(
    trainer: Trainer,
    step: int,
    choice: TreeChoice | None,
    cache_summary: str | None,
    results: Console,
) -> None:
    """Print the closing tables, and the next command in a line that can be copied.

    Args:
        step: the step whose weights are saved; after early stopping it is not the last step.
        cache_summary: describes what was read from the hidden-state cache; None without a cache.
    """
    cfg, run_dir = trainer.cfg, trainer.run_dir
    if (table := heads_table(trainer.last_validation, choice)) is not None:
        results.print(table)
    results.print(_summary(trainer, step, choice, cache_summary))
    following = "stage two"
    if trainer.parent_run_dir is None:
        lacks_tree = bool(cfg.calibration_tokens) and trainer.strategy.partitioned
        following = after_training(
            cfg.base_model,
            run_dir,
            lacks_tree=lacks_tree,
            trust_remote_code=cfg.trust_remote_code,
        )
        if trainer.recipe.target_model.tree_unsupported_reason is not None:
            words = ["medusa-export", str(run_dir), "--to", "vllm"]
            following = shlex.join(words + permission(cfg.trust_remote_code))
    results.print(Text(f"next: {following}", style="bold"), soft_wrap=True)


def _print_time_left(trainer: Trainer, data: TrainingData, step_seconds: float) -> None:
    """Print how long the rest of the stage takes. The log lines count only the time of steps."""
    schedule, state, progress = trainer.schedule, trainer.state, trainer.progress
    steps = schedule.total_steps - state.step
    if not steps or not trainer.distributed.is_main:
        return
    # 1. Steps and validations. Assume that validation takes as long per token as training.
    validations = max(1, math.ceil(steps / schedule.eval_every))
    share = data.validation.tokens / data.train.tokens
    validation_steps = validations * share * schedule.steps_per_epoch
    seconds = (steps + validation_steps) * step_seconds
    # 2. Choosing the tree.
    if trainer.cfg.calibration_tokens and not trainer.strategy.partitioned:
        tokens_per_s = state.tokens / state.seconds
        seconds += ANSWERING_FACTOR * trainer.cfg.calibration_tokens / tokens_per_s
        seconds += timing_budget(progress.total_seconds + seconds)
    progress.print(
        f"about {duration(seconds)} left of this run, {duration(steps * step_seconds)} of them for"
        " steps; then come validation and the tree"
    )


# Stopping and resuming


def resume_command(trainer: Trainer) -> str:
    """Return the command that resumes a stopped run, for the directory it was started in."""
    # 1. Find out whether all processes run on this machine: torchrun sets LOCAL_WORLD_SIZE,
    # DeepSpeed sets LOCAL_SIZE.
    processes = trainer.distributed.size
    is_one_machine = os.environ.get("SLURM_NNODES", "1") == "1"
    if known := os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE")):
        is_one_machine = int(known) == processes
    # 2. Build the command. A run on several machines is started again by srun or torchrun, so it
    # gets no --num-gpus.
    config = (trainer.parent_run_dir or trainer.run_dir) / CONFIG
    command = ["medusa-train", str(config), "resume_from_checkpoint=auto"]
    command += permission(trainer.cfg.trust_remote_code)
    if processes > 1 and is_one_machine:
        command += ["--num-gpus", str(processes)]
    return shlex.join(command)


def _keys_for_less_memory(cfg: TrainConfig) -> Iterator[str]:
    if cfg.micro_batch_size > 1:
        half = cfg.micro_batch_size // 2
        yield f"micro_batch_size: {half} with more gradient_accumulation_steps"
    yield f"a sequence_len below {cfg.sequence_len}"
    if cfg.recipe == "medusa2" and cfg.gradient_checkpointing is not True:
        yield "gradient_checkpointing: true"
    if "8bit" not in cfg.optimizer and "RANK" not in os.environ:
        yield "optimizer: paged_adamw_8bit"
    can_be_quantized = cfg.recipe == "medusa1" or cfg.adapter is not None
    if can_be_quantized and not cfg.load_in_4bit:
        yield "load_in_4bit: true"
    if cfg.draft == "medusa" and cfg.medusa_vocab_size is None:
        yield "a medusa_vocab_size"


def _describe_interruption(trainer: Trainer) -> str:
    """Describe what is saved of a run interrupted within a step or while it was finishing."""
    step = trainer.state.step
    heads = trainer.run_dir / HEADS
    is_saved = trainer.store.at(step) is not None
    if is_saved and heads.exists() and trainer.parent_run_dir is None:
        status = f"{heads} is saved, {TREE} is not. To create it"
    elif is_saved:
        status = "the checkpoint is saved. To resume"
    else:
        saved = "there is no checkpoint"
        latest = trainer.store.latest()
        if latest is not None:
            saved = f"the last checkpoint is {latest}"
        status = f"step {step} was the last completed step, {saved}. To resume"
    return f"stopped: {status}:\n  {resume_command(trainer)}"


# Tree


def _choose_and_save_tree(trainer: Trainer, data: TrainingData) -> TreeChoice | None:
    """Choose the tree on greedy answers to prompts, and write it with the traces of these answers.

    An adapter is merged first, as for decoding; this dequantizes a quantized target model.

    Returns:
        The choice; None if no tree could be chosen, after printing the reason. The heads are usable
        without a tree.
    """
    cfg, draft, progress = trainer.cfg, trainer.draft, trainer.progress
    run_dir = trainer.run_dir
    words = ["medusa-eval", "--calibrate", "--model", str(run_dir)]
    again = shlex.join(words + permission(cfg.trust_remote_code))
    trainer.recipe.train(False)
    draft.eval()
    try:
        target_model = _target_model_that_decodes(trainer.recipe)
        with progress.phase("prepacking weights for decoding", ticking=True):  # as medusa-eval does
            prepack_linears(target_model.model)
            use_cuda_graphs(target_model)
            prepack_linears(draft)
        prompts = prompts_by_conversation(data.prompts, cfg.calibration_tokens, cfg.seed)
        traced = answer_prompts(target_model, draft, prompts, cfg.calibration_tokens, progress)
        seconds = timing_budget(progress.total_seconds)
        choice = choose_tree(target_model, draft, traced, progress, seconds=seconds)
    except (MedusaError, RuntimeError) as error:
        reason = str(error)
        if not isinstance(error, MedusaError):
            if not is_out_of_memory(error):
                raise
            reason = "not enough memory next to training"
        progress.print(f"no tree was chosen: {reason}. To choose it: {again}", style="yellow")
        return None
    choice.save(run_dir, traced)
    return choice


def _target_model_that_decodes(recipe: TargetModelRecipe) -> TargetModel:
    """Return the trained target model in the form in which `load_for_decoding` loads it, because
    latencies and the best tree depend on that form.

    Raises:
        MedusaError: the model is quantized and has an adapter, and its dequantized weights do not
            fit into memory.
    """
    target_model = recipe.target_model
    if recipe.adapter is None:
        return target_model
    dtype = recipe.precision.dtype
    if getattr(target_model.model, "is_quantized", False):
        packed = WeightMemory.of(target_model.model, target_model.device).quantized
        needed_bytes = 2 * packed * dtype.itemsize  # NF4 packs two weights into a byte
        free = free_memory(target_model.device)
        if free is not None and needed_bytes > free:
            raise MedusaError(
                "decoding merges the adapter into dequantized weights, which take"
                f" {describe_size(needed_bytes)} next to training, and {describe_size(free)} are"
                " free"
            )
    recipe.adapter.merge()
    return target_model.to_dtype(dtype)  # also casts `modules_to_save`, trained in float32


# Closing tables


def heads_table(validation: ValidationResult | None, choice: TreeChoice | None) -> Table | None:
    """Tabulate top-1 and top-5 accuracy per head on validation data and on the target model's
    greedy continuations.
    """
    measured: dict[str, Sequence[Sequence[float]]] = {}  # [K, ranks] each
    if validation is not None:
        measured["held-out text"] = validation.top
    if choice is not None:
        measured["greedy continuations"] = choice.accuracy
    if not measured:
        return None
    table = Table(title="head accuracy", title_justify="left")
    table.add_column("head", justify="right")
    for text in measured:
        table.add_column(f"{text}\ntop-1", justify="right")
        table.add_column(f"{text}\ntop-5", justify="right")
    for k, accuracies in enumerate(zip(*measured.values(), strict=True), start=1):
        shares = [f"{top[rank]:.3f}" for top in accuracies for rank in (0, 4)]
        table.add_row(str(k), *shares)
    return table


def _summary(
    trainer: Trainer, step: int, choice: TreeChoice | None, cache_summary: str | None
) -> Table:
    """Tabulate what was trained, the validation results, the tree, the time, and what was saved."""
    cfg, state, run_dir = trainer.cfg, trainer.state, trainer.run_dir
    validation, progress = trainer.last_validation, trainer.progress
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    # 1. What was trained, and how fast.
    table.add_row("trained", Text(f"{cfg.draft_config.describe()} on {cfg.base_model}"))
    speed = state.tokens / state.seconds if state.seconds else 0.0
    skipped = f", {state.skipped} of them skipped" if state.skipped else ""
    table.add_row(
        "run",
        f"{state.step:,} steps{skipped}, {state.epoch:.2f} epochs, {state.tokens:,} tokens, "
        f"{duration(state.seconds)} ({speed:,.0f} tokens/s)",
    )
    # 2. Validation results and the tree.
    if validation is not None:
        saved = f", as of step {step}" if step != state.step else ""
        lowest = f" ({state.best})" if step != state.best_step else ""
        objective = "held-out loss"
        if validation.lm_loss is not None:
            objective = "held-out objective (target model + lambda0 x heads)"
        table.add_row(objective, f"{validation.objective:.4f}{saved}{lowest}")
        if (length := validation.acceptance_length) is not None:
            table.add_row(
                "acceptance length",
                f"{length:.2f} tokens per step: teacher-forced on held-out text, with a fixed tree"
                f" of {NODES} nodes (comparable between evaluations and runs)",
            )
    if choice is not None:
        described = choice.describe()
        if validation is None:
            described += "; no data are held out: chosen on prompts of the training set"
        table.add_row("tree", described)
    # 3. Cache, time and files.
    if cache_summary is not None:
        table.add_row("hidden states", Text(cache_summary))
    if cfg.calibration_tokens and trainer.strategy.partitioned:
        table.add_row(
            "note", "no tree was fitted: under ZeRO-3 no process holds the whole target model"
        )
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in progress.seconds.items())
    table.add_row("time", f"{duration(progress.total_seconds)}: {phases}")
    files = [name for name in (HEADS, TREE, CONFIG, METRICS) if (run_dir / name).exists()]
    table.add_row("saved", Text(f"{run_dir} ({', '.join(files)})"))
    return table
