"""`medusa-selfdistill`: a model answers seed prompts, for training on its own words. Thin: see `selfdistill`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import EXIT_INTERRUPTED, error_console, read_arguments, run_command
from medusa_train.config.schema import SelfDistillConfig

if TYPE_CHECKING:
    from medusa_train.selfdistill.output import OutputWriter
    from medusa_train.selfdistill.prompts import Prompt
    from medusa_train.selfdistill.run import RunStats
    from medusa_train.selfdistill.select_prompts import Shard

EMBEDDED = "data/tiny"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@run_command
def selfdistill(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", show_default=False)
    ] = None,
    seed: Annotated[
        str | None, typer.Option(help="Prompts (seed_dataset): tiny, sharegpt, ultrachat, a file, a hub name.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Who answers (base_model); default: data/tiny.")] = None,
    server_url: Annotated[str | None, typer.Option(help="Ask this server, http://HOST:PORT/v1, instead.")] = None,
    output: Annotated[str | None, typer.Option(help="JSONL file; default: runs/selfdistill/SEED.jsonl.")] = None,
    mode: Annotated[str | None, typer.Option(help="replay (the user's turns are fed in) or selftalk.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling; 0: greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="By name; default: the tokenizer's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many conversations.")] = None,
    shard: Annotated[
        str | None, typer.Option(help="Answer part i of n only, as i/n; default: by torchrun's or DeepSpeed's rank.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Join the outputs of all shards into one.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the first prompts; ask nobody.")] = False,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,  # DeepSpeed's launcher passes it
) -> int:
    """Feed the user's turns of seed conversations to a model and keep its own answers as training data."""
    flags = {
        "seed_dataset": seed,
        "base_model": model,
        "server_url": server_url,
        "output": output,
        "mode": mode,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "chat_template": chat_template,
        "dtype": dtype,
        "limit": limit,
    }
    cfg = read_arguments(SelfDistillConfig, arguments or [], flags=flags)

    from medusa_train.selfdistill.output import shard_output
    from medusa_train.selfdistill.run import load_prompts, output_path, resolve_shard

    part = resolve_shard(shard)
    # Of several processes one terminal shows the first; errors and interruptions all tell.
    console = Console(quiet=shard is None and part is not None and part.index > 1)
    out = output_path(cfg)
    console.print(_first_line(cfg, shard_output(out, None if merge else part)), highlight=False, soft_wrap=True)
    seeds, left_out = load_prompts(cfg, error_console().print)
    if left_out:
        said = ", ".join(f"{count} {why}" for why, count in sorted(left_out.items()))
        console.print(f"seeds left out: {said}", highlight=False)
    if dry_run:
        return _show(cfg, seeds, console)
    if merge:
        return _merge(cfg, seeds, out, console)
    return _answer(cfg, seeds, out, part, console)


def _first_line(cfg: SelfDistillConfig, out: Path) -> str:
    """What was taken, defaults included."""
    from medusa_train.selfdistill.run import model_name

    who = cfg.base_model or model_name(cfg)
    if cfg.engine == "openai":
        who += f" at {cfg.server_url}"
    elif who == EMBEDDED:
        who += " (the embedded tiny backbone)"
    if cfg.heads is not None:
        who += f" with the heads of {cfg.heads}"
    return f"medusa-selfdistill: model {who}, seeds {cfg.seed_dataset}; output {out}"


def _answer(cfg: SelfDistillConfig, seeds: list[Prompt], out: Path, part: Shard | None, console: Console) -> int:
    """Answer the seeds of this process, or those that are left of them."""
    from medusa_train.selfdistill.output import OutputWriter, shard_output
    from medusa_train.selfdistill.run import output_settings, resolve_dtype

    mine = seeds if part is None else [seed for seed in seeds if part.holds(seed)]
    target = shard_output(out, part)
    dtype = resolve_dtype(cfg)
    with OutputWriter(target, output_settings(cfg, dtype)) as writer:
        if writer.done:
            said = f"{target} holds {len(writer.done)} conversations already; going on"
            console.print(said, highlight=False, soft_wrap=True)
        if all(seed.id in writer.done for seed in mine):  # before a model is loaded for nothing
            console.print(f"nothing is left to do: {target} is complete", highlight=False, soft_wrap=True)
            return 0
        stats = _run(cfg, mine, dtype, writer, console)
    if stats is None:
        error_console().print(f"interrupted; the same command goes on with {target}")
        return EXIT_INTERRUPTED
    console.print(f"output: {target}", highlight=False, soft_wrap=True)
    if part is not None:
        console.print(f"the same command with --merge joins all {part.count} shards", highlight=False)
    return 0


def _run(
    cfg: SelfDistillConfig, seeds: list[Prompt], dtype: str | None, writer: OutputWriter, console: Console
) -> RunStats | None:
    """Answer the seeds behind a progress bar and print the figures; None when the user interrupts."""
    from medusa_train.progress import RunProgress
    from medusa_train.selfdistill.preview import describe, summary
    from medusa_train.selfdistill.run import build_mode, distill, open_engine, record_metadata

    engine = open_engine(cfg, dtype)
    try:
        earlier = sum(seed.id in writer.done for seed in seeds)
        phase = RunProgress(console).phase("conversations", len(seeds), completed=earlier, transient=False)
        with phase:
            stats = distill(
                seeds,
                engine,
                writer,
                mode=build_mode(cfg),
                metadata=record_metadata(cfg, dtype),
                on_progress=lambda stats: phase.update(stats.finished, describe(stats)),
            )
    except KeyboardInterrupt:
        return None
    finally:
        engine.close()
    console.print(summary(stats, engine.stats()))
    return stats


def _merge(cfg: SelfDistillConfig, seeds: list[Prompt], out: Path, console: Console) -> int:
    """Join the shards beside `out`."""
    from medusa_train.selfdistill.output import merge
    from medusa_train.selfdistill.run import output_settings, resolve_dtype

    merged = merge(out, output_settings(cfg, resolve_dtype(cfg)), [seed.id for seed in seeds])
    console.print(
        f"{out}: {merged.conversations:,} conversations of {merged.parts} files, {merged.dropped:,} dropped whole",
        highlight=False,
        soft_wrap=True,
    )
    if merged.missing:
        error_console().print(
            f"{merged.missing:,} seeds are not answered yet; the same command without --merge goes on with them"
        )
    return 0


def _show(cfg: SelfDistillConfig, seeds: list[Prompt], console: Console) -> int:
    """The first prompts as the model, or the server, would get them."""
    from medusa_train.selfdistill.preview import preview

    console.print(f"{len(seeds):,} seeds; nothing is asked and nothing is written", highlight=False)
    for title, text in preview(cfg, seeds):
        console.rule(title, align="left")
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
