"""Load a model at resolved paths: a backbone with its draft heads and its tree, ready to decode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.errors import CheckpointError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.models.loading import load_backbone
from medusa_train.models.lora import Adapter
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class LoadedModel:
    """A backbone with its draft heads and tree; both are None in a baseline-only run."""

    backbone: Backbone
    draft: Draft | None
    tree: Tree | None


def load_with_draft(paths: ModelPaths, dtype: str, *, prepack: bool = True, compiled: bool = False) -> LoadedModel:
    """Load the backbone and, where there are any, heads and tree, ready to decode.

    Args:
        paths: from `resolve_model`.
        dtype: "float32", "bfloat16" or "float16".
        prepack: on a CPU, prepack weights for oneDNN and choose the attention implementation, where that is measured
            to be faster. Floating-point sums are then rounded in another order.
        compiled: compile the decoding passes, which takes up to a minute; see `compile_cache_dir`.

    Raises:
        BackboneError: the backbone cannot be loaded.
        CheckpointError: the heads or the tree cannot be read, or do not fit the backbone.
    """
    if paths.adapter is None:
        backbone = load_base_model(paths, dtype)
    else:
        backbone = _load_merged(paths, paths.adapter, dtype)
    if prepack:
        backbone.prepack_weights()
    if compiled:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache_dir(paths.home))
        backbone.compile_passes()
    if paths.heads is None:
        return LoadedModel(backbone, None, None)
    draft = load_draft(paths.heads, backbone, backbone.dtype)
    if prepack:
        draft.prepack()
    return LoadedModel(backbone, draft, load_tree(paths, draft.num_heads))


def load_base_model(paths: ModelPaths, dtype: str) -> Backbone:
    """Load the backbone in the form that it decodes in, without its adapter. Raises BackboneError."""
    quantization = paths.quantization if paths.adapter is None else None  # merging an adapter dequantises
    return load_backbone(
        paths.base_model, dtype=dtype, quantization=quantization, trust_remote_code=paths.trust_remote_code
    )


def load_tree(paths: ModelPaths, num_heads: int) -> Tree:
    """Load the tree to decode with; without a file the chain of the heads' most probable tokens.

    Raises:
        CheckpointError: the file cannot be read, or the tree is deeper than the number of heads.
    """
    if paths.tree is None:
        return Tree.chain(num_heads)
    tree = Tree.load(paths.tree)
    if tree.max_depth > num_heads:
        raise CheckpointError(f"{paths.tree}: the tree is {tree.max_depth} deep, but there are only {num_heads} heads")
    return tree


def compile_cache_dir(run: Path) -> Path:
    """Return the folder for torch.compile's cache: TORCHINDUCTOR_CACHE_DIR if the user set it, else RUN/compiled."""
    if value := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if value != default_cache_dir():  # torch sets its default there on first use
            return Path(value)
    return run.resolve() / "compiled"


def _load_merged(paths: ModelPaths, adapter: Path, dtype: str) -> Backbone:
    """Load the backbone as in training, quantised or not, merge the adapter into it, and cast it to `dtype`."""
    backbone = load_backbone(
        paths.base_model, dtype=dtype, quantization=paths.quantization, trust_remote_code=paths.trust_remote_code
    )
    Adapter.load(backbone, adapter).merge()
    return backbone.to_dtype(dtype)
