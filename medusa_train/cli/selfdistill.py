"""The `medusa-selfdistill` command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import (
    EXIT_INTERRUPTED,
    error_console,
    join_lines,
    output_console,
    read_arguments,
    run_command,
)
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.progress import RunProgress

if TYPE_CHECKING:
    from medusa_train.selfdistill.output import OutputWriter
    from medusa_train.selfdistill.prompts import Prompt, Shard
    from medusa_train.selfdistill.run import RunStats

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

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted.
"""


@app.command(help=join_lines(HELP))
@run_command
def selfdistill(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            "--seed",
            help="Prompts (key seed_dataset): tiny, sharegpt, ultrachat, a file or a hub dataset.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model (key base_model); default: data/tiny.")] = None,
    server_url: Annotated[
        list[str] | None, typer.Option(help="OpenAI-compatible server, http://HOST:PORT/v1; can be repeated.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="JSONL file; default: runs/selfdistill/PROMPTS.jsonl.")] = None,
    mode: Annotated[str | None, typer.Option(help="replay (answer the user's turns), selftalk or questions.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0: greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum length of an answer in tokens.")] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Name of a template, or a .jinja file; default: the tokenizer's.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N conversations.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Answer only part i of n, written i/n; default: the rank set by torchrun or DeepSpeed."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the outputs of all shards, then exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the first prompts, then exit.")] = False,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,  # passed by DeepSpeed's launcher
) -> int:
    """Load the configuration and the prompts, then generate, merge or preview."""
    flags = {
        "seed_dataset": prompts,
        "base_model": model,
        "server_url": server_url or None,
        "output": output,
        "mode": mode,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "chat_template": chat_template,
        "dtype": dtype,
        "limit": limit,
    }
    cfg = read_arguments(SelfDistillConfig, arguments or [], flags=flags)

    from medusa_train.selfdistill.engines import resolve_model_paths
    from medusa_train.selfdistill.output import shard_output
    from medusa_train.selfdistill.run import load_prompts, output_path, resolve_shard

    part = resolve_shard(shard)
    # of several processes only the first prints to stdout; errors are printed by all
    console = output_console(quiet=shard is None and part is not None and part.index > 1)
    out = output_path(cfg)
    console.print(headline(cfg, shard_output(out, None if merge else part)), highlight=False, soft_wrap=True)
    selected, skipped = load_prompts(cfg, RunProgress(error_console()))
    if skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        console.print(f"skipped prompts: {reasons}", highlight=False)
    if merge:
        return _merge(cfg, selected, out, console)
    if cfg.engine == "local":
        resolve_model_paths(cfg)  # reports a wrong path before torch is imported
    if dry_run:
        return _preview(cfg, selected, console)
    return _generate(cfg, selected, out, part, console)


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


def _generate(cfg: SelfDistillConfig, prompts: list[Prompt], out: Path, part: Shard | None, console: Console) -> int:
    """Answer the prompts of this process that are not in the output yet."""
    from medusa_train.selfdistill.engines import resolve_dtype
    from medusa_train.selfdistill.output import OutputWriter, shard_output
    from medusa_train.selfdistill.run import output_settings

    if part is not None:
        prompts = [prompt for prompt in prompts if part.holds(prompt)]
    target = shard_output(out, part)
    dtype = resolve_dtype(cfg)
    with OutputWriter(target, output_settings(cfg, dtype)) as writer:
        if writer.done:
            console.print(f"{target}: resuming after {len(writer.done)} conversations", highlight=False, soft_wrap=True)
        if all(prompt.id in writer.done for prompt in prompts):  # before a model is loaded
            console.print(f"{target} is complete, nothing to do", highlight=False, soft_wrap=True)
            return 0
        stats = _run(cfg, prompts, dtype, writer, console)
    if stats is None:
        error_console().print(f"interrupted; run the same command again to resume {target}")
        return EXIT_INTERRUPTED
    console.print(f"output: {target}", highlight=False, soft_wrap=True)
    if part is not None:
        console.print(f"run the same command with --merge to merge all {part.count} shards", highlight=False)
    return 0


def _run(
    cfg: SelfDistillConfig, prompts: list[Prompt], dtype: str | None, writer: OutputWriter, console: Console
) -> RunStats | None:
    """Answer `prompts` with a progress bar and print the statistics; None if the user interrupts."""
    from medusa_train.selfdistill.engines import open_engine
    from medusa_train.selfdistill.run import build_mode, distill, record_metadata, summary

    todo = [prompt for prompt in prompts if prompt.id not in writer.done]
    answers = sum(cfg.rounds if cfg.mode == "selftalk" else len(prompt.turns) or 1 for prompt in todo)
    engine = open_engine(cfg, dtype, answers, partial(console.print, highlight=False, soft_wrap=True))
    try:
        progress = RunProgress(console)
        with progress.phase("conversations", len(prompts), completed=len(prompts) - len(todo)) as phase:
            stats = distill(
                prompts,
                engine,
                writer,
                mode=build_mode(cfg),
                metadata=record_metadata(cfg, dtype),
                on_progress=lambda stats: phase.update(stats.finished, stats.line()),
            )
    except KeyboardInterrupt:
        return None
    finally:
        engine.close()
    console.print(summary(stats, engine.stats()))
    if (warning := stats.looping_warning(cfg.drop_looping)) is not None:
        console.print(warning, style="yellow", highlight=False, soft_wrap=True)
    return stats


def _merge(cfg: SelfDistillConfig, prompts: list[Prompt], out: Path, console: Console) -> int:
    """Merge the outputs of all shards into `out`."""
    from medusa_train.selfdistill.engines import resolve_dtype
    from medusa_train.selfdistill.output import merge
    from medusa_train.selfdistill.run import output_settings

    merged = merge(out, output_settings(cfg, resolve_dtype(cfg)), [prompt.id for prompt in prompts])
    console.print(
        f"{out}: {merged.conversations:,} conversations from {merged.parts} files, {merged.dropped:,} dropped",
        highlight=False,
        soft_wrap=True,
    )
    if merged.missing:
        error_console().print(
            f"{merged.missing:,} prompts are not answered yet; run the same command without --merge to answer them"
        )
    return 0


def _preview(cfg: SelfDistillConfig, prompts: list[Prompt], console: Console) -> int:
    """Print the first prompts as the model or the server would receive them."""
    from medusa_train.selfdistill.run import preview

    console.print(f"{len(prompts):,} prompts; dry run, nothing is generated or written", highlight=False)
    for title, text in preview(cfg, prompts):
        console.rule(title, align="left")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
