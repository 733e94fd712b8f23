"""Find the model that a user means: resolve a run, a directory of heads or a target model to paths,
by file names and configs.

This module reads no weights and does not import torch, so that a command rejects a wrong path
within a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import yaml
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open

from medusa_train.checkpoint.run_directory import ADAPTER, CONFIG, HEADS, MODEL, TREE
from medusa_train.config.draft_sections import DRAFT_CONFIGS, DraftConfig, LookupChoice
from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.config.types import ExportTarget, Quantization
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import CheckpointError, DataError, TargetModelError
from medusa_train.hub import FetchError, fetch_heads, hub_is_unreachable
from medusa_train.io import parse_json
from medusa_train.models.model_files import ADAPTER_CONFIG

DRAFT = "draft.safetensors"
SAFETENSORS = "medusa_lm_head.safetensors"
PICKLED = "medusa_lm_head.pt"
HEADS_CONFIG = "config.json"
MODEL_FILES = ("model.safetensors", "pytorch_model.bin")
# Values of the key `tree` that are not files.
#: Use the tree in tree.json.
FIXED = "fixed"
#: Use no tree.
NO_TREE = "none"
#: Use another tree in every step, optionally of a given size.
DYNAMIC = re.compile(r"dynamic(:[1-9]\d*x[1-9]\d*)?")
#: Prefixes of the heads in the state dict of a Medusa-2 full model.
PREFIXES = ("medusa_head.", "medusa_heads.")

#: "draft": our layout of any draft except Medusa.
#: "reference": Medusa heads with the public code's names, which TGI and this program also use.
#: "vllm": Medusa heads with vLLM's names.
#: "model": a Medusa-2 full model, with heads and target model in one state dict.
#: "eagle3", "dflash": such a draft in a layout that servers read.
Layout = Literal["draft", "reference", "vllm", "model", "eagle3", "dflash"]
#: Layouts that are recognized by the name of a file. If a directory has several, the first counts.
_OWN_FILES: dict[Layout, tuple[str, ...]] = {"draft": (DRAFT,), "reference": (SAFETENSORS, PICKLED)}
#: Architecture of EAGLE-3 drafts in config.json, as servers read them.
EAGLE3 = "LlamaForCausalLMEagle3"
#: Architecture of DFlash drafts.
DFLASH = "DFlashDraftModel"
#: Architecture of DFlash drafts with a Markov bias.
DSPARK = "Qwen3DSparkModel"
#: Architecture of EAGLE-3 drafts whose layer has norms of queries and keys.
EAGLE3_QWEN3 = "Eagle3Qwen3ForCausalLM"
#: Part of the title of a merged target model's card. Up to version 0.2 the title begins with
#: "Backbone".
MERGED_CARD = "trained with Medusa heads"


@dataclass(frozen=True)
class ModelPaths:
    """Paths of a target model, its draft heads and its tree. Without heads and lookup, decoding is
    plain.

    Attributes:
        home: directory in which results are written.
        target_model: directory or Hugging Face hub name of the target model.
        heads, tree: directory of the draft heads, and path of the tree.json.
        chat_template: name of the chat template, if the run or the user sets one.
        adapter: LoRA adapter of a joint run; it is merged into the target model for decoding.
        quantization: quantization of the target model in training.
        trust_remote_code: whether the user allowed Python code of the target model's repository.
        asks_for_remote_code: whether the run's config.yaml sets `trust_remote_code` and the user
            does not. The run's value has no effect.
        special_tokens: special tokens that the tokenizer's own files do not define, by role.
        lookup: a draft that needs no training, alone (`heads is None`) or in addition to the heads.
        tree_mode: "fixed": use `tree`. "dynamic", or "dynamic:32x5" with nodes and depth: the draft
            chooses another tree in every step. "none": nothing is drafted, heads are only traced.
        threshold: drafting stops at this confidence or below; None: the heads' own threshold.
        hub_name: hub name of heads that were downloaded from the hub; None for other heads.
    """

    home: Path
    target_model: str
    heads: Path | None
    tree: Path | None
    chat_template: str | None
    adapter: Path | None = None
    quantization: Quantization | None = None
    trust_remote_code: bool = False
    asks_for_remote_code: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    lookup: LookupChoice | None = None
    tree_mode: str = FIXED
    threshold: float | None = None
    hub_name: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Arguments of medusa-eval that select these heads, and the target model if it is not from
        a run, and allow its code if the user did.
        """
        options = ["--model", self.hub_name or str(self.home)]
        if not (self.home / CONFIG).is_file():
            options += ["--base-model", self.target_model]
        if self.trust_remote_code:
            options.append("trust_remote_code=true")
        return options

    @property
    def remote_code_note(self) -> str | None:
        """Note for a run that was trained with Python code from a repository, which only the user
        can allow; None for other models.
        """
        if not self.asks_for_remote_code:
            return None
        return (
            f"{self.home / CONFIG}: trust_remote_code: true has no effect, since a run cannot allow"
            f" code. To run the Python code of {self.target_model}, as in training, read it and set"
            " trust_remote_code=true yourself"
        )

    @property
    def has_draft(self) -> bool:
        """Whether there are heads or a lookup draft."""
        return self.heads is not None or self.lookup is not None

    @property
    def trained_model(self) -> Path | None:
        """The full target model that the run trained; None if it trained none."""
        model = self.home / MODEL
        return model if (model / HEADS_CONFIG).is_file() else None

    @property
    def trained_target_model(self) -> bool:
        """Whether the run trained its target model (Medusa-2), by an adapter or in full."""
        return self.adapter is not None or self.trained_model is not None

    def with_lookup(self, lookup: LookupChoice | None) -> ModelPaths:
        """Return the paths with a lookup draft, which replaces the heads unless `lookup.heads` is
        set to their kind.
        """
        if lookup is None:
            return self
        if lookup.datastore is not None and resolve_path(lookup.datastore) is None:
            raise DataError(f"rest.datastore {lookup.datastore}: no such file")
        if lookup.heads is None:
            return replace(self, heads=None, tree=None, lookup=lookup)
        if self.heads is None:
            raise CheckpointError(
                f"draft {lookup.name}: {self.target_model} has no heads; name a run with --model,"
                f" or set draft: {lookup.kind}"
            )
        kind = heads_kind(self.heads)
        if kind != lookup.heads:
            raise CheckpointError(
                f"draft {lookup.name}: the heads in {self.heads} are {kind};"
                f" {_advice(kind, lookup)}"
            )
        return replace(self, lookup=lookup)

    def with_dynamic_trees(self, tree: str) -> ModelPaths:
        """Return the paths with dynamic trees, which the draft chooses in every step.

        Raises CheckpointError if this kind of draft cannot choose trees.
        """
        if self.heads is None:
            raise CheckpointError(
                f"tree {tree}: {self.target_model} has no heads; name a run with --model"
            )
        kind = heads_kind(self.heads)
        if not DRAFT_CONFIGS.get(kind, DraftConfig).dynamic_trees:
            kinds = [name for name, config in DRAFT_CONFIGS.items() if config.dynamic_trees]
            raise CheckpointError(
                f"tree {tree}: needs {' or '.join(kinds)}, but {self.heads} is {kind}; use --tree"
                f" {FIXED}"
            )
        return replace(self, tree_mode=tree)

    def with_threshold(self, threshold: float | None) -> ModelPaths:
        """Return the paths with another confidence threshold; raises CheckpointError for heads that
        have no threshold.
        """
        kind = "no heads"
        if self.heads is not None:
            kind = heads_kind(self.heads)
        keys = DRAFT_CONFIGS.get(kind, DraftConfig).model_fields
        if threshold is not None and "threshold" not in keys:
            raise CheckpointError(
                f"threshold: stops the drafting of Kangaroo, but {self.home} has {kind}; remove it"
            )
        return replace(self, threshold=threshold)

    @property
    def target_model_form(self) -> str:
        """Description for reports of how the target model is loaded for decoding."""
        if self.adapter is None:
            return self.quantization or "unquantised"
        if self.quantization:
            return f"{self.quantization}, dequantised, adapter folded in"
        return "adapter folded in"

    @property
    def name(self) -> str | None:
        """Name of the model in reports; None without heads."""
        if self.heads is None:
            return None
        return str(self.home)


def resolve_model(
    model: str | None,
    target_model: str | None,
    tree: str | Path | None,
    *,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    needs_target_model: bool = True,
    lookup: LookupChoice | None = None,
    threshold: float | None = None,
) -> ModelPaths:
    """Resolve a run, a directory of heads, a target model alone, or the newest run to paths.

    Options that are None are taken from the run's config.yaml if there is one. The exception is
    `trust_remote_code`: a run may come from anywhere, so only the user can allow code.

    Args:
        model: run directory or directory of heads; None: the newest run under runs/, or no heads if
            `target_model` is given.
        target_model: directory or hub name; None: the target model with which the heads were
            trained.
        tree: path of a tree file. None or "fixed": tree.json next to the heads. "none": heads are
            only traced. "dynamic" or "dynamic:32x5": another tree in every step, with the size and
            depth of the fixed tree or with the given ones.
        needs_target_model: whether to check that a target model given by a local path exists.
        lookup: a draft that needs no training, in place of the heads or in addition to them.
        threshold: drafting stops at this confidence or below; None: the heads' own threshold.
    """
    # 1. Find the target model, the heads and the tree file.
    tree_file = None
    if names_tree_file(tree):
        tree_file = Path(tree)
    paths = _resolve(model, target_model, tree_file)
    # 2. Set the kind of trees and drafts. A lookup draft alone chooses its trees itself.
    if lookup is None or lookup.heads is not None:
        if str(tree) == NO_TREE:
            paths = replace(paths, tree=None, tree_mode=NO_TREE)
            lookup = None
        elif DYNAMIC.fullmatch(str(tree)):
            paths = paths.with_dynamic_trees(str(tree))
    paths = paths.with_lookup(lookup).with_threshold(threshold)
    # 3. Check that the target model exists.
    name = paths.target_model
    if needs_target_model and resolve_path(name) is None and looks_like_path(name):
        advice = f" (named by {paths.home}; give another with --base-model)"
        if target_model:
            advice = ""
        raise TargetModelError(f"base_model {name}: no such directory{advice}")
    if chat_template:
        get_template(chat_template)
    # 4. Replace the run's settings by those of the user.
    user_settings: dict[str, Any] = {
        "chat_template": chat_template or None,
        "chat_template_kwargs": chat_template_kwargs,
        "special_tokens": special_tokens,
    }
    return replace(
        paths,
        **{name: value for name, value in user_settings.items() if value is not None},
        trust_remote_code=trust_remote_code,
        asks_for_remote_code=paths.asks_for_remote_code and not trust_remote_code,
    )


def names_tree_file(tree: str | Path | None) -> TypeGuard[str | Path]:
    """Return whether a value of the key `tree` is a file."""
    if tree is None or str(tree) in (FIXED, NO_TREE):
        return False
    return DYNAMIC.fullmatch(str(tree)) is None


def runs_directory() -> Path:
    """Return `runs/` in the current directory, or the project's `runs/` if there is none."""
    return resolve_path("runs") or Path("runs")


def newest_run(runs: Path) -> Path:
    """Return the run whose heads were written last."""
    trained = [directory for directory in runs.glob("*") if find_heads(directory / HEADS).layout]
    if not trained:
        raise CheckpointError(
            f"no model given, and no trained run under {runs}.\nRun `make demo` or `medusa-train"
            " CONFIG.yaml` first, or name a run (or, to measure the baselines alone, a"
            " base_model)."
        )

    def written(run: Path) -> tuple[float, str]:
        times = [file.stat().st_mtime for file in find_heads(run / HEADS).files]
        return max(times), run.name

    return max(trained, key=written)


class HeadFiles(NamedTuple):
    """The layout of the heads in a directory (None if it has no heads), and their weight files."""

    directory: Path
    layout: Layout | None
    files: list[Path]


def find_heads(directory: Path) -> HeadFiles:
    """Find the draft heads in a directory by the names of its files and its config.json."""
    # 1. Look for a file name that only one layout has.
    for layout, names in _OWN_FILES.items():
        for name in names:
            if (directory / name).is_file():
                return HeadFiles(directory, layout, [directory / name])
    # 2. Read config.json.
    config = read_mapping(directory / HEADS_CONFIG)
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        weights = sorted(directory.glob("pytorch_model*.bin"))
    if config.get("model_type") == "medusa" and weights:
        return HeadFiles(directory, "vllm", weights)
    if _is_eagle3(config):
        return HeadFiles(directory, "eagle3", weights)
    if _is_dflash(config):
        return HeadFiles(directory, "dflash", weights)
    # 3. Look for heads among the tensors of a full model.
    shards = sorted(set(_shards_with_heads(directory)))
    return HeadFiles(directory, "model" if shards else None, shards)


def find_initial_heads(run: Path | None) -> Path | None:
    """Return the heads in `run` (a run, or a directory of heads in any supported
    layout), or None.
    """
    candidates = [] if run is None else [run / HEADS, run]
    return next((path for path in candidates if find_heads(path).layout), None)


def find_initial_adapter(run: Path | None) -> Path | None:
    """Return the adapter in `run` (a run, or an adapter's directory), or None."""
    candidates = [] if run is None else [run / ADAPTER, run]
    return next((path for path in candidates if (path / ADAPTER_CONFIG).is_file()), None)


def heads_of_other_kinds(head_files: HeadFiles) -> list[str]:
    """Return the files of other kinds of heads in the same directory, by their names."""
    other_files: list[str] = []
    for layout, names in _OWN_FILES.items():
        if layout != head_files.layout:
            other_files += [name for name in names if (head_files.directory / name).is_file()]
    return other_files


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Return the architectures in a config.json; empty if it has no list of them."""
    names = config.get("architectures")
    return list(map(str, names)) if isinstance(names, list) else []


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes an EAGLE-3 draft, from our export for servers, from
    speculators, or from EAGLE's authors.
    """
    if {EAGLE3, EAGLE3_QWEN3}.intersection(architectures_of(config)):
        return True
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "eagle3"
    return "draft_vocab_size" in config  # in files of EAGLE's authors


def _is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a DFlash draft in its authors' layout, or our export
    of one with a Markov bias.
    """
    architectures = architectures_of(config)
    is_ours = DSPARK in architectures and config.get("sample_from_anchor") is False
    return DFLASH in architectures or is_ours


#: Architectures of drafts of any method. The whole name must match, because other models are also
#: called Eagle.
_DRAFT_ARCHITECTURE = re.compile(
    r"P?[Ee]agle3?\w+(ForCausalLM|MTPModel|DraftModel)|EAGLEModel|PEagleDraftModel"
    r"|\w+ForCausalLMEagle3?|\w*DFlash\w*|\w*DSpark\w*|\w+MTP(Model)?|MLPSpeculator\w*"
)
_READABLE = "Medusa heads, EAGLE-3 and DFlash drafts are read, and what this program has trained."


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """Describe the kind of draft in a config.json if it cannot be read; None if the config does not
    describe such a draft.
    """
    # 1. Exclude heads that can be read: our own, and other programs' Medusa heads, whose
    # num_hidden_layers is the number of blocks per head.
    is_medusa = config.get("model_type") == "medusa"
    if "draft" in config or is_medusa or any(key.startswith("medusa_") for key in config):
        return None
    # 2. Recognize drafts of other methods.
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return f"config.json describes a draft of speculators' kind {kind}, which is not read"
    if any(key.startswith("hydra_") for key in config):
        return "config.json is that of Hydra heads of their authors' code, which are not read"
    for name in architectures_of(config):
        if _DRAFT_ARCHITECTURE.fullmatch(name):
            return f"config.json describes a draft of the kind {name}, which is not read"
    if config.get("num_hidden_layers") == 1:
        return (
            "config.json describes a model of one layer without draft_vocab_size, as of a draft of"
            " EAGLE 1 or 2, which is not read"
        )
    return None


def holds_merged(directory: Path) -> bool:
    """Return whether a directory is a run's `export/merged`, or a copy of one."""
    card = directory / "README.md"
    return card.is_file() and MERGED_CARD in card.read_text(encoding="utf-8", errors="replace")


def _holds_merged(name: str) -> bool:
    """Return whether a model is a merged target model, according to its card. For a hub name the
    card is read from the hub's cache, or downloaded.
    """
    if Path(name).is_dir():
        return holds_merged(Path(name))
    try:
        card = hf_hub_download(name, "README.md", local_files_only=hub_is_unreachable())
    except Exception:  # many unrelated types; loading the model will report the problem
        return False
    return holds_merged(Path(card).parent)


def heads_kind(directory: Path) -> str:
    """Return the kind of the heads in `directory`, a value of the key `draft`."""
    layout = find_heads(directory).layout
    if layout == "draft":
        return str(read_mapping(directory / HEADS_CONFIG).get("draft"))
    if layout in ("eagle3", "dflash"):
        return layout
    return "medusa"


def check_export(heads: Path, to: ExportTarget) -> None:
    """Raise CheckpointError unless heads of this kind can be exported to the layout `to`."""
    kind = heads_kind(heads)
    exports = DRAFT_CONFIGS.get(kind, DraftConfig).exports
    if to in exports:
        return
    advice = f"is exported --to {', '.join(exports)}, not to {to}"
    if not exports:
        advice = (
            "cannot be exported: other programs have no layout for it. Decode with it here"
            " (medusa-eval, medusa_train.load)"
        )
    raise CheckpointError(f"{heads}: a draft of the kind {kind} {advice}")


def _advice(kind: str, lookup: LookupChoice) -> str:
    if not DRAFT_CONFIGS.get(kind, DraftConfig).merges:
        return f"no other guesses can be added to these; set draft: {lookup.kind}, or remove draft"
    return f"set draft: {kind}+{lookup.kind}"


def _resolve(model: str | None, target_model: str | None, tree: Path | None) -> ModelPaths:
    """Find out whether `model` is a run or heads; if None, use the target model or
    the newest run.
    """
    if model is None and target_model is not None:
        target_model = _local_or_hub(target_model)
        if tree is not None:
            raise CheckpointError(
                f"tree {tree}: {target_model} has no heads; name a run with --model"
            )
        name = Path(target_model).name
        if name == "merged":  # RUN/export/merged: add the run's name, since every run may have one
            name = "-".join(Path(target_model).resolve().parts[-3:])
        return ModelPaths(runs_directory() / "baselines" / name, target_model, None, None, None)
    if model is None:
        directory = newest_run(runs_directory())
    else:
        directory = _existing_directory(model)
        if resolve_path(model) is None:
            return _resolve_fetched(model, directory, target_model, tree)
    is_heads_of_run = directory.name == HEADS and (directory.parent / CONFIG).is_file()
    if is_heads_of_run and find_heads(directory).layout:
        directory = directory.parent  # RUN/heads means RUN
    if find_heads(directory / HEADS).layout:
        return _resolve_run(directory, target_model, tree)
    if find_heads(directory).layout:
        return _resolve_heads(directory, target_model, tree)
    kind = _other_kind(read_mapping(directory / HEADS_CONFIG))
    if kind is not None:
        raise CheckpointError(f"{directory}: {kind}. {_READABLE}")
    raise CheckpointError(
        f"{directory}: neither a run (no heads/medusa_lm_head.safetensors or"
        " heads/draft.safetensors) nor a directory of heads (ours, the public Medusa code's or"
        " TGI's, vLLM's, or a full model with medusa_head weights).\nIf the run was interrupted,"
        " finish it with medusa-train; for a target model alone use --base-model."
    )


def _existing_directory(name: str) -> Path:
    """Return the directory `name`, or the cached directory of a hub repository."""
    path = resolve_path(name)
    if path is not None and path.is_dir():
        return path
    if path is not None or looks_like_path(name) or name.count("/") != 1:
        raise CheckpointError(
            f"model {name!r}: no such directory. Name a run directory, a directory of heads, or a"
            " repository of heads on the hub (OWNER/NAME)."
        )
    try:
        # reject a draft that cannot be read before its gigabytes are downloaded
        config = read_mapping(fetch_heads(name, weights=False) / HEADS_CONFIG)
        is_read = _is_eagle3(config) or _is_dflash(config)
        kind = None if is_read else _other_kind(config)
        if kind is not None:
            raise CheckpointError(f"model {name!r}: {kind}. {_READABLE}")
        return fetch_heads(name)
    except FetchError as error:
        raise CheckpointError(
            f"model {name!r}: no such directory, and no repository of the hub: {error}"
        ) from None


def _resolve_fetched(
    name: str, directory: Path, target_model: str | None, tree: Path | None
) -> ModelPaths:
    """Return the paths of heads from the hub. Results go to runs/, not to the hub's cache."""
    if not find_heads(directory).layout:
        raise CheckpointError(
            f"model {name!r}: this repository holds no heads (ours, the public Medusa code's,"
            " vLLM's, or an EAGLE-3 draft); for a target model alone use --base-model, for a whole"
            f" run `hf download {name} --local-dir runs/NAME`"
        )
    paths = _resolve_heads(directory, target_model, tree)
    home = runs_directory() / "hub" / name.replace("/", "--")
    if tree is None:
        # the tree that --calibrate wrote here, or the repository's tree
        tree = _resolve_tree(None, home) or paths.tree
        paths = replace(paths, tree=tree)
    return replace(paths, home=home, hub_name=name)


def _resolve_run(run: Path, target_model: str | None, tree: Path | None) -> ModelPaths:
    """Return the paths of a run, from its config.yaml."""
    config = _read_config(run / CONFIG)
    name = target_model or config.get("base_model")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{run / 'config.yaml'}: names no base_model; give it with --base-model NAME"
        )
    # 1. Choose the target model for decoding: the one that the run trained, the one it was trained
    # on, or one that the user gives, into which the adapter may already be merged.
    is_other = _local_or_hub(name) != _local_or_hub(str(config.get("base_model")))
    is_merged = is_other and _holds_merged(_local_or_hub(name))
    quantization: Quantization | None = None
    if target_model is None and (run / MODEL / HEADS_CONFIG).is_file():
        name = str(run / MODEL)  # a joint run without an adapter trained the target model itself
    elif not is_merged:
        # Heads for a quantized target model were trained on the quantized model's hidden states.
        if config.get("load_in_4bit"):
            quantization = "nf4"
        elif config.get("load_in_8bit"):
            quantization = "int8"
    adapter = None
    if not is_merged and (run / ADAPTER / ADAPTER_CONFIG).is_file():
        adapter = run / ADAPTER
    # 2. Read the settings of the chat template.
    template = config.get("chat_template")
    template_kwargs = config.get("chat_template_kwargs")
    special_tokens = config.get("special_tokens")
    return ModelPaths(
        home=run,
        target_model=_local_or_hub(name),
        heads=run / HEADS,
        tree=_resolve_tree(tree, run),
        chat_template=template if isinstance(template, str) else None,
        adapter=adapter,
        quantization=quantization,
        asks_for_remote_code=target_model is None and config.get("trust_remote_code") is True,
        chat_template_kwargs=template_kwargs if isinstance(template_kwargs, dict) else {},
        special_tokens=special_tokens if isinstance(special_tokens, dict) else {},
    )


def _resolve_heads(heads: Path, target_model: str | None, tree: Path | None) -> ModelPaths:
    name = target_model or named_target_model(_read_config(heads / HEADS_CONFIG))
    if target_model is None and find_heads(heads).layout == "model":
        name = str(heads)  # a Medusa-2 full model holds its target model
    if name is None:
        raise CheckpointError(
            f"{heads}: its config.json names no target model; give it by base_model=NAME"
        )
    return ModelPaths(heads, _local_or_hub(name), heads, _resolve_tree(tree, heads), None)


def named_target_model(config: Mapping[str, Any]) -> str | None:
    """Return the target model in a config.json of heads; speculators calls it the verifier."""
    name = config.get("base_model_name_or_path")
    speculators = config.get("speculators_config")
    if not name and isinstance(speculators, dict):
        verifier = speculators.get("verifier")
        if isinstance(verifier, dict):
            name = verifier.get("name_or_path")
    return name if isinstance(name, str) and name else None


def names_no_target_model(model: str) -> bool:
    """Return whether `model` is a directory of heads whose config.json has no
    `base_model_name_or_path`, like many published heads. speculators' verifier does not count,
    because it may be a path on its author's machine.
    """
    path = resolve_path(model)
    if path is None or find_heads(path).layout in (None, "model"):
        return False
    return not read_mapping(path / HEADS_CONFIG).get("base_model_name_or_path")


def _local_or_hub(name: str) -> str:
    """Return the path of a local model, or the name unchanged."""
    return str(resolve_path(name) or name)


def _resolve_tree(tree: Path | None, home: Path) -> Path | None:
    """Return the given tree file, or else tree.json in `home` if it exists."""
    if tree is None:
        return home / TREE if (home / TREE).is_file() else None
    path = resolve_path(tree)
    if path is None:
        raise CheckpointError(
            f"tree {str(tree)!r}: no such file, nor {FIXED}, {NO_TREE}, dynamic,"
            " dynamic:NODESxDEPTH"
        )
    return path


def _shards_with_heads(directory: Path) -> Iterator[Path]:
    """Yield the weight files of a full model that contain heads; a file may be repeated."""
    for name in MODEL_FILES:
        index = read_mapping(directory / f"{name}.index.json").get("weight_map")
        if index and isinstance(index, dict):
            for key, file in index.items():
                if key.startswith(PREFIXES) and isinstance(file, str):
                    yield directory / file
            return
        path = directory / name
        if path.is_file():
            if path.suffix == ".safetensors":
                has_heads = any(key.startswith(PREFIXES) for key in safetensors_names(path))
            else:
                # pickle files are not opened here, so decide by config.json
                has_heads = "medusa_num_heads" in read_mapping(directory / HEADS_CONFIG)
            if has_heads:
                yield path
            return


def safetensors_names(path: Path) -> list[str]:
    """Read the tensor names from the header of a safetensors file; empty if it is damaged."""
    try:
        with safe_open(str(path), framework="numpy") as file:  # imports no torch
            return list(file.keys())
    except (OSError, SafetensorError):
        return []


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON mapping; empty if the file is missing or does not contain one."""
    try:
        return _read_config(path)
    except CheckpointError:
        return {}


def _read_config(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON mapping; empty if there is no file.

    Raises CheckpointError if the file cannot be read or does not contain a mapping.
    """
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = parse_json(text)
        else:
            content = yaml.safe_load(text)
    except RecursionError:
        raise CheckpointError(f"{path}: cannot be read (nested too deeply)") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a mapping of keys")
    return content
