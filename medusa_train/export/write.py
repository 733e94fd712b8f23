"""Export the draft or the target model of a run to the layout of another program, with a model
card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from medusa_train.checkpoint.load_model import read_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, check_export, heads_kind
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError, MedusaError
from medusa_train.export.medusa_heads import write_medusa_heads
from medusa_train.export.merged_model import write_merged_export
from medusa_train.export.publish import MERGED, Export, check_target, published
from medusa_train.export.server_drafts import write_server_draft


def export_run(
    paths: ModelPaths,
    to: ExportTarget,
    target: Path | None = None,
    *,
    target_model_name: str | None = None,
    licence: str | None = None,
    announce: Callable[[str], object] = lambda line: None,
) -> Export:
    """Write the model at `paths` in the layout of `to`, with a model card.

    Args:
        target: output directory; defaults to export/TO next to the heads.
        target_model_name: target model to name in config.json; defaults to its absolute path or hub
            name.
        licence: licence to name on the card; defaults to the target model's.
        announce: is called with a line before anything large is written.
    """
    # 1. Check that there is a draft with such a layout, and that no other files are overwritten.
    if paths.heads is None:
        raise CheckpointError(f"{paths.home}: holds no heads to export")
    check_export(paths.heads, to)
    name = target_model_name or _target_model_name(paths)
    place = target or paths.home / "export" / to
    export = Export(paths, paths.heads, to, place, name, licence, announce)
    if target is not None:
        check_target(export)
    # 2. Write the files.
    with published(export):
        kind = heads_kind(paths.heads)
        if to == MERGED:
            write_merged_export(export)
        elif kind == "medusa":
            write_medusa_heads(export)
        else:
            write_server_draft(export, kind)
    # 3. Warn if the target model is not ready to be served.
    if to != MERGED and target_model_name is None and _merged_directory(paths) is None:
        if paths.adapter is not None:
            export.warnings.append(
                f"this run trained the target model too ({paths.adapter}): serve these heads with"
                f" the merged target model (medusa-export {paths.home} --to merged), not with"
                f" {paths.target_model}"
            )
        if to != "transformers":  # the code for transformers reads the stop tokens
            export.warnings += stop_warnings(paths)
    return export


def _target_model_name(paths: ModelPaths) -> str:
    """Return the target model with which the heads decode (the merged model if it exists), as a hub
    name or an absolute path.
    """
    local = _merged_directory(paths) or Path(paths.target_model)
    return str(local.resolve()) if local.is_dir() else paths.target_model


def _merged_directory(paths: ModelPaths) -> Path | None:
    """Return the run's merged target model; None if missing or older than the adapter."""
    merged = paths.home / "export" / MERGED
    config = merged / "config.json"
    if paths.adapter is None or not config.is_file():
        return None
    adapter_time = max(path.stat().st_mtime for path in paths.adapter.iterdir())
    return None if config.stat().st_mtime < adapter_time else merged


def stop_warnings(paths: ModelPaths) -> list[str]:
    """Warn if answers end at a token that neither the target model's generation config nor its
    tokenizer names, because servers only stop at tokens from these files.
    """
    try:
        stop_tokens, tokenizer = read_stop_tokens(paths)
        file_tokens = read_stop_tokens(replace(paths, special_tokens={}))[0]
    except MedusaError:  # the target model is not on this machine
        return []
    known_tokens = file_tokens.generation_config + file_tokens.tokenizer
    unknown_tokens = [token for token in stop_tokens.ids if token not in known_tokens]
    if not unknown_tokens:
        return []
    texts = " and ".join(map(str, tokenizer.convert_ids_to_tokens(unknown_tokens)))
    return [
        f"answers end at {texts}, which neither generation_config.json nor the tokenizer of"
        f" {paths.target_model} names: add {unknown_tokens} to eos_token_id in its"
        " generation_config.json, or send stop_token_ids with each request, else servers go on"
        " after the answer"
    ]
