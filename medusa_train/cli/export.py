"""`medusa-export`: write trained heads, or a jointly trained target model, for another program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from medusa_train.cli.common import (
    OVERRIDE,
    error_console,
    output_console,
    print_next,
    read_arguments,
)
from medusa_train.cli.options import command_app
from medusa_train.config.paths import expand_user, looks_like_path, resolve_path
from medusa_train.config.schema import ExportConfig
from medusa_train.config.types import ExportTarget
from medusa_train.errors import ConfigError
from medusa_train.progress import RunProgress

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths
    from medusa_train.export.publish import Export

HELP = """
Export a draft, or a jointly trained target model, for a server or another program.

[bold]Examples[/bold]

  medusa-export runs/mine --to vllm

  medusa-export runs/mine --to transformers --output-dir exports/mine

  medusa-export runs/mine --to merged --push-to-hub OWNER/NAME

RUN is a run or a directory of heads (this project's, the public Medusa code's, TGI's, vLLM's or EAGLE-3's, or a whole
Medusa-2 model); default: the newest run. Each export has a model card, which says how to serve it. --push-to-hub
uploads it; a new repository is private unless private=false.

[bold]--to[/bold]

  reference     the public Medusa code (medusa_lm_head.pt), and .safetensors

  reference-v2  the same for heads that share the target model's lm_head

  tgi           text-generation-inference (medusa_lm_head.safetensors)

  vllm          vLLM (model.safetensors): Medusa heads, EAGLE-3 or DFlash

  sglang        SGLang: EAGLE-3 or DFlash

  speculators   the speculators library, EAGLE-3 only

  trtllm        TensorRT-LLM: heads, the target model's config, the tree as --medusa_choices

  transformers  generate(custom_generate=DIRECTORY) of transformers: heads, tree and the code that decodes with them

  merged        Medusa-2's target model, adapter merged: serve it with the heads of such a run

Exit codes: 0 success, 1 failure, 2 configuration error, 130 interrupted, 143 terminated.
"""


@command_app(ExportConfig, {"Export": ("to", "output_dir", "push_to_hub")}, HELP)
def app(
    flags: dict[str, str | None],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | CONFIG.yaml] [key=value ...]",
            help="Run directory or configuration file, and overrides of keys.",
        ),
    ] = None,
) -> None:
    """Read the arguments, export, and print what was written."""
    cfg = _read_config(arguments or [], flags)

    from medusa_train.checkpoint.next_command import after_export
    from medusa_train.checkpoint.resolve import check_export, names_no_target_model, resolve_model

    # 1. Find the run, and the target model if the heads do not name one.
    target_model = None
    if cfg.run is not None and names_no_target_model(cfg.run):
        target_model = cfg.base_model
    paths = resolve_model(
        cfg.run,
        target_model,
        None,
        trust_remote_code=cfg.trust_remote_code,
        needs_target_model=False,
    )
    if (note := paths.remote_code_note) is not None:
        error_console().print(f"note: {note}")
    has_moved = looks_like_path(paths.target_model) and not Path(paths.target_model).is_dir()
    if cfg.base_model and has_moved:
        paths = replace(paths, target_model=str(resolve_path(cfg.base_model) or cfg.base_model))

    if paths.heads is not None:
        check_export(paths.heads, cfg.to)

    # 2. Export.
    console = output_console(highlight=False, soft_wrap=True)
    with RunProgress(error_console()).phase("importing torch and transformers", ticking=True):
        # only after the paths are checked
        from medusa_train.export.medusa_heads import path_warning
        from medusa_train.export.upload import push

    export = _export(
        paths,
        cfg.to,
        console,
        target=expand_user(cfg.output_dir) if cfg.output_dir else None,
        target_model_name=cfg.base_model,
        licence=cfg.license,
    )
    # 3. Upload.
    if cfg.push_to_hub is not None:
        if cfg.to != "merged" and Path(export.target_model_name).is_absolute():
            _warn(
                f"config.json names the target model by a local path, {export.target_model_name}:"
                " set base_model=OWNER/NAME"
            )
        if cfg.to == "vllm" and (warning := path_warning(cfg.push_to_hub)) is not None:
            _warn(warning)
        console.print(f"uploaded: {push(export.target, cfg.push_to_hub, private=cfg.private)}")
    if not cfg.output_dir:
        print_next(after_export(paths, cfg.to), console)


def _read_config(arguments: list[str], flags: dict[str, str | None]) -> ExportConfig:
    """Read the configuration from the command line. An argument that is neither a YAML file nor
    key=value is the run.
    """
    runs = [
        argument
        for argument in arguments
        if not OVERRIDE.match(argument) and not argument.endswith((".yaml", ".yml"))
    ]
    if len(runs) > 1:
        raise ConfigError(
            f"expected one run, got {' and '.join(runs)}; overrides are written key=value, without"
            " spaces around ="
        )
    others = [argument for argument in arguments if argument not in runs]
    run = runs[0] if runs else None
    return read_arguments(ExportConfig, others, flags={"run": run, **flags})


def export_after_training(
    run: str, targets: Iterable[ExportTarget], console: Console, *, trust_remote_code: bool = False
) -> None:
    """Export to every target in a training configuration. "merged" is first, so that exported heads
    name the merged target model.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    paths = resolve_model(
        run, None, None, trust_remote_code=trust_remote_code, needs_target_model=False
    )
    for to in sorted(targets, key=lambda to: to != "merged"):
        _export(paths, to, console)


def _export(paths: ModelPaths, to: ExportTarget, console: Console, **options: Any) -> Export:
    """Export, and print where and what was written; warnings go to stderr.

    Args:
        options: arguments of `export_run`.
    """
    from medusa_train.export.write import export_run

    progress = RunProgress(error_console())
    with progress.phase(f"exporting to {to}", ticking=True):
        export = export_run(paths, to, announce=progress.print, **options)
    for warning in export.warnings:
        _warn(warning)
    console.print(f"{paths.home} -> {export.target}")
    for fact in export.facts:
        console.print(f"  {fact}")
    return export


def _warn(warning: str) -> None:
    error_console().print(f"warning: {warning}", style="yellow")


if __name__ == "__main__":
    app()
