"""What decodes: finds the run, the backbone and the tree that a user named, and loads them. Times nothing."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from medusa_train.checkpoint.heads_files import heads_files, heads_layout
from medusa_train.config.paths import resolve_path
from medusa_train.errors import CheckpointError

if TYPE_CHECKING:
    from medusa_train.models.backbone import Backbone
    from medusa_train.models.drafts.base import Draft
    from medusa_train.models.quantization import Quantization
    from medusa_train.trees.tree import Tree


def compile_cache_dir(run: Path) -> Path:
    """Return the folder for torch.compile's cache: TORCHINDUCTOR_CACHE_DIR if the user set it, else RUN/compiled."""
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if named != default_cache_dir():  # which torch itself puts there as soon as it looks
            return Path(named)
    return run.resolve() / "compiled"


@dataclass(frozen=True)
class ModelPaths:
    """Where everything lies. Without heads (`heads is None`) only the baselines are measured.

    `home` is the directory that results go under; `base_model` a directory or a hub name; `tree` a tree.json;
    `adapter` what a joint run trained of the backbone, folded into it for decoding; `quantization` how the backbone
    was loaded in training; `trust_remote_code` whether Python code that it ships may run.
    """

    home: Path
    base_model: str
    heads: Path | None
    tree: Path | None
    chat_template: str | None
    adapter: Path | None = None
    quantization: Quantization | None = None
    trust_remote_code: bool = False

    @property
    def backbone_form(self) -> str:
        """In which form the backbone decodes, for reports."""
        if self.adapter is not None:
            return f"{self.quantization}, dequantised, adapter folded in" if self.quantization else "adapter folded in"
        return self.quantization or "unquantised"

    @property
    def name(self) -> str | None:
        """How the heads are called in reports; None without heads."""
        return None if self.heads is None else str(self.home)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded backbone with its draft heads and tree; both are None in a baseline-only run."""

    backbone: Backbone
    draft: Draft | None
    tree: Tree | None


def runs_directory() -> Path:
    """`runs/` of the current directory, or the project's where it has one."""
    return resolve_path("runs") or Path("runs")


def newest_run(runs: Path) -> Path:
    """The run whose heads were written last.

    Raises CheckpointError when no run under `runs` has heads yet.
    """
    found = [directory for directory in runs.glob("*") if _has_heads(directory / "heads")]
    if not found:
        raise CheckpointError(
            f"no model was named, and no trained run lies under {runs}.\n"
            "Run `make demo` or `medusa-train CONFIG.yaml` first, or name one with --model RUN_DIR "
            "(or --base-model NAME for the baselines alone)."
        )
    return max(found, key=lambda directory: (_heads_written(directory / "heads"), directory.name))


def _has_heads(directory: Path) -> bool:
    return heads_layout(directory) is not None


def _heads_written(directory: Path) -> float:
    return max(path.stat().st_mtime for path in heads_files(directory))


def resolve_model(
    model: str | None,
    base_model: str | None,
    tree: Path | None,
    *,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> ModelPaths:
    """Resolve what the user named: a run, a directory of heads, a backbone alone, or nothing (the newest run).

    What is not given (None, False) is taken from the run's config.yaml where there is one; but that a run trusted
    its own backbone's code says nothing about another `base_model`.

    Raises CheckpointError, saying what to do, when something is missing.
    """
    paths = _locate(model, base_model, tree)
    return replace(
        paths,
        chat_template=chat_template or paths.chat_template,
        trust_remote_code=trust_remote_code or (paths.trust_remote_code and base_model is None),
    )


def _locate(model: str | None, base_model: str | None, tree: Path | None) -> ModelPaths:
    if model is None and base_model is not None:
        base = _local_or_hub(base_model)
        return ModelPaths(runs_directory() / "baselines" / Path(base).name, base, None, None, None)
    directory = newest_run(runs_directory()) if model is None else _existing_directory(model)
    if _has_heads(directory) and (directory.parent / "config.yaml").is_file() and directory.name == "heads":
        directory = directory.parent  # RUN/heads was named: the run it belongs to
    if _has_heads(directory / "heads"):
        return _locate_run(directory, base_model, tree)
    if _has_heads(directory):
        return _locate_heads(directory, base_model, tree)
    raise CheckpointError(
        f"{directory}: neither a run (no heads/medusa_lm_head.safetensors or heads/draft.safetensors) nor a directory "
        "of heads (ours, the public Medusa code's or TGI's, vLLM's, or a full model with medusa_head weights).\n"
        "If the run was interrupted, finish it with medusa-train; for a backbone alone use --base-model."
    )


def _existing_directory(name: str) -> Path:
    path = resolve_path(name)
    if path is None or not path.is_dir():
        raise CheckpointError(f"model {name!r}: no such directory. Name a run directory or a directory of heads.")
    return path


def _locate_run(run: Path, base_model: str | None, tree: Path | None) -> ModelPaths:
    config = _read_mapping(run / "config.yaml")
    base = base_model or config.get("base_model")
    if not isinstance(base, str):
        raise CheckpointError(f"{run / 'config.yaml'}: names no base_model; give it with --base-model NAME")
    quantization: Quantization | None = None
    if base_model is None and (run / "model" / "config.json").is_file():
        base = str(run / "model")  # a joint run without an adapter trained the backbone itself
    elif config.get("load_in_4bit") or config.get("load_in_8bit"):
        # Heads over a quantised backbone learnt from its states and its answers, not from those of the original.
        quantization = "nf4" if config.get("load_in_4bit") else "int8"
    template = config.get("chat_template")
    return ModelPaths(
        run,
        _local_or_hub(base),
        run / "heads",
        _find_tree(tree, run),
        template if isinstance(template, str) else None,
        run / "adapter" if (run / "adapter" / "adapter_config.json").is_file() else None,
        quantization,
        config.get("trust_remote_code") is True,
    )


def _locate_heads(heads: Path, base_model: str | None, tree: Path | None) -> ModelPaths:
    base = base_model or _read_mapping(heads / "config.json").get("base_model_name_or_path")
    if base_model is None and heads_layout(heads) == "model":
        base = str(heads)  # a full Medusa-2 model: the backbone lies beside its heads
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{heads}: its config.json names no base model; give it with --base-model NAME")
    return ModelPaths(heads, _local_or_hub(base), heads, _find_tree(tree, heads), None)


def _local_or_hub(name: str) -> str:
    local = resolve_path(name)
    return name if local is None else str(local)


def _find_tree(named: Path | None, home: Path) -> Path | None:
    if named is not None:
        found = resolve_path(str(named))
        if found is None:
            raise CheckpointError(f"tree {str(named)!r}: no such file")
        return found
    return home / "tree.json" if (home / "tree.json").is_file() else None


def _read_mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file's mapping; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a mapping of keys is expected")
    return content


def load_tree(paths: ModelPaths, num_heads: int) -> Tree:
    """The tree to decode with: the file's, or the chain of the heads' first guesses where there is none.

    Raises CheckpointError when the tree is deeper than there are heads.
    """
    from medusa_train.trees.tree import Tree

    if paths.tree is None:
        return Tree.chain(num_heads)
    tree = Tree.load(paths.tree)
    if tree.max_depth > num_heads:
        raise CheckpointError(f"{paths.tree}: the tree is {tree.max_depth} deep, but there are only {num_heads} heads")
    return tree


def load_backbone(paths: ModelPaths, dtype: str) -> Backbone:
    """Load the backbone in the form that it decodes in, without its adapter. Raises BackboneError."""
    from medusa_train.models.backbone import Backbone

    quantization = paths.quantization if paths.adapter is None else None  # folding an adapter in dequantises
    return Backbone.load(
        paths.base_model, dtype=dtype, quantization=quantization, trust_remote_code=paths.trust_remote_code
    )


def load_with_draft(paths: ModelPaths, dtype: str, *, pack: bool = True, compiled: bool = False) -> LoadedModel:
    """Load the backbone and, where there are any, heads and tree, ready to decode.

    Args:
        pack: on a CPU lay weights out for its kernels, and choose a form of attention, where that is measured to be
            faster. Sums are then rounded in another order.
        compiled: compile the passes of the decoding loop, which takes up to a minute; see `compile_cache_dir`.

    Raises BackboneError and CheckpointError.
    """
    from medusa_train.checkpoint.heads import load_draft

    backbone = load_backbone(paths, dtype) if paths.adapter is None else _load_with_adapter(paths, paths.adapter, dtype)
    if pack:
        backbone.pack()
    if compiled:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache_dir(paths.home))
        backbone.compile_passes()
    if paths.heads is None:
        return LoadedModel(backbone, None, None)
    draft = load_draft(paths.heads, backbone, backbone.dtype)
    if pack:
        draft.pack()
    return LoadedModel(backbone, draft, load_tree(paths, draft.num_heads))


def _load_with_adapter(paths: ModelPaths, adapter: Path, dtype: str) -> Backbone:
    """The backbone as it was loaded in training, with the adapter folded in."""
    from medusa_train.models.backbone import Backbone
    from medusa_train.models.lora import Adapter

    backbone = Backbone.load(
        paths.base_model, dtype=dtype, quantization=paths.quantization, trust_remote_code=paths.trust_remote_code
    )
    Adapter.load(backbone, adapter).merge()
    return backbone.to_dtype(dtype)
