"""One whole run, from a configuration to heads, tree and the last page. Knows no command line."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from medusa_train.checkpoint.heads import save_draft
from medusa_train.checkpoint.run_layout import CONFIG, HEADS, TREE, check_output_dir, writing
from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import EncodedDataset
from medusa_train.errors import CheckpointError, MedusaError, signal_exit_code
from medusa_train.inference.tree_search import Calibration, calibrate
from medusa_train.models.drafts.base import Draft
from medusa_train.progress import RunProgress, duration
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.training.load_data import TrainingData, load_data
from medusa_train.training.setup import Ready, build
from medusa_train.training.signals import StopRequest, sigterm_like_ctrl_c
from medusa_train.training.state import TrainState
from medusa_train.training.trainer import Outcome, Trainer
from medusa_train.training.validation import ValidationResult

#: Seconds in which a second signal is a launcher's echo of the first: a terminal's Ctrl-C reaches all processes, and
#: launchers then pass a SIGTERM on.
ECHO = 10.0


def train(cfg: TrainConfig, console: Console, results: Console, world: World = SINGLE_PROCESS) -> int:
    """Train the heads that `cfg` describes, and finish: heads/, tree.json, a table.

    Args:
        cfg: a validated configuration.
        console: for progress and notes. results: for the final tables. Of several processes only rank 0 writes there.
        world: the processes that train together; each of them calls this.

    Returns:
        The exit code: 0, or 130 / 143 after Ctrl-C / SIGTERM, with a line on what is saved and how to go on.

    Raises:
        MedusaError: something that the user can mend.
        KeyboardInterrupt: Ctrl-C, or SIGTERM as Terminated, before there was anything to save.
    """
    with sigterm_like_ctrl_c():
        world.run_on_main(lambda: check_output_dir(cfg))
        data = load_data(cfg, console, world)
        ready = build(cfg, data, console, world)
        try:
            with _saying_how_to_go_on(ready):
                return _run(cfg, data, ready, console, results)
        except KeyboardInterrupt as stopped:
            console.print(_stopped_at_once(ready), style="yellow", highlight=False)
            return signal_exit_code(stopped)


def _run(cfg: TrainConfig, data: TrainingData, ready: Ready, console: Console, results: Console) -> int:
    trainer, world = ready.trainer, ready.trainer.world
    echo = ECHO if world.size > 1 else 0.0
    with trainer.loggers, StopRequest(lambda line: console.print(line, style="yellow"), echo) as stop:
        outcome = trainer.run(stop)
    if outcome is Outcome.INTERRUPTED:
        console.print(
            f"stopped after step {trainer.state.step}, saved. To go on:\n  {resume_command(ready)}", highlight=False
        )
        return max(world.gather(stop.exit_code))  # the signal may have reached only one of the processes
    step = _stopped_early(cfg, ready, console) if outcome is Outcome.EARLY else trainer.state.step
    held_out = _last_evaluation(trainer)
    trainer.strategy.release()
    if world.is_main:  # from here on nothing needs the others
        with writing(ready.out):
            _finish(cfg, data, ready, step, held_out, console, results)
    return 0


@contextmanager
def _saying_how_to_go_on(ready: Ready) -> Iterator[None]:
    """Within, a failed write or read of what is saved ends with the command to be given once that is mended."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nTo go on, once that is mended:\n  {resume_command(ready)}") from error


def _stopped_at_once(ready: Ready) -> str:
    """Say what is saved of a run that was not left to finish its step, or its tree."""
    state, store = ready.trainer.state, ready.trainer.store
    saved = store.at(state.step)
    if saved is not None and (ready.out / HEADS).exists():
        what = f"{ready.out / HEADS} is saved, {TREE} is not. To make it"
    elif saved is not None:
        what = "the checkpoint is saved. To go on"
    else:
        latest = store.latest()
        kept = "nothing is saved" if latest is None else f"saved is {latest}"
        what = f"step {state.step} was the last one that was done, {kept}. To go on"
    return f"stopped: {what}:\n  {resume_command(ready)}"


def resume_command(ready: Ready) -> str:
    """Write the command that goes on with a stopped run, to be typed where the run was started."""
    processes = ready.trainer.world.size
    many = ["--num-gpus", str(processes)] if processes > 1 else []
    return shlex.join(["medusa-train", str(ready.out / CONFIG), "resume_from_checkpoint=auto", *many])


def _stopped_early(cfg: TrainConfig, ready: Ready, console: Console) -> int:
    """Go back to the best evaluation, say so, and return its step."""
    state = ready.trainer.state
    step = ready.trainer.take_best()
    taken = f"taking what was learnt by step {step}"
    if step != state.best_step:
        taken = f"its checkpoint is gone, so {taken}"
    console.print(
        f"stopped early: no better held-out loss in {cfg.early_stopping_patience} evaluations "
        f"(lowest {state.best_loss:.4f} at step {state.best_step}), {taken}"
    )
    return step


def _last_evaluation(trainer: Trainer) -> ValidationResult | None:
    """Return what the loop's last evaluation found; it is made now where there was nothing left to train."""
    if trainer.last_validation is None and trainer.validation_batches is not None:
        return trainer.evaluate(trainer.validation_batches())
    return trainer.last_validation


def _finish(
    cfg: TrainConfig,
    data: TrainingData,
    ready: Ready,
    step: int,
    held_out: ValidationResult | None,
    console: Console,
    results: Console,
) -> None:
    """Save what was learnt by `step`, which the trainer holds, fit the tree, and show what came out."""
    trainer, draft, out = ready.trainer, ready.draft, ready.out
    trainer.recipe.publish(out)
    write_heads(draft, trainer.precision.dtype, out, cfg.base_model)
    calibration = None
    note = ""
    if cfg.calibration_tokens:
        prompts = calibration_prompts(data.prompts, cfg.calibration_tokens, cfg.seed)
        if not len(data.validation):
            note = "nothing was held out, so the tree was fitted on prompts that the heads were trained on"
        calibration = fit_tree(trainer.recipe, draft, prompts, cfg.calibration_tokens, out, console)
    if (table := heads_table(held_out, calibration)) is not None:
        results.print(table)
    what = f"{cfg.draft_config.describe()} on {cfg.base_model}"
    results.print(summary(what, trainer.state, step, held_out, calibration, out, note))


ANSWER = 256  # longest calibration answer in tokens; shorter where the budget would not do for eight of them


def write_heads(draft: Draft, dtype: torch.dtype, out: Path, base_model: str) -> Path:
    """Write heads/, in the dtype that the run computed in; `draft` is converted to it.

    The float32 masters stay in the last checkpoint.
    """
    return save_draft(draft.to(dtype), out / HEADS, base_model)


def calibration_prompts(conversations: EncodedDataset, token_budget: int, seed: int) -> list[list[int]]:
    """Places in the conversations where an answer begins, as the tokens before it, in random order.

    Earlier turns keep the answers of the data as history; only what comes next is the backbone's own. Enough are
    taken for `token_budget` tokens even where the backbone answers in a quarter of the data's words.
    """
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    room = 4 * token_budget
    for example in draw.sample(list(conversations), len(conversations)):
        prompts.extend(example.prompts())
        room -= int(example.supervised.sum())
        if room <= 0:
            break
    draw.shuffle(prompts)
    return prompts


def fit_tree(
    recipe: BackboneRecipe,
    draft: Draft,
    prompts: Sequence[list[int]],
    token_budget: int,
    out: Path,
    console: Console,
) -> Calibration | None:
    """Choose the tree on the backbone's own greedy answers to `prompts` and write tree.json.

    An adapter is folded in first, as for decoding, unless the backbone is quantised: dequantised it may not fit.

    Returns:
        What was found, or None, with a line that says why: the heads are of use without a tree too.
    """
    recipe.train(False)
    draft.eval()
    if recipe.adapter is not None and not getattr(recipe.backbone.model, "is_quantized", False):
        recipe.adapter.merge()
    progress = RunProgress(console)
    with progress.phase("prepacking weights for decoding", ticking=True):  # as medusa-eval does
        recipe.backbone.pack()
        draft.prepack()
    if not console.is_terminal:
        console.print(f"choosing the tree on {token_budget:,} greedy tokens of held-out prompts", highlight=False)
    try:
        with progress.phase("choosing the tree", token_budget, "greedy tokens", transient=False) as phase:
            found = calibrate(
                recipe.backbone,
                draft,
                prompts,
                max_new_tokens=min(ANSWER, max(8, token_budget // 8)),
                token_budget=token_budget,
                on_answer=phase.advance,
                on_measured=lambda: phase.update(phase.completed, "timing trees"),
            )
    except MedusaError as reason:
        console.print(f"no tree was made: {reason}", style="yellow", markup=False)
        return None
    found.save(out / TREE)
    return found


def heads_table(held_out: ValidationResult | None, calibration: Calibration | None) -> Table | None:
    """Top-1 and top-5 accuracy of every head, on held-out text and on the backbone's own continuations."""
    if held_out is None and calibration is None:
        return None
    table = Table(title="head accuracy", title_justify="left")
    table.add_column("head", justify="right")
    rows: list[list[str]] = []
    if held_out is not None:
        _add_columns(table, rows, "held-out text", held_out.top)
    if calibration is not None:
        _add_columns(table, rows, "greedy continuations", calibration.accuracy)
    for k, row in enumerate(rows, start=1):
        table.add_row(str(k), *row)
    return table


def _add_columns(table: Table, rows: list[list[str]], name: str, top: Sequence[Sequence[float]]) -> None:
    for rank in (1, 5):
        table.add_column(f"{name}\ntop-{rank}", justify="right")
    rows.extend([] for _ in range(len(top) - len(rows)))
    for row, shares in zip(rows, top, strict=True):
        row.extend([f"{shares[0]:.3f}", f"{shares[4]:.3f}"])


def summary(
    what: str,
    state: TrainState,
    step: int,
    held_out: ValidationResult | None,
    calibration: Calibration | None,
    out: Path,
    warning: str = "",
) -> Table:
    """Say what was trained, how long it took, what was saved (as of `step`), and which command comes next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("trained", Text(what))
    speed = state.tokens / state.seconds if state.seconds else 0.0
    skipped = f", {state.skipped} of them skipped" if state.skipped else ""
    table.add_row(
        "run",
        f"{state.step:,} steps{skipped}, {state.epoch:.2f} epochs, {state.tokens:,} tokens, "
        f"{duration(state.seconds)} ({speed:,.0f} tokens/s)",
    )
    if held_out is not None:
        best = f" (lowest {state.best_loss:.4f} at step {state.best_step})" if state.best_step != step else ""
        saved = f", as of step {step}" if step != state.step else ""
        whole = "held-out loss" if held_out.lm_loss is None else "held-out objective (backbone + lambda0 x heads)"
        table.add_row(whole, f"{held_out.objective:.4f}{saved}{best}")
        if held_out.acceptance is not None:
            table.add_row(
                "acceptance length",
                f"{held_out.acceptance.length:.2f} tokens per step on held-out text, with a tree of "
                f"{held_out.acceptance.tree.size} nodes",
            )
    if calibration is not None:
        tree = calibration.best
        table.add_row(
            "tree",
            f"{tree.tree.size} nodes: {tree.tokens_per_step:.2f} tokens per step expected, {tree.step_ms:.1f} ms per "
            f"step here (from {calibration.tokens:,} greedy tokens)",
        )
    if warning:
        table.add_row("note", warning)
    kept = [name for name in (HEADS, TREE, "config.yaml", "metrics.jsonl") if (out / name).exists()]
    table.add_row("saved", Text(f"{out} ({', '.join(kept)})"))
    table.add_row("next", Text(shlex.join(["medusa-eval", "--bench", "tiny", "--model", str(out)]), style="bold"))
    return table
