"""`medusa-export`: a run's heads as a directory that other programs load. Knows no training and no decoding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from medusa_train.cli.common import error_console, read_arguments, run_command
from medusa_train.config.schema import ExportConfig

if TYPE_CHECKING:
    from medusa_train.checkpoint.reference import HeadTensors

PUBLIC_HEADS = 5
"""The public Medusa loader builds five heads whatever config.json says."""

app = typer.Typer(add_completion=False)


@app.command()
@run_command
def export(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN | CONFIG.yaml] [key=value ...]", help="the run, or a configuration, and keys"),
    ] = None,
    to: Annotated[str | None, typer.Option(help="reference (the public Medusa code) or tgi")] = None,
    output_dir: Annotated[str | None, typer.Option(help="default: export/TO in the run directory")] = None,
) -> None:
    """Write a run's heads as medusa_lm_head.pt, medusa_lm_head.safetensors and config.json.

    The public Medusa code reads only the .pt, TGI only the .safetensors. Without RUN: the newest run under runs/.
    """
    cfg = read_config(arguments or [], to, output_dir)

    from medusa_train.checkpoint.subject import locate

    paths = locate(cfg.run, None, None)
    assert paths.heads is not None  # `locate` finds heads or raises, unless a backbone alone is asked for

    from medusa_train.checkpoint.layouts import read_heads, write_heads  # torch: only once there is something to read

    base_model = str(Path(paths.base_model).resolve()) if Path(paths.base_model).is_dir() else paths.base_model
    heads = read_heads(paths.heads).with_base_model(base_model)
    target = Path(cfg.output_dir) if cfg.output_dir else paths.home / "export" / cfg.to
    write_heads(heads, target, pickled=True)

    learned = [name for name in ("adapter", "model") if (paths.home / name).is_dir()]
    for warning in [*joint_warnings(paths.home, learned), *warnings_for(cfg.to, heads)]:
        error_console().print(f"warning: {warning}", style="yellow")
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{paths.home} -> {target}")
    console.print(
        f"{heads.num_heads} heads x {heads.num_layers} blocks, d {heads.hidden_size}, "
        f"{'the lm_head of the backbone' if heads.shared else f'V {heads.vocab_size}'}; backbone {base_model}"
    )


def read_config(arguments: list[str], to: str | None, output_dir: str | None) -> ExportConfig:
    """The configuration from the command line; a bare argument that is no YAML file names the run."""
    run = next((a for a in arguments if "=" not in a and not a.endswith((".yaml", ".yml"))), None)
    rest = list(arguments)
    if run is not None:
        rest.remove(run)
    flags = {"run": run, "to": to, "output_dir": output_dir}
    return read_arguments(ExportConfig, rest, flags={key: value for key, value in flags.items() if value is not None})


def joint_warnings(run: Path, learned: list[str]) -> list[str]:
    """What a joint run trained besides the heads and this layout has no place for."""
    return [
        f"this run trained the backbone too ({run / name}), and the heads belong to it: the export has the heads alone"
        for name in learned
    ]


def warnings_for(to: str, heads: HeadTensors) -> list[str]:
    """What the program that is exported to will not do with these heads."""
    from medusa_train.checkpoint.reference import shared_block_warning

    warnings = []
    if "lm_heads.0.bias" in heads.state:
        warnings.append("the heads' unembeddings have a bias, which the layout has no place for: it will be skipped")
    if heads.shared and to == "tgi" and heads.num_layers != 1:
        warnings.append("TGI reads heads that share lm_head only with one block each")
    if heads.shared and to == "reference":
        warnings.append("the heads share the backbone's lm_head; the public Medusa loader leaves theirs random")
    if to == "reference":
        if shared := shared_block_warning(heads):
            warnings.append(shared)
        if heads.num_heads < PUBLIC_HEADS:
            warnings.append(
                f"the public Medusa loader always builds {PUBLIC_HEADS} heads: those beyond the {heads.num_heads} of "
                "this run stay random there, without a word"
            )
    return warnings


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
