"""Load a model at resolved paths: a target model with its draft heads and its tree, ready to
decode.
"""

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
from medusa_train.models.drafts.base import Draft, Proposer, TreeSize
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
    """A target model with its draft heads and tree.

    Attributes:
        draft: the heads; None if there are none.
        tree: the tree; None without heads, or if the heads are only traced.
        lookup: a draft that needs no training, alone or in addition to the heads.
        dynamic: size limits of dynamic trees, which the draft chooses in every step; None: use
            `tree`.
    """

    target_model: TargetModel
    draft: Draft | None
    tree: Tree | None
    lookup: LookupDraft | None = None
    dynamic: TreeSize | None = None

    @cached_property
    def proposer(self) -> Proposer | None:
        """The proposer for decoding: heads, a draft that needs no training, or both merged; None
        for plain decoding.
        """
        return self._with_lookup(self.heads)

    @cached_property
    def heads(self) -> Proposer | None:
        """The trained part of `proposer`: the heads, with dynamic trees if `dynamic` is set.

        None if the tree is empty: then nothing is drafted, and decoding is plain.
        """
        if self.dynamic is None:
            if self.tree is None or self.tree.size == 0:
                return None
            return self.draft
        assert self.draft is not None  # `resolve_model` rejects kinds without dynamic trees
        return self.draft.with_dynamic_trees(self.dynamic)

    @cached_property
    def fixed_proposer(self) -> Proposer | None:
        """Like `proposer`, but always with the fixed `tree`."""
        return self._with_lookup(self.draft)

    @property
    def usual_nodes(self) -> int | None:
        """Number of nodes of the tree that most steps verify; None without a tree, or if trees
        differ in size.

        They differ with dynamic trees, with a lookup alone, with a draft that stops early, and with
        lookahead, which adds a window to every tree. A lookup next to heads often adds no node.
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
        """If decoding passes are compiled, compile one for the tree size that most steps verify. A
        failure is reported; the program for trees of any size is then used.
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
    """Load the target model, and heads and tree if there are any, ready to decode.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        prepack: on a CPU, prepack weights for oneDNN and choose the attention implementation if a
            measurement shows that it is faster. This changes the rounding of floating-point sums.
        compiled: compile the decoding passes for `rows` rows, see `compile_target_model`.
    """
    # 1. Load the target model.
    choose_kernels(default_device())
    target_model = load_trained_target_model(paths, dtype)
    if paths.adapter is not None:
        target_model = target_model.to_dtype(dtype)
    if prepack:
        prepack_linears(target_model.model)
    # A CUDA graph always fills the whole tree. To stop early, the host would have to wait for the
    # GPU after every level.
    if paths.threshold is None:
        use_cuda_graphs(target_model)
    # 2. Load the heads.
    draft = None
    if paths.heads is not None:
        draft = load_draft(paths.heads, target_model, target_model.dtype)
        target_model.decoding_aux_layers = draft.aux_layers
        if paths.threshold is not None:
            draft.threshold = paths.threshold
        if prepack:
            prepack_linears(draft)
    if compiled:
        compile_target_model(target_model, rows=rows, trees=paths.has_draft)
    # 3. Load the draft that needs no training, and the tree.
    lookup = None
    if paths.lookup is not None:
        lookup = load_lookup(paths.lookup, target_model.tokenizer)
    if draft is None or paths.tree_mode == NO_TREE:
        return LoadedModel(target_model, draft, None, lookup)
    tree = load_tree(paths, draft.max_depth)
    model = LoadedModel(target_model, draft, tree, lookup, dynamic_size(paths, tree))
    # evaluating `proposer` raises an error if the parts do not fit together
    assert model.proposer is not None or not tree.size
    return model


def load_lookup(choice: LookupChoice, tokenizer: Any) -> LookupDraft:
    """Create a draft that needs no training. For REST, read, tokenize and sort its datastore."""
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
    """Load the target model as in training, quantized or not. An adapter is merged, which
    dequantizes the weights.

    Raises TargetModelError.
    """
    target_model = load_target_model(
        paths.target_model,
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
    """Return the dtype that `auto` selects for decoding, see `auto_dtype_that_fits`; nothing is
    loaded or timed.
    """
    return auto_dtype_that_fits(
        paths.target_model,
        report,
        quantization=None
        if paths.adapter is not None
        else paths.quantization,  # merging dequantizes
        trust_remote_code=paths.trust_remote_code,
    )


def read_stop_tokens(paths: ModelPaths) -> tuple[StopTokens, Any]:
    """Return the stop tokens of a model's answers, and its tokenizer, without loading weights.

    Raises:
        TargetModelError: the model's files cannot be read.
        ConfigError: its chat template cannot be read, or a special token does not exist.
    """
    source, config = resolve_target_model(
        paths.target_model, trust_remote_code=paths.trust_remote_code
    )
    tokenizer = load_tokenizer(
        source, trust_remote_code=paths.trust_remote_code, special_tokens=paths.special_tokens
    )
    generation_config = read_generation_config(source, config, paths.target_model)
    chat = chat_encoder_or_none(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    vocab_size = config.get_text_config().vocab_size
    return find_stop_tokens(generation_config, tokenizer, vocab_size, chat), tokenizer


def read_generation_config(source: Any, config: Any, name: str) -> GenerationConfig:
    """Read the generation config of the model `name` from its files in `source`; TargetModelError
    if it cannot be read.
    """
    try:
        return GenerationConfig.from_pretrained(source, local_files_only=hub_is_unreachable())
    except OSError:  # the file does not exist; like transformers, use config.json
        return GenerationConfig.from_model_config(config)
    except UNREADABLE as error:
        raise TargetModelError(
            f"base_model {name}: cannot read generation_config.json: {describe_unreadable(error)}"
        ) from error


def added_stop_tokens(paths: ModelPaths) -> tuple[int, ...]:
    """Return the stop tokens that are not in the generation config. Empty if the model's files
    cannot be read; loading the model reports that error.
    """
    try:
        return read_stop_tokens(paths)[0].added
    except MedusaError:
        return ()


def load_tree(paths: ModelPaths, max_depth: int) -> Tree:
    """Load the tree for decoding; without a file, return the chain of the heads' top-1 tokens."""
    if paths.tree is None:
        return Tree.chain(max_depth)
    tree = Tree.load(paths.tree)
    if tree.max_depth > max_depth:
        raise CheckpointError(
            f"{paths.tree}: the tree is {tree.max_depth} deep, but there are only {max_depth} heads"
        )
    return tree


def dynamic_size(paths: ModelPaths, tree: Tree) -> TreeSize | None:
    """Return the size of dynamic trees (by default the size of the fixed `tree`); None if trees are
    not dynamic.
    """
    if paths.tree_mode == FIXED:
        return None
    size = paths.tree_mode.partition(":")[2]
    nodes, depth = map(int, size.split("x")) if size else (tree.size, tree.max_depth)
    return TreeSize(nodes, depth)


def compile_target_model(target_model: TargetModel, *, rows: int = 1, trees: bool = True) -> None:
    """Compile the decoding passes, which takes up to a minute; see `compile_cache_dir`.

    Raises:
        TargetModelError: the passes cannot be compiled, or the programs cannot be written.
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
    otherwise a folder in the user's cache directory.

    Programs are loaded and executed. So they are never stored in a run directory, which may come
    from somebody else. torch finds them by their source and settings, so all models share the
    folder.
    """
    value = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if value:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if value != default_cache_dir():  # torch sets the variable to its default on first use
            return Path(value)
    return user_cache_dir() / "compiled"


def compile_or_report(
    target_model: TargetModel,
    report: Callable[[str], None],
    *,
    rows: int = 1,
    trees: bool = True,
) -> None:
    """Compile the decoding passes, see `compile_target_model`. A failure is reported; decoding then
    works without compiled passes.
    """
    try:
        compile_target_model(target_model, rows=rows, trees=trees)
    except TargetModelError as error:
        report(f"{error}\ndecoding without compiled passes")
