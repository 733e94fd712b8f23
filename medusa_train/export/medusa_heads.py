"""Write Medusa heads in the layouts of other programs: reference, reference-v2, tgi, vllm, trtllm and
transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from medusa_train.checkpoint.heads import VLLM_WEIGHTS, read_heads, write_heads, write_weights
from medusa_train.checkpoint.load_model import added_stop_tokens, load_tree
from medusa_train.checkpoint.medusa_layouts import (
    HeadTensors,
    method_in_path,
    shared_block_warning,
    to_vllm,
    with_own_lm_heads,
)
from medusa_train.checkpoint.run_directory import TREE
from medusa_train.checkpoint.serialize import read_json
from medusa_train.config.types import ExportTarget
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.export.card import model_card
from medusa_train.export.merged_model import load_for_export
from medusa_train.export.publish import CARD, CHOICES, Export
from medusa_train.export.server_drafts import BIAS_IGNORED
from medusa_train.io import describe_size, replace_text
from medusa_train.models.architecture import describe_without_trees
from medusa_train.models.loading import resolve_target_model
from medusa_train.models.model_files import find_target_model
from medusa_train.trees.tree import Tree

#: Number of heads that the public Medusa loader builds, whatever config.json says.
PUBLIC_HEADS = 5
#: Limit of TensorRT-LLM on a --medusa_choices tree.
MAX_NODES = 63
CUSTOM_GENERATE_REQUIREMENTS = "torch>=2.9\ntransformers>=5.16\n"
#: If lm_head matrices have at least this many bytes, a line announces them before they are written.
ANNOUNCED = 256 * 2**20


def write_medusa_heads(export: Export) -> None:
    """Write the heads in the layout of `export.to`, with a card and the run's tree."""
    # 1. Read the heads and the reports that the card shows, and check that the layout can store
    # all weights.
    heads = read_heads(export.draft)
    heads = replace(heads, target_model_name=export.target_model_name)
    _check_layout(export, heads)
    text = model_card(export, heads)
    export.facts.append(describe(heads))
    # 2. Write weights, config.json and what else the target program reads.
    if export.to == "vllm":
        _write_for_vllm(export, heads)
    elif export.to == "trtllm":
        _write_for_tensorrt(export, heads)
    elif export.to == "transformers":
        _write_for_transformers(export, heads)
    else:
        _write_for_public_code(export, heads)
    # 3. Add warnings, the card and the tree.
    export.warnings += warnings_for(export.to, heads)
    replace_text(export.files / CARD, text)
    if export.paths.tree is not None:
        replace_text(export.files / TREE, export.paths.tree.read_text(encoding="utf-8"))


def _check_layout(export: Export, heads: HeadTensors) -> None:
    """Raise CheckpointError if the layout cannot store all weights of the heads."""
    if heads.markov_rank:
        raise CheckpointError(
            f"{export.draft}: the guesses of these heads depend on the token before, by a Markov"
            f" bias (medusa_markov_rank: {heads.markov_rank}), which the layout of {export.to}"
            " cannot store and no other program computes; decode with them here (medusa-eval,"
            " medusa_train.load), or train without medusa_markov_rank"
        )
    if heads.token_map is not None and export.to not in ("vllm", "transformers"):
        raise CheckpointError(
            f"{export.draft}: these heads have a draft vocabulary of {len(heads.token_map):,}"
            f" tokens (medusa_vocab_size), which the layout of {export.to} cannot store; export"
            " --to vllm or transformers, or train without medusa_vocab_size"
        )
    if export.to == "reference-v2" and not heads.shared:
        raise CheckpointError(
            f"{export.draft}: each of these heads has its own lm_head matrix, which reference-v2"
            " cannot store; train with medusa_share_lm_head: true, or export --to reference"
        )


def describe(heads: HeadTensors) -> str:
    """Describe heads in one line."""
    matrix = f"V {heads.vocab_size}"
    if heads.shared:
        matrix = "the lm_head of the target model"
    if heads.token_map is not None:
        matrix += f", draft vocabulary of {len(heads.token_map):,} tokens"
    blocks = f"{heads.num_layers} block{'' if heads.num_layers == 1 else 's'}"
    return (
        f"{heads.num_heads} heads x {blocks}, d {heads.hidden_size}, {matrix}; target model"
        f" {heads.target_model_name}"
    )


def warnings_for(to: ExportTarget, heads: HeadTensors) -> list[str]:
    """List what the target program will not do with these heads."""
    warnings = []
    if to != "transformers" and "lm_heads.0.bias" in heads.state:
        warnings.append(BIAS_IGNORED)
    if to in ("tgi", "reference-v2") and heads.shared and heads.num_layers != 1:
        warnings.append("TGI reads heads that share lm_head only with one block each")
    if to == "reference":
        if (warning := shared_block_warning(heads)) is not None:
            warnings.append(warning)
        if heads.num_heads < PUBLIC_HEADS:
            warnings.append(
                f"the public Medusa loader always builds {PUBLIC_HEADS} heads: those beyond the"
                f" {heads.num_heads} of this run stay randomly initialized, without a warning"
            )
    return warnings


# The layout of the public code, for reference, reference-v2, tgi and trtllm


def _write_for_public_code(export: Export, heads: HeadTensors) -> None:
    if export.to == "reference":
        heads = _with_own_lm_heads(export, heads)
    _announce(export, heads.state)
    write_heads(heads, export.files, pickled=True)


def _with_own_lm_heads(export: Export, heads: HeadTensors) -> HeadTensors:
    """Copy a shared lm_head for each head, for programs that do not read shared ones."""
    if not heads.shared:
        return heads
    export.facts.append("target format cannot share lm_head: a copy of that lm_head for each head")
    return with_own_lm_heads(heads, *_lm_head(export, heads))


def _lm_head(export: Export, heads: HeadTensors) -> tuple[Tensor, Tensor | None]:
    """Load weight [V, d] and bias [V] of the trained target model's lm_head, on the CPU and in the
    heads' dtype.
    """
    dtype = heads.state["blocks.0.0.linear.weight"].dtype
    lm_head = load_for_export(export.paths).lm_head()
    weight = lm_head.weight.detach().to("cpu", dtype)
    if lm_head.bias is None:
        return weight, None
    export.warnings.append(BIAS_IGNORED)
    return weight, lm_head.bias.detach().to("cpu", dtype)


def _announce(export: Export, tensors: Mapping[str, Tensor]) -> None:
    """Announce the size of lm_head matrices. In the run they may be shared or have a reduced
    vocabulary.
    """
    matrices = [t for name, t in tensors.items() if re.fullmatch(r"lm_heads\.\d+\.weight", name)]
    size = sum(matrix.nbytes for matrix in matrices)
    if matrices and size >= ANNOUNCED:
        noun = "matrix" if len(matrices) == 1 else "matrices"
        export.announce(
            f"writing {describe_size(size)}: {export.to} stores {len(matrices)} lm_head {noun} of"
            f" {len(matrices[0]):,} tokens"
        )


def _write_for_tensorrt(export: Export, heads: HeadTensors) -> None:
    """Write the heads with the target model's config.json plus `num_medusa_heads`, as
    TensorRT-LLM's Medusa conversion reads it, and the tree as the value of `--medusa_choices`.
    """
    # 1. Read the tree, and config.json of the target model.
    paths = export.paths
    tree = None if paths.tree is None else Tree.load(paths.tree)
    _, config = find_target_model(paths.target_model)
    if not config:  # it has to be downloaded first
        resolve_target_model(paths.target_model, trust_remote_code=paths.trust_remote_code)
        _, config = find_target_model(paths.target_model)
    # 2. Write the heads.
    heads = _with_own_lm_heads(export, heads)
    _announce(export, heads.state)
    config = {**config, "num_medusa_heads": heads.num_heads}
    write_heads(heads, export.files, pickled=True, config=config)
    # 3. Write the tree.
    advice = "pass a --medusa_choices to TensorRT-LLM yourself"
    if tree is None:
        warning = f"no tree.json in the run: {advice}"
    elif 0 < tree.size <= MAX_NODES and tree.max_depth <= heads.num_heads:
        choices = json.dumps([list(path) for path in tree.paths])
        replace_text(export.files / CHOICES, choices + "\n")
        export.facts.append(f'tree: --medusa_choices="$(cat {export.target / CHOICES})"')
        return
    else:
        warning = (
            f"{paths.tree} has {tree.size} nodes and depth {tree.max_depth}; TensorRT-LLM accepts 1"
            f" to {MAX_NODES} nodes, and there are {heads.num_heads} heads: {advice}"
        )
    export.warnings.append(warning)


# vLLM


def _write_for_vllm(export: Export, heads: HeadTensors) -> None:
    shared_weight = None
    if heads.shared:
        shared_weight, _ = _lm_head(export, heads)
    tensors, config = to_vllm(heads, shared_weight)
    check_vllm_config(config)
    _announce(export, tensors)
    write_weights(export.files, VLLM_WEIGHTS, tensors, config)
    export.facts.append(
        "vLLM drafts a chain of top-1 tokens (no tree): set num_speculative_tokens to 1 to"
        f" {heads.num_heads}, as measured on your server; it is fixed while the server runs"
    )
    if heads.token_map is not None:
        export.facts.append(
            "vLLM cannot load a reduced vocabulary: the other rows are filled in so that their"
            " tokens are not drafted; a step reads whole lm_head matrices"
        )
    if (warning := path_warning(str(export.target.resolve()))) is not None:
        export.warnings.append(warning)


def check_vllm_config(config: Mapping[str, Any]) -> None:
    """Check that vLLM can load heads with this config.json for the target model that it names, if
    that is a local directory.
    """
    path = Path(config["base_model_name_or_path"] or "") / "config.json"
    if not path.is_absolute() or not path.is_file():
        return
    target_model = read_json(path)
    if not isinstance(target_model, dict):
        raise CheckpointError(f"{path}: expected an object of JSON")
    target_model |= target_model.get("text_config") or {}
    for key in ("vocab_size", "hidden_size"):
        size = target_model.get(key, config[key])
        if size != config[key]:
            raise CheckpointError(
                f"vLLM would not load these heads: their {key} is {config[key]}, that of {path}"
                f" {size}"
            )


def path_warning(path: str) -> str | None:
    """Return a warning if vLLM chooses another method because of the heads' path or hub name; None
    otherwise.
    """
    method = method_in_path(path)
    if method is None:
        return None
    return (
        f"vLLM would load heads at {path} as {method}, whatever the method in --speculative-config,"
        " because of that word in the path: serve them from another path"
    )


# transformers


def _write_for_transformers(export: Export, heads: HeadTensors) -> None:
    """Write the heads, the decoding code that transformers' `generate` loads, and its tree."""
    # 1. Check that the target model can verify trees, and that there is a tree.
    paths = export.paths
    problem = None
    with suppress(TargetModelError):  # the target model need not be on this machine
        _, config = resolve_target_model(
            paths.target_model, trust_remote_code=paths.trust_remote_code
        )
        problem = describe_without_trees(config, paths.target_model)
    if problem is not None:
        raise CheckpointError(problem)
    tree = load_tree(paths, heads.num_heads)
    if not tree.size:
        raise CheckpointError(
            f"{paths.tree}: the tree is empty, since none was faster than plain decoding where it"
            " was fitted, so the heads would not be used; fit it on the machine that will decode"
            " (medusa-eval --calibrate)"
        )
    # 2. Write the heads and the tree.
    added = added_stop_tokens(paths)
    _announce(export, heads.state)
    write_heads(heads, export.files, config={"stop_token_ids": list(added)} if added else None)
    tree.save(export.files / TREE)
    # 3. Write the code, which is a file of this package.
    code = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    replace_text(export.files / "custom_generate" / "generate.py", code)
    replace_text(
        export.files / "custom_generate" / "requirements.txt", CUSTOM_GENERATE_REQUIREMENTS
    )
    export.facts.append(
        f'decode with model.generate(..., custom_generate="{export.target}",'
        " trust_remote_code=True)"
    )
