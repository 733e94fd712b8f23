"""Write what some targets need in addition to the heads: config, tree and decoding code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from medusa_train.checkpoint.load_model import load_tree
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.checkpoint.run_directory import TREE
from medusa_train.checkpoint.serialize import read_json
from medusa_train.errors import CheckpointError, TargetModelError
from medusa_train.hub import hub_is_unreachable
from medusa_train.io import replace_text
from medusa_train.models.architecture import describe_without_trees
from medusa_train.models.loading import resolve_target_model
from medusa_train.network import check_network
from medusa_train.trees.tree import Tree

MAX_NODES = 63  # limit of TensorRT-LLM on a --medusa_choices tree
CUSTOM_GENERATE_REQUIREMENTS = "torch>=2.9\ntransformers>=5.16\n"


def check_vllm_config(config: Mapping[str, Any]) -> None:
    """Check that vLLM can load heads with this config.json for the target model that it names."""
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


def tensorrt_config(paths: ModelPaths, num_heads: int) -> dict[str, Any]:
    """Return the target model's config.json plus `num_medusa_heads`, as TensorRT-LLM's Medusa
    conversion reads it.
    """
    offline = hub_is_unreachable()
    if not offline and not Path(paths.target_model).is_dir():
        check_network()
    try:
        path = cached_file(paths.target_model, "config.json", local_files_only=offline)
    except OSError as error:
        raise TargetModelError(
            f"base_model {paths.target_model}: cannot read its config.json, which this export"
            f" contains: {error}"
        ) from error
    return {**read_json(Path(path)), "num_medusa_heads": num_heads}


def medusa_choices(paths: ModelPaths, num_heads: int) -> tuple[str, str | None]:
    """Return the run's tree as the value of `--medusa_choices`, and a warning if there is no usable
    tree.
    """
    advice = "pass a --medusa_choices to TensorRT-LLM yourself"
    if paths.tree is None:
        return "", f"no tree.json in the run: {advice}"
    tree = Tree.load(paths.tree)
    if 0 < tree.size <= MAX_NODES and tree.max_depth <= num_heads:
        return json.dumps([list(path) for path in tree.paths]), None
    return "", (
        f"{paths.tree} has {tree.size} nodes and depth {tree.max_depth}; TensorRT-LLM accepts 1 to"
        f" {MAX_NODES} nodes, and there are {num_heads} heads: {advice}"
    )


def write_custom_generate(paths: ModelPaths, num_heads: int, directory: Path, target: Path) -> str:
    """Write the decoding code that transformers' `generate` loads, and its tree; return a line that
    says how to use it in the directory `target`.
    """
    problem = None
    with suppress(TargetModelError):  # the target model need not be on this machine
        _, config = resolve_target_model(
            paths.target_model, trust_remote_code=paths.trust_remote_code
        )
        problem = describe_without_trees(config, paths.target_model)
    if problem is not None:
        raise CheckpointError(problem)
    tree = load_tree(paths, num_heads)
    if not tree.size:
        raise CheckpointError(
            f"{paths.tree}: the tree is empty, since none was faster than plain decoding where it"
            " was fitted, so the heads would not be used; fit it on the machine that will decode"
            " (medusa-eval --calibrate)"
        )
    tree.save(directory / TREE)
    code = Path(__file__).with_name("custom_generate.py").read_text(encoding="utf-8")
    replace_text(directory / "custom_generate" / "generate.py", code)
    replace_text(directory / "custom_generate" / "requirements.txt", CUSTOM_GENERATE_REQUIREMENTS)
    return f'decode with model.generate(..., custom_generate="{target}", trust_remote_code=True)'
