"""The `medusa-selfdistill` command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import (
    CommandOfOptions,
    PrintConfig,
    error_console,
    join_lines,
    output_console,
    print_next,
    read_arguments,
    run_command,
    split_arguments,
    with_keys,
)
from medusa_train.config.docs import format_config
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.console_streams import printed_all
from medusa_train.errors import ConfigError, signal_exit_code
from medusa_train.progress import RunProgress

if TYPE_CHECKING:
    from medusa_train.selfdistill.output import OutputWriter
    from medusa_train.selfdistill.prompts import Prompt, Shard

EMBEDDED_MODEL = "data/tiny"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

HELP = """
Generate training data: a model answers the user turns of existing conversations. Draft heads are trained on the
model's answers, because these are what they predict when the model is served.

[bold]CONFIG.yaml[/bold] contains flat keys; [bold]key=value[/bold] overrides one of them. docs/configuration.md
describes every key. The output is a JSONL file of OpenAI messages for medusa-train (type: messages). Running the same
command again resumes an interrupted run.

[bold]Examples[/bold]

  medusa-selfdistill --prompts chats.jsonl --model models/mine --output data/mine.jsonl

  medusa-selfdistill --prompts sharegpt --model NAME --server-url http://localhost:8000/v1

  medusa-selfdistill --prompts chats.jsonl --model models/mine --dry-run

  medusa-selfdistill --mode questions --limit 3000 --model models/mine --output data/questions.jsonl

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted, 143 terminated.
"""


@app.command(cls=CommandOfOptions, help=join_lines(HELP))
@run_command
@with_keys(
    SelfDistillConfig,
    "output",
    "mode",
    "temperature",
    "max_new_tokens",
    "chat_template",
    "dtype",
    "limit",
    "seed_dataset",
    "base_model",
)
def selfdistill(
    flags: dict[str, object],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", show_default=False),
    ] = None,
    server_url: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible server, http://HOST:PORT/v1; can be repeated."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help=(
                "Answer only part i of n, written i/n; default: the rank set by torchrun or"
                " DeepSpeed."
            )
        ),
    ] = None,
    merge: Annotated[
        bool,
        typer.Option("--merge", metavar="", help="Merge the outputs of all shards, then exit."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Print the first prompts, then exit.")
    ] = False,
    print_config: PrintConfig = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", hidden=True)
    ] = 0,  # passed by DeepSpeed's launcher
) -> int:
    """Load the configuration and the prompts, then generate, merge or preview."""
    from medusa_train.selfdistill.commands import refuse_training_config

    if merge and (dry_run or shard is not None):
        raise ConfigError(
            "--merge writes the file of all shards; leave --dry-run and --shard out, or --merge"
        )
    flags["server_url"] = server_url or None
    refuse_training_config(split_arguments(arguments or [])[0])
    cfg = read_arguments(SelfDistillConfig, arguments or [], flags=flags)
    if print_config:
        print(format_config(cfg), end="")
        return printed_all()

    from medusa_train.models.model_files import find_backbone
    from medusa_train.selfdistill.engines import resolve_model_paths
    from medusa_train.selfdistill.output import shard_output
    from medusa_train.selfdistill.prompts import load_prompts, resolve_shard
    from medusa_train.selfdistill.settings import output_path

    part = resolve_shard(shard)
    # of several processes only the first prints to stdout; errors are printed by all
    console = output_console(
        quiet=shard is None and part is not None and part.index > 1, highlight=False, soft_wrap=True
    )
    out = output_path(cfg)
    console.print(headline(cfg, shard_output(out, None if merge else part)))
    selected, skipped = load_prompts(cfg, RunProgress(error_console()))
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        console.print(f"skipped prompts: {reasons}")
    if merge:
        return _merge(cfg, selected, out, console)
    if cfg.engine == "local":
        # reports a wrong path or template before torch is imported
        paths = resolve_model_paths(cfg)
        find_backbone(paths.base_model)
        if (note := paths.remote_code_note) is not None:
            error_console().print(f"note: {note}")
    if dry_run:
        return _preview(cfg, selected, console)
    return _generate(cfg, selected, out, part, console, is_chosen_part=shard is not None)


def headline(cfg: SelfDistillConfig, out: Path) -> str:
    """Return the first line of the output: model, prompts and output file, defaults included."""
    from medusa_train.selfdistill.engines import model_name

    model = cfg.base_model or model_name(cfg)
    if cfg.engine == "openai":
        model += f" at {', '.join(cfg.server_url or [])}"
    elif model == EMBEDDED_MODEL:
        model += " (the embedded tiny backbone)"
    if cfg.heads is not None:
        model += f" with the heads of {cfg.heads}"
    prompts = "written by itself" if cfg.mode == "questions" else cfg.seed_dataset
    return f"medusa-selfdistill: model {model}, prompts {prompts}; output {out}"


def _generate(
    cfg: SelfDistillConfig,
    prompts: list[Prompt],
    out: Path,
    part: Shard | None,
    console: Console,
    *,
    is_chosen_part: bool,
) -> int:
    """Answer the prompts of this process that are not in the output yet.

    Args:
        is_chosen_part: whether the user named the part, not a launcher of several processes.

    Raises:
        DataError: the output has no conversation.
    """
    from medusa_train.selfdistill.commands import next_command
    from medusa_train.selfdistill.drop_report import most_dropped, nothing_kept
    from medusa_train.selfdistill.engines import resolve_dtype
    from medusa_train.selfdistill.output import OutputWriter, shard_output
    from medusa_train.selfdistill.settings import output_settings

    if part is not None:
        prompts = [prompt for prompt in prompts if part.holds(prompt)]
    target = shard_output(out, part)
    progress = RunProgress(console)
    with progress.phase("importing torch and transformers", ticking=True):
        dtype = resolve_dtype(cfg, progress.print)
        settings = output_settings(cfg, dtype)
    with OutputWriter(target, settings) as writer:
        if writer.done:
            writer.check_prompts(prompts)
            console.print(f"{target}: resuming after {len(writer.done)} conversations")
        is_complete = all(prompt.id in writer.done for prompt in prompts)
        if not is_complete:
            try:
                _run(cfg, prompts, dtype, writer, console)
            except KeyboardInterrupt as interrupt:
                error_console().print(f"interrupted; run the same command again to resume {target}")
                return signal_exit_code(interrupt)
    reasons = Counter(writer.drop_reasons.values())
    if not writer.kept and prompts:
        error = nothing_kept(target, reasons, cfg)
        if part is None or is_chosen_part:
            raise error
        # a launcher would end the other processes
        error_console().print(f"warning: {error}")
        return 0
    if (warning := most_dropped(target, writer.kept, reasons, cfg)) is not None:
        error_console().print(warning, style="yellow")
    if is_complete:
        console.print(f"{target} is complete, nothing to do")
    asked_again = sum(prompt.id not in writer.done for prompt in prompts)
    if asked_again:
        console.print(f"the same command asks {asked_again:,} prompts again, which the server lost")
    console.print(f"output: {target}")
    if part is None:
        print_next(next_command(cfg, target), console)
    else:
        print_next(f"run the same command with --merge to merge all {part.count} shards", console)
    return 0


def _run(
    cfg: SelfDistillConfig,
    prompts: list[Prompt],
    dtype: str | None,
    writer: OutputWriter,
    console: Console,
) -> None:
    """Answer `prompts` with a progress bar and print the statistics."""
    loading = RunProgress(console).phase("loading the model", ticking=True)
    from medusa_train.selfdistill.distill import distill
    from medusa_train.selfdistill.engines import open_engine
    from medusa_train.selfdistill.modes import build_mode
    from medusa_train.selfdistill.run_stats import summary
    from medusa_train.selfdistill.settings import record_metadata

    todo = [prompt for prompt in prompts if prompt.id not in writer.done]
    engine = open_engine(cfg, dtype, console.print, loading)
    try:
        progress = RunProgress(console)
        done = len(prompts) - len(todo)
        with progress.phase("conversations", len(prompts), completed=done) as phase:
            stats = distill(
                prompts,
                engine,
                writer,
                mode=build_mode(cfg),
                metadata=record_metadata(cfg, dtype),
                on_progress=lambda stats: phase.update(stats.finished, stats.line()),
            )
    finally:
        engine.close()
    console.print(summary(stats, engine.stats()))
    if (warning := stats.looping_warning(cfg.drop_looping)) is not None:
        console.print(warning, style="yellow")


def _merge(cfg: SelfDistillConfig, prompts: list[Prompt], out: Path, console: Console) -> int:
    """Merge the outputs of all shards into `out`; raises DataError if they have no conversation."""
    from medusa_train.selfdistill.commands import next_command
    from medusa_train.selfdistill.drop_report import most_dropped, nothing_kept
    from medusa_train.selfdistill.engines import resolve_dtype
    from medusa_train.selfdistill.output import dropped_path, merge
    from medusa_train.selfdistill.settings import output_settings

    dtype = None
    if cfg.dtype != "auto":
        dtype = resolve_dtype(cfg, console.print)
    with RunProgress(console).phase("importing torch and transformers", ticking=True):
        settings = output_settings(cfg, dtype)
    merged = merge(out, settings, [prompt.id for prompt in prompts])
    if not merged.conversations:
        shards = out.with_name(f"{out.stem}.shard-*{out.suffix}")
        raise nothing_kept(out, merged.dropped, cfg, dropped_path(shards))
    console.print(
        f"{out}: {merged.conversations:,} conversations of {merged.parts} files,"
        f" {merged.dropped.total():,} dropped"
    )
    if (warning := most_dropped(out, merged.conversations, merged.dropped, cfg)) is not None:
        error_console().print(warning, style="yellow")
    if merged.missing:
        error_console().print(
            f"{merged.missing:,} prompts are not answered yet: run it without --merge"
        )
    print_next(next_command(cfg, out), console)
    return 0


def _preview(cfg: SelfDistillConfig, prompts: list[Prompt], console: Console) -> int:
    """Print the first prompts as the model or the server would receive them."""
    from medusa_train.selfdistill.preview import preview

    console.print(f"{len(prompts):,} prompts; dry run, nothing is generated or written")
    with RunProgress(error_console()).phase("loading the tokenizer", ticking=True):
        requests = list(preview(cfg, prompts))
    for title, text in requests:
        console.rule(title, align="left")
        console.print(text)
    return printed_all()


if __name__ == "__main__":
    app()
