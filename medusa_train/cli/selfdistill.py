"""`medusa-selfdistill`: a model answers seed prompts, for training on its own words. Thin: see `selfdistill`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import EXIT_INTERRUPTED, error_console, read_arguments, run_command
from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.config.schema import SelfDistillConfig

if TYPE_CHECKING:
    from medusa_train.selfdistill.distill import Tally
    from medusa_train.selfdistill.engines import LocalEngine
    from medusa_train.selfdistill.seeds import Seed
    from medusa_train.selfdistill.writer import Writer

EMBEDDED = "data/tiny"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@run_command
def selfdistill(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.yaml] [key=value ...]", show_default=False)
    ] = None,
    seed: Annotated[str | None, typer.Option(help="Prompts (seed_dataset): tiny, sharegpt, or a file.")] = None,
    model: Annotated[str | None, typer.Option(help="Who answers (base_model); default: data/tiny.")] = None,
    output: Annotated[str | None, typer.Option(help="JSONL file; default: runs/selfdistill/SEED.jsonl.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling; 0: greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="By name; default: the tokenizer's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many conversations.")] = None,
) -> int:
    """Feed the user's turns of seed conversations to a model and keep its own answers as training data."""
    flags = {
        "seed_dataset": seed,
        "base_model": model,
        "output": output,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "chat_template": chat_template,
        "dtype": dtype,
        "limit": limit,
    }
    cfg = read_arguments(SelfDistillConfig, arguments or [], flags=flags)

    from medusa_train.selfdistill.seeds import find_seeds, read_seeds, short_name

    out = Path(cfg.output) if cfg.output else Path("runs") / "selfdistill" / f"{short_name(cfg.seed_dataset)}.jsonl"
    console = Console()
    console.print(_first_line(cfg, out), highlight=False, soft_wrap=True)
    seeds = read_seeds(find_seeds(cfg.seed_dataset, error_console().print), cfg.type)[: cfg.limit]

    from medusa_train.selfdistill.engines import fastest_dtype
    from medusa_train.selfdistill.writer import Writer

    dtype_used = fastest_dtype() if cfg.dtype == "auto" else cfg.dtype
    with Writer(out, _settings(cfg, dtype_used)) as writer:
        engine = _load(cfg, dtype_used)
        if writer.done:
            console.print(f"{out} holds {len(writer.done)} conversations already; going on", highlight=False)
        tally = _run(cfg, seeds, engine, writer, _sampling(cfg, dtype_used), console)
    if tally is None:
        error_console().print(f"interrupted; the same command goes on with {out}")
        return EXIT_INTERRUPTED

    from medusa_train.selfdistill.progress import summary

    console.print(summary(tally))
    console.print(f"output: {out}", highlight=False, soft_wrap=True)
    return 0


def _first_line(cfg: SelfDistillConfig, out: Path) -> str:
    """What was taken, defaults included."""
    embedded = " (the embedded tiny backbone)" if cfg.base_model == EMBEDDED else ""
    return f"medusa-selfdistill: model {cfg.base_model}{embedded}, seeds {cfg.seed_dataset}; output {out}"


def _load(cfg: SelfDistillConfig, dtype: str) -> LocalEngine:
    from medusa_train.models.backbone import Backbone
    from medusa_train.selfdistill.engines import LocalEngine

    backbone = Backbone.load(cfg.base_model, dtype=dtype, trust_remote_code=cfg.trust_remote_code)
    return LocalEngine(
        backbone,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_new_tokens=cfg.max_new_tokens,
        chat_template=cfg.chat_template,
    )


def _run(
    cfg: SelfDistillConfig,
    seeds: list[Seed],
    engine: LocalEngine,
    writer: Writer,
    sampling: dict[str, object],
    console: Console,
) -> Tally | None:
    """Answer the seeds behind a progress bar; None when the user interrupts."""
    from medusa_train.selfdistill.distill import distill
    from medusa_train.selfdistill.progress import DistillProgress

    try:
        with DistillProgress(console, len(seeds)) as progress:
            return distill(
                seeds,
                engine,
                writer,
                model=_public_name(cfg.base_model),
                sampling=sampling,
                random_seed=cfg.seed,
                drop_truncated=cfg.drop_truncated,
                on_progress=progress.show,
            )
    except KeyboardInterrupt:
        return None


def _sampling(cfg: SelfDistillConfig, dtype: str) -> dict[str, object]:
    """What every line of the output says of how it was drawn."""
    return {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new_tokens": cfg.max_new_tokens,
        "seed": cfg.seed,
        "dtype": dtype,
    }


def _settings(cfg: SelfDistillConfig, dtype: str) -> dict[str, object]:
    """Everything that the output depends on; `limit` is none of it, more seeds may be answered later."""
    return {
        "model": _public_name(cfg.base_model),
        "seed_dataset": _public_name(cfg.seed_dataset),
        "type": cfg.type,
        "chat_template": cfg.chat_template,
        **_sampling(cfg, dtype),
        "drop_truncated": cfg.drop_truncated,
    }


def _public_name(name: str) -> str:
    """A name that may leave this machine: a hub name or a relative path as it is, else a path within the project
    or the working directory, else the last part of it."""
    path = resolve_path(name)
    if path is None or not Path(name).expanduser().is_absolute():
        return name
    for root in (PROJECT_ROOT, Path.cwd()):
        if path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
    return path.name


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
