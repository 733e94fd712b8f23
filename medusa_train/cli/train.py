"""The `medusa-train` command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import indent

import typer

from medusa_train.cli.common import (
    error_console,
    read_arguments,
    split_arguments,
    table_console,
)
from medusa_train.cli.options import PRINT_CONFIG, Arguments, check_one_switch, command_app, switch
from medusa_train.config.docs import format_config, schema_text
from medusa_train.config.load import stage_one_config
from medusa_train.config.schema import TrainConfig
from medusa_train.console_streams import printed_all
from medusa_train.errors import ConfigError
from medusa_train.progress import RunProgress
from medusa_train.training.process_info import ProcessInfo, process_info_from_env

HELP = """
Train a draft for speculative decoding: Medusa, Hydra, Amphista, Kangaroo, EAGLE-3 or DFlash.

[bold]Examples[/bold]

  medusa-train configs/tiny_m1.yaml

  medusa-train configs/any_eagle3.yaml base_model=MODEL output_dir=runs/mine

  medusa-train runs/mine/config.yaml --resume --num-gpus 4

[bold]CONFIG.yaml[/bold] contains flat keys, named as in Axolotl's Medusa fork; [bold]key=value[/bold] overrides one.
docs/reference/configuration.md describes every key. Required: base_model (a Hugging Face model directory or a hub
name) and datasets (chats in JSONL: ShareGPT, OpenAI messages or Alpaca format). The target model stays frozen (recipe
medusa1), or is trained jointly with Medusa heads, in full or through LoRA (recipe medusa2).

[bold]Output[/bold] in output_dir: heads/ (medusa_lm_head.safetensors in the layout of the public Medusa code and TGI;
draft.safetensors of other drafts), tree.json (fitted to this draft on this machine), metrics.jsonl, config.yaml,
checkpoints/.

Ctrl-C and SIGTERM finish the current step, save a checkpoint and print the command that resumes it (--resume).

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted, 143 terminated.
"""


@command_app(
    TrainConfig, {"Run": ("output_dir", "overwrite_output_dir")}, HELP, no_args_is_help=True
)
def app(
    flags: dict[str, object],
    arguments: Arguments = None,
    resume: bool = switch(
        "--resume", "Resume from the newest checkpoint (key resume_from_checkpoint).", "Run"
    ),
    print_config: bool = PRINT_CONFIG,
    schema: bool = switch("--schema", "Print a JSON Schema of the keys, for editors, then exit."),
    inspect: bool = switch(
        "--inspect",
        "Show samples with their loss mask, steps, memory, disk space and GPU hours, then exit."
        " With tokens=60M no data are needed.",
    ),
    doctor: bool = switch(
        "--doctor",
        "Describe this machine, and what CONFIG.yaml gets on it, for a bug report, then exit.",
    ),
    num_gpus: int = typer.Option(
        1,
        "--num-gpus",
        min=1,
        metavar="N",
        help="Train in N processes of this machine, one per GPU.",
        show_default=False,
        rich_help_panel="Run",
    ),
    local_rank: int = typer.Option(
        None, "--local_rank", hidden=True, help="Passed by launchers; unused."
    ),
) -> int:
    """Train, or do what another switch asks for."""
    # 1. Print what needs no configuration.
    check_one_switch(schema=schema, doctor=doctor, print_config=print_config, inspect=inspect)
    if schema:
        print(schema_text(), end="")
        return printed_all()
    if doctor:
        from medusa_train.cli.doctor import describe_machine

        return describe_machine(arguments)
    arguments, tokens = take_tokens(arguments or [])
    if tokens is not None and not inspect:
        raise ConfigError("tokens: only --inspect reads it; max_steps or num_epochs ends training")
    flags["resume_from_checkpoint"] = resume or None
    # 2. Start several processes, or train as one of them that prints nothing.
    process = process_info_from_env()
    trains = not (print_config or inspect)
    if trains and num_gpus > 1:
        from medusa_train.cli.launch import launch

        if process is not None:
            raise ConfigError(
                f"--num-gpus starts processes, but this one is of {process.size} that another"
                " launcher has started; leave it out, or start medusa-train without that launcher"
            )
        return launch(arguments, flags, num_gpus)
    if process is not None and process.rank > 0:
        from medusa_train.cli.worker import exit_now, run_worker

        if trains:
            exit_now(run_worker(process, arguments, flags))
        return 0
    # 3. Read the configuration, and train or print what it leads to.
    cfg = read_arguments(TrainConfig, arguments, flags=flags)
    if print_config:
        print(format_config(cfg), end="")
        if (first := stage_one_config(cfg)) is not None:
            print(f"\n# stage one:\n{indent(format_config(first), '# ')}", end="")
        return printed_all()
    path, _ = split_arguments(arguments)
    for line in headline(cfg, str(path or "command line")):
        error_console().print(line)
    if inspect:
        return _inspect(cfg, num_gpus, tokens)
    return _train(cfg, process)


def _inspect(cfg: TrainConfig, num_gpus: int, tokens: int | None) -> int:
    """Show what a run would do; with a number of `tokens`, without reading its data."""
    from medusa_train.training.preflight import check_files

    check_files(cfg, num_gpus, reads_data=tokens is None)
    console = error_console()
    with RunProgress(console).phase("importing torch and transformers", ticking=True):
        from medusa_train.training.inspect_run import inspect_run

    return inspect_run(cfg, console, table_console(), num_gpus, tokens) or printed_all()


def _train(cfg: TrainConfig, process: ProcessInfo | None) -> int:
    """Train in the only process, or as rank 0 of several; then export."""
    console = error_console()
    results = table_console()
    if process is None:
        from medusa_train.checkpoint.run_directory import check_output_dir
        from medusa_train.training.preflight import check_files

        check_output_dir(cfg)
        check_files(cfg)
        with RunProgress(console).phase("importing torch and transformers", ticking=True):
            from medusa_train.training.stages import train_stages

        code = train_stages(cfg, console, results)
    else:
        # Several processes check the files after they have joined. If rank 0 failed before that,
        # the others would wait for it.
        from medusa_train.cli.worker import exit_now, train_distributed

        code = train_distributed(process, cfg, console, results)
    if code == 0 and cfg.export:
        from medusa_train.cli.export import export_after_training

        export_after_training(
            cfg.output_dir, cfg.export, results, trust_remote_code=cfg.trust_remote_code
        )
    if process is not None:
        exit_now(code)
    return code


def take_tokens(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    """Take `tokens=60M` out of the arguments: the number of tokens that --inspect assumes without
    reading data. Return the other arguments, and the number.

    Raises:
        ConfigError: the value is not a positive number, optionally with K, M or B.
    """
    token_arguments = [argument for argument in arguments if argument.startswith("tokens=")]
    if not token_arguments:
        return list(arguments), None
    text = token_arguments[-1].removeprefix("tokens=")
    match = re.fullmatch(r"(\d*\.?\d+)([KMB]?)", text.upper().replace("_", "").replace(",", ""))
    count = 0
    if match is not None:
        count = int(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[match[2]])
    if count < 1:
        raise ConfigError(f"tokens: expected a number such as 60M or 60000000, got {text!r}")
    return [argument for argument in arguments if argument not in token_arguments], count


def headline(cfg: TrainConfig, source: str) -> list[str]:
    """Return the first lines of the output: draft, target model, recipe, data and run directory."""
    recipe = "frozen target model" if cfg.recipe == "medusa1" else "joint training"
    if cfg.trains_stage_one:
        recipe = f"two stages: heads on a frozen target model, then {recipe}"
    sources = ", ".join(dataset.path for dataset in cfg.datasets)
    return [
        f"medusa-train ({source}): {cfg.draft_config.describe()} on {cfg.base_model}, {recipe}",
        f"data: {sources}; output: {cfg.output_dir}",
    ]


if __name__ == "__main__":  # used by launchers
    app()
