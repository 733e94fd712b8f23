"""Fit the tree to how a model decodes: by `--calibrate`, or where tree.json was fitted with other
settings.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from medusa_train.checkpoint.load_model import LoadedModel, dynamic_size, load_for_decoding
from medusa_train.checkpoint.resolve import ModelPaths, names_tree_file
from medusa_train.checkpoint.run_directory import TREE, TREE_TRACES, only_writer
from medusa_train.choose_decoding import Decisions, decide_dtype
from medusa_train.config.paths import expand_user
from medusa_train.config.schema import EvalConfig
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError, MedusaError
from medusa_train.evaluation.backbone_quality import run_config, validation_conversations
from medusa_train.evaluation.questions import Bench
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.pages.page import Table, number
from medusa_train.progress import RunProgress
from medusa_train.tree_search.choose_tree import (
    MIN_CONVERSATIONS,
    TreeChoice,
    answer_prompts,
    choose_tree,
    timing_budget,
)
from medusa_train.tree_search.kept_traces import load_traces, weights_key
from medusa_train.tree_search.traces import Prompts, prompts_by_conversation

LEAST_TOKENS = 2000  # to fit a tree to


def load_with_progress(
    paths: ModelPaths, dtype: str, progress: RunProgress, *, compiled: bool = False, rows: int = 1
) -> LoadedModel:
    """Load backbone, heads and tree for decoding `rows` rows in `dtype`; says so where there is no
    tree.json.
    """
    what = "loading and compiling" if compiled else "loading"
    with progress.phase(f"{what} in {dtype}", ticking=True):
        model = load_for_decoding(paths, dtype, compiled=compiled, rows=rows)
    if model.tree is not None and paths.tree is None:
        again = shlex.join(["medusa-eval", "--calibrate", *paths.arguments])
        progress.print(
            "no tree.json beside the heads: using the chain of top-1 guesses, which is rarely the"
            f" best tree. To fit one: {again}",
            style="yellow",
        )
    if model.draft is not None and model.tree is not None and not model.tree.size:
        progress.print(f"{paths.tree}: the tree is empty, so the heads draft nothing")
    return model


def calibrate(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths, progress: RunProgress
) -> list[Path]:
    """Choose the tree with the most expected tokens per second on this machine; returns the paths
    of the files.

    Raises:
        CheckpointError: there are no heads, or another process trains, evaluates or calibrates into
            the same directory.
    """
    if paths.heads is None:
        raise CheckpointError("--calibrate chooses a tree for heads; name them with --model")
    # two would time each other, and replace each other's tree
    with only_writer(_results_of(cfg, paths)):
        return _calibrate(cfg, bench, paths, progress)


def _calibrate(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths, progress: RunProgress
) -> list[Path]:
    # 1. load the model as benches decode it, but uncompiled unless asked for
    dtype: str = cfg.dtype
    if dtype == "auto":
        question = bench.questions[0].turns[0]
        dtype = decide_dtype(question, paths, decisions_of(cfg, paths), progress)
    if cfg.compile is not True and chooses_compilation(cfg, paths):
        reason = f"{paths.tree} was fitted to compiled steps"
        if cfg.compile == "auto":
            reason = "compile: auto is for benches"
        progress.print(f"{reason}: calibrating uncompiled; compile=true fits to compiled steps")
    model = load_with_progress(paths, dtype, progress, compiled=cfg.compile is True)
    assert model.draft is not None
    ends = model.backbone.stop_tokens.describe(model.backbone.tokenizer)
    if ends is not None:
        progress.print(ends)

    # 2. prompts of the run, else those of the bench
    chat = ChatEncoder(model.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    budget = cfg.calibration_tokens
    found = validation_prompts(paths, chat, cfg.seed, budget)
    if found is not None:
        conversations, source = found
    else:
        conversations = [[chat.prompt(question.opening)] for question in bench.questions]
        source = (
            f"questions of bench {bench.name}, since the run's data are not available, or too few:"
            " evaluate on another bench"
        )

    # 3. answer them, and choose
    progress.print(f"calibrating on {budget:,} greedy tokens, {source}")
    traced = answer_prompts(
        model.backbone, model.draft, conversations, budget, progress, cfg.max_new_tokens
    )
    choice = choose_tree(model.backbone, model.draft, traced, progress)
    progress.console.print(_sizes_table(choice).terminal())
    progress.print(f"chosen: {choice.describe()}")
    progress.console.print(progress.table())
    return [choice.save(_results_of(cfg, paths), traced, paths)]


def refit_tree(
    cfg: EvalConfig, model: LoadedModel, paths: ModelPaths, bench_tokens: int, progress: RunProgress
) -> tuple[LoadedModel, ModelPaths] | None:
    """Choose the tree again if tree.json was fitted with other settings.

    What the heads guess hardly depends on dtype, device and compilation: only steps are timed again
    where the traces were kept. With other weights (merged, or another quantization) the backbone
    answers again.

    A tree that the user named, or whose settings are unknown, is used as it is. So is any tree if
    the run's data are gone: a tree fitted to the questions of the bench would be measured on what
    it was fitted to.

    Returns:
        The model with the new tree, and the paths with its file; None if the tree stays.
    """
    if model.draft is None or paths.tree is None:
        return None
    # 1. does the tree fit these settings?
    settings = DecodingSettings.of(model.backbone)
    fitted = DecodingSettings.load(paths.tree)
    if fitted is None:
        progress.print(
            f"{paths.tree}: does not say for which dtype and device it was fitted; using it as"
            " it is"
        )
        return None
    if not settings.compiled and (cfg.batch_size > 1 or chooses_compilation(cfg, paths)):
        # passes of batches are compiled, or none are only this time
        fitted = replace(fitted, compiled=False)
    differences = settings.differences(fitted)
    if not differences:
        return None
    reason = f"{paths.tree} was fitted with other settings ({', '.join(differences)})"
    if names_tree_file(cfg.tree):
        progress.print(f"{reason}; using it as named by tree")
        return None

    # 2. choose it again: from kept traces if the weights are the same, else from new answers
    kept = load_traces(paths.tree.parent / TREE_TRACES, weights_key(paths, settings))
    try:
        if kept is not None:
            traced = kept
            progress.print(
                f"{reason}: choosing it again from the {kept.tokens:,} kept tokens, timing steps"
                " only"
            )
        else:
            chat = ChatEncoder(
                model.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs
            )
            budget = refit_tokens(cfg, bench_tokens)
            found = validation_prompts(paths, chat, cfg.seed, budget)
            if found is None:
                progress.print(
                    f"{reason}; using it as it is, since the run's data to fit it again are not"
                    " available, or too few"
                )
                return None
            conversations, source = found
            progress.print(f"{reason}: fitting it again")
            progress.print(f"calibrating on {budget:,} greedy tokens, {source}")
            traced = answer_prompts(
                model.backbone, model.draft, conversations, budget, progress, cfg.max_new_tokens
            )
        choice = choose_tree(
            model.backbone,
            model.draft,
            traced,
            progress,
            quick=kept is not None,
            seconds=timing_budget(progress.total_seconds),
        )
    except MedusaError as error:
        progress.print(f"using the tree as it is: {error}")
        return None

    # 3. save it, and decode with it
    progress.print(f"chosen: {choice.describe()}")
    paths = replace(paths, tree=choice.save(_results_of(cfg, paths), traced, paths))
    tree = choice.best.tree
    return replace(model, tree=tree, dynamic=dynamic_size(paths, tree)), paths


def _results_of(cfg: EvalConfig, paths: ModelPaths) -> Path:
    return expand_user(cfg.output_dir) if cfg.output_dir else paths.home


def decisions_of(cfg: EvalConfig, paths: ModelPaths) -> Decisions:
    """Return what evaluations chose by timing for this model: in its directory, or in
    `output_dir`.
    """
    return Decisions(paths.home, _results_of(cfg, paths))


def resumed_tree(cfg: EvalConfig, paths: ModelPaths) -> ModelPaths:
    """Take the tree that an interrupted evaluation fitted to these heads and left in `output_dir`,
    if there is one.
    """
    tree = expand_user(cfg.output_dir or paths.home) / TREE
    if cfg.output_dir is None or paths.tree != paths.home / TREE or not tree.is_file():
        return paths
    if tree.stat().st_mtime < paths.tree.stat().st_mtime:  # the run's was chosen again since
        return paths
    settings = DecodingSettings.load(tree)
    if settings is None:
        return paths
    traces = load_traces(tree.with_name(TREE_TRACES), weights_key(paths, settings))
    if traces is None:  # it was fitted to other heads
        return paths
    return replace(paths, tree=tree)


def refit_tokens(cfg: EvalConfig, bench_tokens: int) -> int:
    """Return how many tokens to answer for a tree that a bench needs: by default at most half of
    the bench's own.
    """
    if "calibration_tokens" in cfg.model_fields_set:
        return cfg.calibration_tokens
    return min(cfg.calibration_tokens, max(LEAST_TOKENS, bench_tokens // 2))


def chooses_compilation(cfg: EvalConfig, paths: ModelPaths) -> bool:
    """Return whether to decide about compilation: for `auto`, and by default where the tree was
    fitted to it.
    """
    if "compile" in cfg.model_fields_set or paths.tree is None:
        return cfg.compile == "auto"
    fitted = DecodingSettings.load(paths.tree)
    return fitted is not None and fitted.compiled


def validation_prompts(
    paths: ModelPaths, chat: ChatEncoder, seed: int, token_budget: int
) -> tuple[list[Prompts], str] | None:
    """Return the prompts of the run's validation conversations, in random order, and their name.

    Where the run holds fewer out than a tree is fitted to, they are those of its training set; None
    where these are as few, or without data.
    """
    cfg = run_config(paths)
    if cfg is None:
        return None
    data = validation_conversations(cfg, chat, MIN_CONVERSATIONS)
    if data is None:
        return None
    dataset, is_held_out, held_out_count = data
    conversations = prompts_by_conversation(dataset, token_budget, seed)
    if len({example.prompt for example in dataset}) < MIN_CONVERSATIONS:
        return None
    source = "validation prompts of the run"
    if not is_held_out:
        source = f"training prompts of the run, which holds {held_out_count or 'none'} out"
    return conversations, source


def _sizes_table(choice: TreeChoice) -> Table:
    sizes = choice.record()["sizes"]
    columns = {
        "nodes": [str(one["nodes"]) for one in sizes],
        "tokens per step": [number(one["tokens_per_step"], 3) for one in sizes],
        "ms per step": [number(one["step_ms"]) for one in sizes],
        "tokens /s": [number(one["tokens_per_s"], 1) for one in sizes],
    }
    return Table.of_columns(columns)
