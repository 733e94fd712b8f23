"""`medusa-export`: what a run trained as a directory that other programs load. Knows no training and no decoding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import error_console, read_arguments, run_command
from medusa_train.config.schema import ExportConfig
from medusa_train.config.types import ExportTarget

if TYPE_CHECKING:
    from medusa_train.export.write import Exported

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

HELP = """
Write what a run trained for another program. RUN is a run directory, or a directory of Medusa heads of whatever origin:
the public Medusa code's or TGI's, vLLM's, a full Medusa-2 model. Without it: the newest run under runs/.

[bold]--to[/bold]

  reference     the public Medusa code (medusa_lm_head.pt), and .safetensors

  reference-v2  the same for heads that share the backbone's lm_head

  tgi           text-generation-inference (medusa_lm_head.safetensors)

  vllm          vLLM (model.safetensors), checked against the rules of its loader

  trtllm        TensorRT-LLM: heads, the backbone's config, the tree as --medusa_choices

  merged        the backbone that joint training changed, adapter folded in, for plain transformers and every server

Each directory gets a model card. --push-to-hub OWNER/NAME uploads it; a repository that this makes is private unless
private=false.
"""


@app.command(help=HELP)
@run_command
def export(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN | CONFIG.yaml] [key=value ...]", help="the run, or a configuration, and keys"),
    ] = None,
    to: Annotated[str | None, typer.Option(help="reference, reference-v2, tgi, vllm, trtllm or merged")] = None,
    output_dir: Annotated[str | None, typer.Option(help="default: export/TO in the run directory")] = None,
    push_to_hub: Annotated[str | None, typer.Option(help="upload it to this repository of the hub")] = None,
) -> None:
    """Read the arguments, export, and say what was written."""
    cfg = read_config(arguments or [], {"to": to, "output_dir": output_dir, "push_to_hub": push_to_hub})

    from medusa_train.checkpoint.resolve import resolve_model

    paths = resolve_model(cfg.run, None, None, needs_backbone=False)

    from medusa_train.export.write import export_run  # torch: only once there is something to read

    target = Path(cfg.output_dir).expanduser() if cfg.output_dir else None
    done = export_run(paths, cfg.to, target, base_model=cfg.base_model, licence=cfg.license)
    console = Console(highlight=False, soft_wrap=True)
    say(done, str(paths.home), console)
    if cfg.push_to_hub is not None:
        from medusa_train.export.push import named_by_path, push

        if (path := named_by_path(done.target)) is not None:
            error_console().print(
                f"warning: config.json names the backbone by a path of this machine, {path}: set base_model=OWNER/NAME",
                style="yellow",
            )
        console.print(f"uploaded: {push(done.target, cfg.push_to_hub, private=cfg.private)}")


def read_config(arguments: list[str], flags: dict[str, str | None]) -> ExportConfig:
    """The configuration from the command line; a bare argument that is no YAML file names the run."""
    run = next((a for a in arguments if "=" not in a and not a.endswith((".yaml", ".yml"))), None)
    rest = list(arguments)
    if run is not None:
        rest.remove(run)
    return read_arguments(ExportConfig, rest, flags={"run": run, **flags})


def export_after_training(run: str, targets: Iterable[ExportTarget], console: Console) -> None:
    """Write the layouts that a training configuration asks for, the merged backbone first: heads then name it."""
    from medusa_train.checkpoint.resolve import resolve_model
    from medusa_train.export.write import export_run

    paths = resolve_model(run, None, None, needs_backbone=False)
    for to in sorted(targets, key=lambda to: to != "merged"):
        say(export_run(paths, to), run, console)


def say(done: Exported, home: str, console: Console) -> None:
    """Print where an export went and what is in it; warnings on stderr."""
    for warning in done.warnings:
        error_console().print(f"warning: {warning}", style="yellow")
    console.print(f"{home} -> {done.target}")
    for fact in done.facts:
        console.print(f"  {fact}")


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
