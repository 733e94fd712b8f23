"""One export of one run: which files, in whose layout, and what its reader will not do with them. Uploads nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_heads, write_heads, write_vllm
from medusa_train.checkpoint.reference import HeadTensors, shared_block_warning
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.vllm import filled_in
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError
from medusa_train.export.card import model_card
from medusa_train.export.targets import (
    MERGED,
    backbone_keys,
    check_vllm_directory,
    choices,
    load_trained_backbone,
    trained_the_backbone,
    write_merged,
)
from medusa_train.io import WRITE_ERRORS, replace_text, write_failure

PUBLIC_HEADS = 5
"""The public Medusa loader builds five heads whatever config.json says."""

CARD = "README.md"
TREE = "tree.json"
CHOICES = "medusa_choices.json"


@dataclass
class Exported:
    """What was written.

    Attributes:
        target: the directory. facts: lines that say what is in it. warnings: what its reader will not do.
    """

    target: Path
    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def export_run(
    paths: ModelPaths,
    to: ExportTarget,
    target: Path | None = None,
    *,
    base_model: str | None = None,
    licence: str | None = None,
) -> Exported:
    """Write what `paths` names in the layout of `to`, with a model card.

    Args:
        target: the directory; by default export/TO beside the heads.
        base_model: what config.json is to name as backbone; by default where it lies here, or its hub name.
        licence: what the card is to name; by default the base model's.

    Raises:
        CheckpointError: the heads can't be had in this layout, or files can't be read or written.
        BackboneError: the backbone is needed and can't be loaded.
    """
    if paths.heads is None:
        raise CheckpointError(f"{paths.home}: holds no heads to export")
    done = Exported(target or paths.home / "export" / to)
    named = base_model or _backbone_name(paths)
    heads = read_heads(paths.heads).with_base_model(named)
    _check_vocabulary(paths, heads, to)
    _WRITERS[to](paths, heads, done)
    done.warnings += warnings_for(to, heads)
    if to != MERGED:
        done.facts.insert(0, describe(heads))
        if base_model is None:
            done.warnings += backbone_warnings(paths)
    card = model_card(paths, heads, to, licence)
    try:
        replace_text(done.target / CARD, card)
        if to != MERGED and paths.tree is not None:
            replace_text(done.target / TREE, paths.tree.read_text(encoding="utf-8"))
    except WRITE_ERRORS as error:
        raise CheckpointError(write_failure(CARD, done.target, error)) from error
    return done


def _check_vocabulary(paths: ModelPaths, heads: HeadTensors, to: ExportTarget) -> None:
    if heads.token_map is not None and to not in ("vllm", MERGED):
        raise CheckpointError(
            f"{paths.heads}: these heads know {len(heads.token_map):,} tokens only (medusa_vocab_size), and the layout "
            f"of {to} has no place for which ones; export --to vllm, or train without medusa_vocab_size"
        )


def describe(heads: HeadTensors) -> str:
    """Heads in one line."""
    matrix = "the lm_head of the backbone" if heads.shared else f"V {heads.vocab_size}"
    if heads.token_map is not None:
        matrix += f", {len(heads.token_map):,} tokens of it"
    blocks = f"{heads.num_layers} block{'' if heads.num_layers == 1 else 's'}"
    return f"{heads.num_heads} heads x {blocks}, d {heads.hidden_size}, {matrix}; backbone {heads.base_model}"


def warnings_for(to: ExportTarget, heads: HeadTensors) -> list[str]:
    """What the program that is exported to will not do with these heads."""
    warnings = []
    if to != MERGED and "lm_heads.0.bias" in heads.state:
        warnings.append("the heads' unembeddings have a bias, which the layout has no place for: it will be skipped")
    if to in ("tgi", "reference-v2") and heads.shared and heads.num_layers != 1:
        warnings.append("TGI reads heads that share lm_head only with one block each")
    if to == "reference":
        if shared := shared_block_warning(heads):
            warnings.append(shared)
        if heads.num_heads < PUBLIC_HEADS:
            warnings.append(
                f"the public Medusa loader always builds {PUBLIC_HEADS} heads: those beyond the {heads.num_heads} of "
                "this run stay random there, without a word"
            )
    return warnings


def backbone_warnings(paths: ModelPaths) -> list[str]:
    """That the heads of a joint run need the backbone that was trained with them."""
    if paths.adapter is None or _merged_directory(paths) is not None:
        return []
    return [
        f"this run trained the backbone too ({paths.adapter}), and these heads belong to it: serve them with the "
        f"merged backbone (medusa-export {paths.home} --to merged), not with {paths.base_model}"
    ]


def _merged_directory(paths: ModelPaths) -> Path | None:
    """The merged backbone of the run; None where there is none, or its adapter was trained on since."""
    merged = paths.home / "export" / MERGED
    if paths.adapter is None or not (merged / "config.json").is_file():
        return None
    learnt = max(path.stat().st_mtime for path in paths.adapter.iterdir())
    return merged if (merged / "config.json").stat().st_mtime >= learnt else None


def _backbone_name(paths: ModelPaths) -> str:
    """The backbone that the heads decode with: the merged one where there is one; directories by absolute path."""
    if (merged := _merged_directory(paths)) is not None:
        return str(merged.resolve())
    base = Path(paths.base_model)
    return str(base.resolve()) if base.is_dir() else paths.base_model


def _with_own_matrices(paths: ModelPaths, heads: HeadTensors, done: Exported) -> HeadTensors:
    """The heads with a copy of the backbone's lm_head each where they share it."""
    if not heads.shared:
        return heads
    done.facts.append("each head with a copy of that lm_head, for this reader knows no sharing")
    weight, bias = _lm_head(paths, heads)
    return filled_in(heads, weight, bias)


def _lm_head(paths: ModelPaths, heads: HeadTensors) -> tuple[Tensor, Tensor | None]:
    """The backbone's unembedding, its adapter folded in, on the CPU and in the heads' dtype."""
    unembedding = load_trained_backbone(paths).unembedding()
    dtype = heads.state["blocks.0.0.linear.weight"].dtype

    def taken(tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.device("cpu"), dtype)

    return taken(unembedding.weight), None if unembedding.bias is None else taken(unembedding.bias)


def _write_reference(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    write_heads(_with_own_matrices(paths, heads, done), done.target, pickled=True)


def _write_version_2(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    if not heads.shared:
        raise CheckpointError(
            f"{paths.heads}: these heads have a matrix of their own each, which version 2 leaves out; "
            "train with medusa_share_lm_head: true, or export --to reference"
        )
    write_heads(heads, done.target, pickled=True)


def _write_tgi(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    write_heads(heads, done.target, pickled=True)


def _write_vllm(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    write_vllm(heads, done.target, _lm_head(paths, heads)[0] if heads.shared else None)
    done.facts.append(check_vllm_directory(done.target, VLLM_WEIGHTS))
    done.facts.append(f"vLLM drafts with the best guess of each head only, {heads.num_heads} tokens per step")


def _write_tensorrt(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    keys = backbone_keys(paths, heads.num_heads)
    write_heads(_with_own_matrices(paths, heads, done), done.target, pickled=True, config=keys)
    tree, complaint = choices(paths, heads.num_heads)
    if complaint:
        done.warnings.append(complaint)
    else:
        replace_text(done.target / CHOICES, tree + "\n")
        done.facts.append(f'the tree: --medusa_choices="$(cat {done.target / CHOICES})"')


def _write_merged(paths: ModelPaths, heads: HeadTensors, done: Exported) -> None:
    if not trained_the_backbone(paths):
        raise CheckpointError(
            f"{paths.home}: this run left the backbone as it was, so there is nothing to merge: use {paths.base_model}"
        )
    done.facts.append(write_merged(paths, done.target))


_WRITERS: dict[ExportTarget, Callable[[ModelPaths, HeadTensors, Exported], None]] = {
    "reference": _write_reference,
    "reference-v2": _write_version_2,
    "tgi": _write_tgi,
    "vllm": _write_vllm,
    "trtllm": _write_tensorrt,
    "merged": _write_merged,
}
