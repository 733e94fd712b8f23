"""One whole run, from a configuration to heads, tree and the last page. Knows no command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from medusa_train.config.schema import TrainConfig
from medusa_train.errors import CheckpointError, interrupted_code
from medusa_train.training.distributed import ALONE, World
from medusa_train.training.finish import calibration_prompts, fit_tree, heads_table, publish_heads, summary
from medusa_train.training.heldout import HeldOut
from medusa_train.training.interrupt import StopRequest, sigterm_like_ctrl_c
from medusa_train.training.prepare import Data, Ready, build, load_data
from medusa_train.training.run_dir import CONFIG, HEADS, TREE, check_output_dir, writing
from medusa_train.training.trainer import Outcome, Trainer

#: Seconds in which a second signal is a launcher's echo of the first: a terminal's Ctrl-C reaches all processes, and
#: launchers then pass a SIGTERM on.
ECHO = 10.0


def train(cfg: TrainConfig, console: Console, results: Console, world: World = ALONE) -> int:
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
        world.lead(lambda: check_output_dir(cfg))
        data = load_data(cfg, console, world)
        ready = build(cfg, data, console, world)
        try:
            with _saying_how_to_go_on(ready):
                return _run(cfg, data, ready, console, results)
        except KeyboardInterrupt as stopped:
            console.print(_stopped_at_once(ready), style="yellow", highlight=False)
            return interrupted_code(stopped)


def _run(cfg: TrainConfig, data: Data, ready: Ready, console: Console, results: Console) -> int:
    trainer, world = ready.trainer, ready.trainer.world
    echo = ECHO if world.size > 1 else 0.0
    with trainer.tracker, StopRequest(lambda line: console.print(line, style="yellow"), echo) as stop:
        outcome = trainer.run(stop)
    if outcome is Outcome.INTERRUPTED:
        console.print(
            f"stopped after step {trainer.state.step}, saved. To go on:\n  {go_on_command(ready)}", highlight=False
        )
        return max(world.gather(stop.exit_code))  # the signal may have reached only one of the processes
    step = _stopped_early(cfg, ready, console) if outcome is Outcome.EARLY else trainer.state.step
    held_out = _last_evaluation(trainer)
    trainer.engine.release()
    if world.first:  # from here on nothing needs the others
        with writing(ready.out):
            _finish(cfg, data, ready, step, held_out, console, results)
    return 0


@contextmanager
def _saying_how_to_go_on(ready: Ready) -> Iterator[None]:
    """Within, a failed write or read of what is saved ends with the command to be given once that is mended."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}\nTo go on, once that is mended:\n  {go_on_command(ready)}") from error


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
    return f"stopped: {what}:\n  {go_on_command(ready)}"


def go_on_command(ready: Ready) -> str:
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


def _last_evaluation(trainer: Trainer) -> HeldOut | None:
    """Return what the loop's last evaluation found; it is made now where there was nothing left to train."""
    if trainer.measured is None and trainer.held_out is not None:
        return trainer.evaluate(trainer.held_out())
    return trainer.measured


def _finish(
    cfg: TrainConfig,
    data: Data,
    ready: Ready,
    step: int,
    held_out: HeldOut | None,
    console: Console,
    results: Console,
) -> None:
    """Save what was learnt by `step`, which the trainer holds, fit the tree, and show what came out."""
    trainer, draft, out = ready.trainer, ready.draft, ready.out
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
    what = f"{cfg.drafted.describe()} on {cfg.base_model}"
    results.print(summary(what, trainer.state, step, held_out, calibration, out, note))
