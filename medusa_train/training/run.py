"""One whole run, from a configuration to heads, tree and the last page. Knows no command line."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from medusa_train.config.schema import TrainConfig
from medusa_train.training.finish import calibration_prompts, fit_tree, heads_table, publish_heads, summary
from medusa_train.training.interrupt import StopRequest
from medusa_train.training.prepare import Data, Ready, build, load_data
from medusa_train.training.run_dir import CONFIG, HEADS, TREE, check_output_dir
from medusa_train.training.trainer import Outcome


def train(cfg: TrainConfig, console: Console, results: Console) -> int:
    """Train the heads that `cfg` describes, and finish: heads/, tree.json, a table.

    Args:
        cfg: a validated configuration.
        console: for progress and notes. results: for the final tables.

    Returns:
        The exit code: 0, or 130 / 143 after Ctrl-C / SIGTERM, everything saved.

    Raises:
        MedusaError: something that the user can mend.
    """
    check_output_dir(cfg)
    data = load_data(cfg, console)
    ready = build(cfg, data, console)
    go_on = go_on_command(ready.out)
    with ready.trainer.tracker, StopRequest(lambda line: console.print(line, style="yellow")) as stop:
        outcome = ready.trainer.run(stop)
    if outcome is Outcome.INTERRUPTED:
        console.print(f"stopped after step {ready.trainer.state.step}, saved. To go on:\n  {go_on}", highlight=False)
        return stop.exit_code
    try:
        step = _stopped_early(cfg, ready, console) if outcome is Outcome.EARLY else ready.trainer.state.step
        _finish(cfg, data, ready, step, console, results)
    except KeyboardInterrupt:
        saved = f"{ready.out / HEADS} is saved" if (ready.out / HEADS).exists() else "the checkpoint is saved"
        console.print(f"stopped: {saved}, {TREE} is not. To make it:\n  {go_on}", style="yellow", highlight=False)
        return 130
    return 0


def go_on_command(out: Path) -> str:
    """Write the command that goes on with a stopped run, to be typed where the run was started."""
    return shlex.join(["medusa-train", str(out / CONFIG), "resume_from_checkpoint=auto"])


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


def _finish(cfg: TrainConfig, data: Data, ready: Ready, step: int, console: Console, results: Console) -> None:
    """Save what was learnt by `step`, which the trainer holds, fit the tree, and show what came out."""
    trainer, draft, out = ready.trainer, ready.draft, ready.out
    held_out = trainer.measured  # the loop ends with an evaluation, unless there was nothing left to train
    if held_out is None and trainer.held_out is not None:
        held_out = trainer.evaluate(trainer.held_out())
    trainer.student.publish(out)
    publish_heads(draft, trainer.precision.dtype, out, cfg.base_model)
    calibration = None
    note = ""
    if cfg.calibration_tokens:
        prompts = calibration_prompts(data.prompts, cfg.calibration_tokens, cfg.seed)
        if not len(data.held_out):
            note = "nothing was held out, so the tree was fitted on prompts that the heads were trained on"
        calibration = fit_tree(trainer.student, draft, prompts, cfg.calibration_tokens, out, console)
    if (table := heads_table(held_out, calibration)) is not None:
        results.print(table)
    layers = f"{draft.num_layers} layer{'' if draft.num_layers == 1 else 's'}"
    what = f"{draft.num_heads} Medusa heads x {layers} on {cfg.base_model}"
    results.print(summary(what, trainer.state, step, held_out, calibration, out, note))
