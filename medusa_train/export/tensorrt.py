"""What TensorRT-LLM's Medusa conversion wants besides the heads: the backbone's config, and the tree as an argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.files import read_json
from medusa_train.checkpoint.subject import SubjectPaths
from medusa_train.config.hub import hub_is_out_of_reach
from medusa_train.errors import BackboneError, CheckpointError
from medusa_train.trees.tree import Tree

MAX_NODES = 63


def backbone_keys(paths: SubjectPaths, num_heads: int) -> dict[str, Any]:
    """The backbone's own config.json as it stands, and the number of heads under the name that is only read here.

    Raises:
        BackboneError: it can't be had. CheckpointError: it is no JSON.
    """
    local = Path(paths.base_model) / "config.json"
    if not local.is_file():
        from huggingface_hub import hf_hub_download

        try:
            offline = hub_is_out_of_reach()
            local = Path(hf_hub_download(paths.base_model, "config.json", local_files_only=offline))
        except Exception as error:  # the hub client raises a dozen unrelated kinds for "not reachable" and "not there"
            raise BackboneError(
                f"base_model {paths.base_model}: its config.json, which belongs into this export, can't be had: {error}"
            ) from error
    config = read_json(local)
    if not isinstance(config, dict):
        raise CheckpointError(f"{local}: a mapping of keys is expected")
    return {**config, "num_medusa_heads": num_heads}


def choices(paths: SubjectPaths, num_heads: int) -> tuple[str, str | None]:
    """The run's tree as `--medusa_choices` takes it, and what is in the way of that, or None."""
    if paths.tree is None:
        return "", "there is no tree.json here: give TensorRT-LLM a --medusa_choices of your own"
    tree = Tree.load(paths.tree)
    if tree.size > MAX_NODES or tree.max_depth > num_heads:
        return "", (
            f"{paths.tree} has {tree.size} nodes and is {tree.max_depth} deep; TensorRT-LLM takes {MAX_NODES} nodes at "
            f"most, and there are {num_heads} heads: give it a --medusa_choices of your own"
        )
    return json.dumps([list(path) for path in tree.paths]), None
