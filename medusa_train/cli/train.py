"""`medusa-train`: arguments in, exit code out. Knows the command line; everything else is `training`'s."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from medusa_train.cli.common import error_console, read_arguments, run_command, split_arguments
from medusa_train.cli.launch import follow, start_all, train_with_others
from medusa_train.config.docs import TITLE, format_config, schema_text
from medusa_train.config.schema import TrainConfig
from medusa_train.training.process_info import process_info_from_env

#: A log file or a pipe has no width; the tables need this much.
PIPE_WIDTH = 120

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

HELP = """
Train Medusa heads: draft heads that let a language model write several tokens per forward pass. The backbone stays
frozen (recipe medusa1), or learns with them, through LoRA or itself (medusa2).

[bold]CONFIG.yaml[/bold] holds flat keys with Axolotl's names; [bold]key=value[/bold] sets one for this run, and stands
above the file. The README lists every key. The least that is needed: base_model (a Hugging Face directory or a hub
name), datasets (chats in JSONL: ShareGPT, OpenAI messages or alpaca form) and output_dir.

[bold]Examples[/bold]

  medusa-train configs/tiny_m1.yaml

  medusa-train configs/tiny_m1.yaml learning_rate=1e-3 max_steps=100 output_dir=runs/trial

  medusa-train configs/tiny_m1.yaml resume_from_checkpoint=auto

  medusa-train configs/vicuna7b_m2.yaml --num-gpus 8 deepspeed=configs/deepspeed/zero2.json

  medusa-train configs/tiny_m1.yaml --inspect

  medusa-train configs/tiny_m1.yaml --print-config

[bold]What you get[/bold] in output_dir: heads/ (medusa_lm_head.safetensors, as the public Medusa code and TGI read it),
tree.json (which guesses to verify, fitted to these heads on this machine), metrics.jsonl, config.yaml, checkpoints/.

Ctrl-C and SIGTERM finish the step, save, and print the command to go on.

Exit codes: 0 done, 1 failed, 2 a mistake in the configuration, 130 interrupted, 143 terminated.
"""


@app.command(help=HELP, no_args_is_help=True)
@run_command
def train(
    arguments: list[str] = typer.Argument(
        None,
        metavar="[CONFIG.yaml] [key=value]...",
        help="A configuration file, and keys that stand above it.",
        show_default=False,
    ),
    output_dir: str = typer.Option(None, "--output-dir", help="The run directory (key output_dir)."),
    resume: bool = typer.Option(
        None, "--resume", help="Go on from the newest checkpoint (key resume_from_checkpoint).", show_default=False
    ),
    overwrite: bool = typer.Option(
        None, "--overwrite", help="Start anew over an earlier run (key overwrite_output_dir).", show_default=False
    ),
    print_config: bool = typer.Option(
        False, "--print-config", help="Show every value and where it was set (file, override, default); load nothing."
    ),
    schema: bool = typer.Option(
        False, "--schema", help="Print a JSON Schema of the keys, with which editors complete and check a YAML."
    ),
    inspect: bool = typer.Option(
        False,
        "--inspect",
        help="Show samples with their loss mask, token counts, steps and the memory needed; train nothing.",
    ),
    num_gpus: int = typer.Option(
        None, "--num-gpus", metavar="N", help="Train in N processes, one per GPU (of each machine).", show_default=False
    ),
    hostfile: Path = typer.Option(
        None, "--hostfile", help="Train on the machines of this file: lines of HOST slots=GPUS.", show_default=False
    ),
    local_rank: int = typer.Option(
        None, "--local_rank", hidden=True, help="Given by launchers; the environment tells."
    ),
) -> int:
    """Read the configuration, say what is about to be trained, and train."""
    if schema:
        print(schema_text(TrainConfig, TITLE), end="")
        return 0
    flags = {"output_dir": output_dir, "resume_from_checkpoint": resume, "overwrite_output_dir": overwrite}
    place, only_shown = process_info_from_env(), inspect or print_config
    if place is not None and place.rank > 0:
        return 0 if only_shown else follow(place, arguments or [], flags)
    if place is None and not only_shown and (hostfile is not None or (num_gpus or 1) > 1):
        return start_all(arguments or [], flags, num_gpus, hostfile)
    cfg = read_arguments(TrainConfig, arguments or [], flags=flags)
    if print_config:
        print(format_config(cfg), end="")
        return 0
    console = error_console()
    path, _ = split_arguments(arguments or [])
    for line in headline(cfg, str(path) if path else "command line"):
        console.print(line)

    results = Console()
    if not results.is_terminal:
        results = Console(width=PIPE_WIDTH)
    from medusa_train.checkpoint.run_layout import check_inputs, check_output_dir

    if place is None or inspect:  # several processes find it out together, or the others would wait for this one
        if not inspect:
            check_output_dir(cfg)  # before the seconds that importing torch takes
        check_inputs(cfg)
    if inspect:
        from medusa_train.training.inspect import inspect_run

        return inspect_run(cfg, console, results)
    if place is not None:
        code = train_with_others(place, cfg, console, results)
    else:
        from medusa_train.training.run import train as run_training

        code = run_training(cfg, console, results)
    if code == 0 and cfg.export:
        from medusa_train.cli.export import export_after_training

        export_after_training(cfg.output_dir, cfg.export, results)
    return code


def headline(cfg: TrainConfig, source: str) -> list[str]:
    """Say what is trained on what, from the configuration alone."""
    recipe = "backbone frozen" if cfg.recipe == "medusa1" else "together with the backbone"
    sources = ", ".join(dataset.path for dataset in cfg.datasets)
    return [
        f"medusa-train ({source}): {cfg.draft_config.describe()} on {cfg.base_model}, {recipe}",
        f"from {sources} into {cfg.output_dir}",
    ]


def main() -> None:
    """Entry point of `medusa-train`."""
    app()


if __name__ == "__main__":  # how launchers start it
    main()
