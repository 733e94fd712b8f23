"""Load a model at resolved paths: a base model with its draft heads and its tree, ready to decode."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from medusa_train.checkpoint.heads import load_draft
from medusa_train.checkpoint.resolve import FIXED, NO_TREE, ModelPaths
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.config.paths import resolve_path, user_cache_dir
from medusa_train.data.datastore import read_datastore
from medusa_train.errors import CheckpointError, MedusaError, TargetModelError
from medusa_train.hub import hub_is_unreachable
from medusa_train.inference.cuda_graphs import use_cuda_graphs
from medusa_train.models.drafts.base import Draft, Limits, Proposer
from medusa_train.models.drafts.combined import MergedDraft
from medusa_train.models.drafts.lookahead import LookaheadDraft
from medusa_train.models.drafts.lookup import LookupDraft, PromptLookupDraft, RestDraft
from medusa_train.models.loading import (
    UNREADABLE,
    auto_dtype_that_fits,
    describe_unreadable,
    load_target_model,
    load_tokenizer,
    resolve_target_model,
)
from medusa_train.models.lora import Adapter
from medusa_train.models.precision import choose_kernels, default_device
from medusa_train.models.prepack import prepack_linears
from medusa_train.models.stop_tokens import StopTokens, chat_encoder_or_none, find_stop_tokens
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class LoadedModel:
    """A base model with its draft heads and tree; both are None without heads, and the tree where
    they are only traced.

    Attributes:
        lookup: a draft without training, alone or next to the heads.
        dynamic: the size of trees that the draft chooses in every step in place of `tree`; None:
            `tree` is used.
    """

    target_model: TargetModel
    draft: Draft | None
    tree: Tree | None
    lookup: LookupDraft | None = None
    dynamic: Limits | None = None

    @cached_property
    def proposer(self) -> Proposer | None:
        """What to decode with: heads, a draft without training, or both merged; None for plain
        decoding.
        """
        return self._with_lookup(self.heads)

    @cached_property
    def heads(self) -> Proposer | None:
        """The trained part of `proposer`: heads, with dynamic trees if there are any.

        None with an empty tree: it drafts nothing, so decoding is plain.
        """
        if self.dynamic is None:
            if self.tree is None or self.tree.size == 0:
                return None
            return self.draft
        assert self.draft is not None  # `resolve_model` rejects kinds without dynamic trees
        return self.draft.with_dynamic_trees(self.dynamic)

    @cached_property
    def fixed_proposer(self) -> Proposer | None:
        """The same with the fixed `tree`."""
        return self._with_lookup(self.draft)

    @property
    def usual_nodes(self) -> int | None:
        """Nodes of the tree that most steps verify; None without one.

        Dynamic trees and lookups alone have many sizes, a draft that stops early has smaller trees,
        and lookahead adds a window to every tree. A lookup next to heads often adds nothing.
        """
        if self.draft is None or self.tree is None or self.tree.size == 0:
            return None
        if self.dynamic is not None or self.draft.threshold > 0:
            return None
        if isinstance(self.lookup, LookaheadDraft):
            return None
        return self.tree.size

    @property
    def can_compile_tree(self) -> bool:
        """Whether `compile_tree` compiles anything."""
        nodes = self.usual_nodes
        return nodes is not None and self.target_model.can_compile_tree(nodes)

    def compile_tree(self, report: Callable[[str], None]) -> None:
        """Compile passes over trees of the size that most steps verify, where passes are compiled; a
        failure is reported, and the program for all sizes serves this one too.
        """
        nodes = self.usual_nodes
        if nodes is None:
            return
        try:
            self.target_model.compile_tree(nodes)
        except TargetModelError as error:
            report(f"{error}\ndecoding with the program for trees of any size")

    def _with_lookup(self, heads: Proposer | None) -> Proposer | None:
        if heads is None or self.lookup is None:
            return self.lookup if heads is None else heads
        return MergedDraft(heads, self.lookup)


def load_for_decoding(
    paths: ModelPaths,
    dtype: str | torch.dtype,
    *,
    prepack: bool = True,
    compiled: bool = False,
    rows: int = 1,
) -> LoadedModel:
    """Load the base model and, where there are any, heads and tree, ready to decode.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        prepack: on a CPU, prepack weights for oneDNN and choose the attention implementation, where
            that is measured to be faster. Floating-point sums are then rounded in another order.
        compiled: compile the decoding passes of `rows` rows, see `compile_target_model`.
    """
    # 1. The base model.
    choose_kernels(default_device())
    target_model = load_trained_target_model(paths, dtype)
    if paths.adapter is not None:
        target_model = target_model.to_dtype(dtype)
    if prepack:
        prepack_linears(target_model.model)
    # a graph fills the whole tree: its host would wait at every level to stop early
    if paths.threshold is None:
        use_cuda_graphs(target_model)
    # 2. The heads.
    draft = None
    if paths.heads is not None:
        draft = load_draft(paths.heads, target_model, target_model.dtype)
        target_model.decoding_aux_layers = draft.aux_layers
        if paths.threshold is not None:
            draft.threshold = paths.threshold
        if prepack:
            prepack_linears(draft)
    if compiled:
        compile_target_model(target_model, paths, rows=rows, trees=paths.has_draft)
    # 3. The draft without training, and the tree.
    lookup = None
    if paths.lookup is not None:
        lookup = load_lookup(paths.lookup, target_model.tokenizer)
    if draft is None or paths.tree_mode == NO_TREE:
        return LoadedModel(target_model, draft, None, lookup)
    tree = load_tree(paths, draft.num_heads)
    model = LoadedModel(target_model, draft, tree, lookup, dynamic_size(paths, tree))
    # raises for what does not go together
    assert model.proposer is not None or not tree.size
    return model


def load_lookup(choice: LookupChoice, tokenizer: Any) -> LookupDraft:
    """Create a draft without training; REST's datastore is read, tokenized and sorted."""
    if choice.kind == "lookahead":
        return LookaheadDraft(**choice.settings)
    if choice.datastore is None:
        return PromptLookupDraft(**choice.settings)
    settings = {name: value for name, value in choice.settings.items() if name != "datastore"}
    path = resolve_path(choice.datastore) or Path(choice.datastore)
    order = settings["max_ngram"] + settings["max_tokens"]
    return RestDraft(read_datastore(path, tokenizer, order), **settings)


def load_trained_target_model(
    paths: ModelPaths, dtype: str | torch.dtype, device: str | None = None
) -> TargetModel:
    """Load the base model as in training, quantized or not. An adapter is merged, which dequantizes.

    Raises TargetModelError.
    """
    target_model = load_target_model(
        paths.base_model,
        dtype=dtype,
        device=device,
        quantization=paths.quantization,
        trust_remote_code=paths.trust_remote_code,
        special_tokens=paths.special_tokens,
    )
    target_model.end_answers_by(paths.chat_template, paths.chat_template_kwargs)
    if paths.adapter is not None:
        Adapter.load(target_model, paths.adapter).merge()
    return target_model


def auto_dtype_of(paths: ModelPaths, report: Callable[[str], None]) -> str:
    """Return the dtype that `auto` means in decoding, see `auto_dtype_that_fits`; nothing is
    loaded or timed.
    """
    return auto_dtype_that_fits(
        paths.base_model,
        report,
        quantization=None
        if paths.adapter is not None
        else paths.quantization,  # merging dequantizes
        trust_remote_code=paths.trust_remote_code,
    )


def read_stop_tokens(paths: ModelPaths) -> tuple[StopTokens, Any]:
    """Return at which tokens a model's answers end, and its tokenizer, without loading weights.

    Raises:
        TargetModelError: its files cannot be read.
        ConfigError: its chat template cannot be read, or a special token does not exist.
    """
    source, config = resolve_target_model(
        paths.base_model, trust_remote_code=paths.trust_remote_code
    )
    tokenizer = load_tokenizer(
        source, trust_remote_code=paths.trust_remote_code, special_tokens=paths.special_tokens
    )
    generation_config = read_generation_config(source, config, paths.base_model)
    chat = chat_encoder_or_none(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    vocab_size = config.get_text_config().vocab_size
    return find_stop_tokens(generation_config, tokenizer, vocab_size, chat), tokenizer


def read_generation_config(source: Any, config: Any, name: str) -> GenerationConfig:
    """Read the generation config of the model called `name` from its files at `source`; TargetModelError
    if it cannot be read.
    """
    try:
        return GenerationConfig.from_pretrained(source, local_files_only=hub_is_unreachable())
    except OSError:  # no such file: transformers takes it from config.json then
        return GenerationConfig.from_model_config(config)
    except UNREADABLE as error:
        raise TargetModelError(
            f"base_model {name}: cannot read generation_config.json: {describe_unreadable(error)}"
        ) from error


def added_stop_tokens(paths: ModelPaths) -> tuple[int, ...]:
    """Return the tokens that end answers in addition to those of the generation config; none where the
    model's files cannot be read, which whoever loads it reports.
    """
    try:
        return read_stop_tokens(paths)[0].added
    except MedusaError:
        return ()


def load_tree(paths: ModelPaths, num_heads: int) -> Tree:
    """Load the tree to decode with; without a file the chain of the heads' most probable tokens."""
    if paths.tree is None:
        return Tree.chain(num_heads)
    tree = Tree.load(paths.tree)
    if tree.max_depth > num_heads:
        raise CheckpointError(
            f"{paths.tree}: the tree is {tree.max_depth} deep, but there are only {num_heads} heads"
        )
    return tree


def dynamic_size(paths: ModelPaths, tree: Tree) -> Limits | None:
    """Return the size of dynamic trees, by default that of the fixed `tree`; None for the fixed
    tree.
    """
    if paths.tree_mode == FIXED:
        return None
    size = paths.tree_mode.partition(":")[2]
    nodes, depth = map(int, size.split("x")) if size else (tree.size, tree.max_depth)
    return Limits(nodes, depth)


def compile_target_model(
    target_model: TargetModel, paths: ModelPaths, *, rows: int = 1, trees: bool = True
) -> None:
    """Compile the decoding passes, which takes up to a minute; see `compile_cache_dir`.

    Raises:
        TargetModelError: they cannot be compiled, or their programs cannot be written.
    """
    directory = compile_cache_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TargetModelError(
            f"compile: {directory} cannot be created ({error.strerror or error}); set"
            " TORCHINDUCTOR_CACHE_DIR to a directory of your own"
        ) from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    target_model.compile_passes(rows, trees=trees)


def compile_cache_dir() -> Path:
    """Return the folder of torch.compile's programs: TORCHINDUCTOR_CACHE_DIR if the user set it,
    else one in the user's cache directory.

    Programs are loaded and run, so they are never in a run, which may be somebody else's.
    torch finds them by their source and settings, so models share the folder.
    """
    value = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if value:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if value != default_cache_dir():  # torch sets its default there on first use
            return Path(value)
    return user_cache_dir() / "compiled"


def compile_or_report(
    target_model: TargetModel,
    paths: ModelPaths,
    report: Callable[[str], None],
    *,
    rows: int = 1,
    trees: bool = True,
) -> None:
    """Compile the decoding passes, see `compile_target_model`; a failure is reported, and decoding goes
    on without.
    """
    try:
        compile_target_model(target_model, paths, rows=rows, trees=trees)
    except TargetModelError as error:
        report(f"{error}\ndecoding without compiled passes")
