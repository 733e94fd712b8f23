"""The `medusa-selfdistill` command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import (
    error_console,
    output_console,
    print_next,
    read_arguments,
    split_arguments,
)
from medusa_train.cli.options import PRINT_CONFIG, Arguments, command_app
from medusa_train.config.docs import format_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.console_streams import printed_all
from medusa_train.errors import DataError, signal_exit_code
from medusa_train.progress import RunProgress

if TYPE_CHECKING:
    from medusa_train.selfdistill.output import OutputWriter
    from medusa_train.selfdistill.prompts import Prompt

EMBEDDED_MODEL = "data/tiny"

HELP = """
Generate training data for a draft: the model that it is for answers the user turns of existing conversations.

[bold]Examples[/bold]

  medusa-selfdistill --prompts chats.jsonl --model models/mine --output data/mine.jsonl

  medusa-selfdistill --prompts sharegpt --model NAME --server-url http://localhost:8000/v1

  medusa-selfdistill configs/examples/selfdistill.yaml base_model=NAME sample=2000

Drafts are trained on the model's own answers, because these are what they predict when the model is served.
[bold]CONFIG.yaml[/bold] contains flat keys; [bold]key=value[/bold] overrides one of them.
docs/reference/configuration.md describes every key. The output is a JSONL file of OpenAI messages for medusa-train
(type: messages). Running the same command again resumes an interrupted run.

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted, 143 terminated.
"""
OPTIONS = {
    "Prompts": ("seed_dataset", "limit", "output"),
    "Model": ("base_model", "dtype", "chat_template"),
    "Answers": ("mode", "temperature", "max_new_tokens"),
}


@command_app(SelfDistillConfig, OPTIONS, HELP)
def app(
    flags: dict[str, object],
    arguments: Arguments = None,
    server_url: Annotated[
        list[str] | None,
        typer.Option(
            help="OpenAI-compatible server, http://HOST:PORT/v1; can be repeated.",
            rich_help_panel="Model",
        ),
    ] = None,
    print_config: bool = PRINT_CONFIG,
) -> int:
    """Load the configuration and the prompts, then generate their answers."""
    from medusa_train.selfdistill.commands import refuse_training_config

    flags["server_url"] = server_url or None
    refuse_training_config(split_arguments(arguments or [])[0])
    cfg = read_arguments(SelfDistillConfig, arguments or [], flags=flags)
    if print_config:
        print(format_config(cfg), end="")
        return printed_all()

    from medusa_train.models.model_files import find_target_model
    from medusa_train.selfdistill.prompts import load_prompts
    from medusa_train.selfdistill.settings import output_path, resolve_model_paths

    console = output_console(highlight=False, soft_wrap=True)
    output = output_path(cfg)
    console.print(headline(cfg, output))
    selected, skipped = load_prompts(cfg, RunProgress(error_console()))
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        console.print(f"skipped prompts: {reasons}")
    if cfg.engine == "local":
        # reports a wrong path or template before torch is imported
        paths = resolve_model_paths(cfg)
        find_target_model(paths.target_model)
        if (note := paths.remote_code_note) is not None:
            error_console().print(f"note: {note}")
    return _generate(cfg, selected, output, console)


def headline(cfg: SelfDistillConfig, output: Path) -> str:
    """Return the first line of the output: model, prompts and output file, including defaults."""
    from medusa_train.selfdistill.settings import model_name

    model = cfg.base_model or model_name(cfg)
    if cfg.engine == "openai":
        model += f" at {', '.join(cfg.server_url or [])}"
    elif model == EMBEDDED_MODEL:
        model += " (the embedded test model)"
    if cfg.heads is not None:
        model += f" with the heads of {cfg.heads}"
    return f"medusa-selfdistill: model {model}, prompts {cfg.seed_dataset}; output {output}"


def _generate(cfg: SelfDistillConfig, prompts: list[Prompt], output: Path, console: Console) -> int:
    """Answer the prompts that are not in the output yet.

    Raises:
        DataError: the output has no conversation.
    """
    from medusa_train.selfdistill.commands import next_command
    from medusa_train.selfdistill.output import OutputWriter
    from medusa_train.selfdistill.run import drop_report
    from medusa_train.selfdistill.settings import output_settings, resolve_dtype

    progress = RunProgress(console)
    with progress.phase("importing torch and transformers", ticking=True):
        dtype = resolve_dtype(cfg, progress.print)
        settings = output_settings(cfg, dtype)
    with OutputWriter(output, settings) as writer:
        if writer.done:
            writer.check_prompts(prompts)
            console.print(f"{output}: resuming after {len(writer.done)} conversations")
        is_complete = all(prompt.id in writer.done for prompt in prompts)
        if not is_complete:
            try:
                _run(cfg, prompts, dtype, writer, console)
            except KeyboardInterrupt as interrupt:
                error_console().print(f"interrupted; run the same command again to resume {output}")
                return signal_exit_code(interrupt)
    report = drop_report(output, writer.kept, Counter(writer.drop_reasons.values()), cfg)
    if not writer.kept:
        raise DataError(report)
    if report:
        error_console().print(report, style="yellow")
    if is_complete:
        console.print(f"{output} is complete, nothing to do")
    asked_again = sum(prompt.id not in writer.done for prompt in prompts)
    if asked_again:
        prompts_again = "1 prompt" if asked_again == 1 else f"{asked_again:,} prompts"
        console.print(f"the same command asks {prompts_again} again, which the server lost")
    console.print(f"output: {output}")
    print_next(next_command(cfg, output), console)
    return 0


def _run(
    cfg: SelfDistillConfig,
    prompts: list[Prompt],
    dtype: str | None,
    writer: OutputWriter,
    console: Console,
) -> None:
    """Answer `prompts` with a progress bar and print the statistics."""
    from medusa_train.selfdistill.replay import build_mode
    from medusa_train.selfdistill.run import distill, open_answer_source, summary
    from medusa_train.selfdistill.settings import record_metadata

    progress = RunProgress(console)
    opening = "importing openai" if cfg.engine == "openai" else "loading the model"
    with progress.phase(opening, ticking=True):
        source = open_answer_source(cfg, dtype, console.print)
    num_done = sum(prompt.id in writer.done for prompt in prompts)
    with progress.phase("conversations", len(prompts), completed=num_done) as phase:
        stats = distill(
            prompts,
            source,
            writer,
            mode=build_mode(cfg),
            metadata=record_metadata(cfg, dtype),
            on_progress=lambda stats: phase.update(stats.finished, stats.line()),
        )
    console.print(summary(stats, source.stats()))
    if (warning := stats.looping_warning(cfg.drop_looping)) is not None:
        console.print(warning, style="yellow")


if __name__ == "__main__":
    app()
