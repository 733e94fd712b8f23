"""Fit the tree to how a model decodes (`--calibrate`), and report a tree.json that does not fit."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from medusa_train.checkpoint.load_model import LoadedModel, auto_dtype_of, load_for_decoding
from medusa_train.checkpoint.resolve import ModelPaths, names_tree_file
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.paths import expand_user
from medusa_train.config.schema import EvalConfig
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.questions import Benchmark
from medusa_train.evaluation.target_model_quality import run_config, validation_conversations
from medusa_train.inference.decoding_settings import DecodingSettings
from medusa_train.pages.page import Table, number
from medusa_train.progress import RunProgress
from medusa_train.tree_search.choose_tree import (
    MIN_CONVERSATIONS,
    TreeChoice,
    answer_prompts,
    choose_tree,
)
from medusa_train.tree_search.traces import Prompts, prompts_by_conversation


def load_with_progress(
    paths: ModelPaths, dtype: str, progress: RunProgress, *, compiled: bool = False, rows: int = 1
) -> LoadedModel:
    """Load target model, heads and tree for decoding `rows` rows in `dtype`. Print a message if
    there is no tree.json or its tree is empty.
    """
    what = "loading and compiling" if compiled else "loading"
    with progress.phase(f"{what} in {dtype}", ticking=True):
        model = load_for_decoding(paths, dtype, compiled=compiled, rows=rows)
    if model.tree is not None and paths.tree is None:
        again = shlex.join(["medusa-eval", "--calibrate", *paths.arguments])
        progress.print(
            "no tree.json next to the heads: using the chain of top-1 guesses, which is rarely the"
            f" best tree. To fit one: {again}",
            style="yellow",
        )
    if model.draft is not None and model.tree is not None and not model.tree.size:
        progress.print(f"{paths.tree}: the tree is empty, so the heads draft nothing")
    return model


def calibrate(
    cfg: EvalConfig, benchmark: Benchmark, paths: ModelPaths, progress: RunProgress
) -> list[Path]:
    """Choose the tree with the most expected tokens per second on this machine, and save it; return
    the paths of the files.

    Raises:
        CheckpointError: there are no heads, or another process trains, evaluates or calibrates into
            the same directory.
    """
    if paths.heads is None:
        raise CheckpointError("--calibrate chooses a tree for heads; name them with --model")
    directory = expand_user(cfg.output_dir) if cfg.output_dir else paths.home
    # two calibrations would slow down each other's timing, and overwrite each other's tree
    with only_writer(directory):
        # 1. load the model as for a benchmark, but compile it only if the user asks for it
        dtype: str = cfg.dtype
        if dtype == "auto":
            dtype = auto_dtype_of(paths, progress.print)
        if not cfg.compile and is_compiled(cfg, paths):
            progress.print(
                f"{paths.tree} was fitted to compiled steps: calibrating uncompiled; compile=true"
                " fits to compiled steps"
            )
        model = load_with_progress(paths, dtype, progress, compiled=cfg.compile)
        target_model, draft = model.target_model, model.draft
        assert draft is not None
        ends = target_model.stop_tokens.describe(target_model.tokenizer)
        if ends is not None:
            progress.print(ends)

        # 2. the prompts: from the run, else from the benchmark
        chat = ChatEncoder(target_model.tokenizer, paths.chat_template, paths.chat_template_kwargs)
        prompts, source = _prompts(cfg, benchmark, paths, chat)

        # 3. answer them, and choose the tree
        budget = cfg.calibration_tokens
        progress.print(f"calibrating on {budget:,} greedy tokens, {source}")
        traced = answer_prompts(target_model, draft, prompts, budget, progress, cfg.max_new_tokens)
        choice = choose_tree(target_model, draft, traced, progress)
        progress.console.print(_sizes_table(choice))
        progress.print(f"chosen: {choice.describe()}")
        progress.console.print(progress.table())
        return [choice.save(directory, traced)]


def describe_misfit(cfg: EvalConfig, model: LoadedModel, paths: ModelPaths) -> str | None:
    """Return a message if tree.json was fitted with other settings than the model decodes with; it
    says how to fit the tree again. None if the tree fits, or if the user chose it.
    """
    if model.draft is None or paths.tree is None or names_tree_file(cfg.tree):
        return None
    settings = DecodingSettings.of(model.target_model)
    fitted = DecodingSettings.load(paths.tree)
    if fitted is None:
        return f"{paths.tree}: does not say for which dtype and device it was fitted"
    if cfg.batch_size > 1:
        fitted = replace(fitted, compiled=settings.compiled)  # trees are fitted to single rows
    differences = settings.differences(fitted)
    if not differences:
        return None
    words = ["medusa-eval", "--calibrate", *paths.arguments, f"dtype={settings.dtype}"]
    if settings.compiled:
        words.append("compile=true")
    return (
        f"{paths.tree} was fitted with other settings ({', '.join(differences)}); another tree may"
        f" be faster here: {shlex.join(words)}"
    )


def is_compiled(cfg: EvalConfig, paths: ModelPaths) -> bool:
    """Return whether a benchmark decodes with compiled steps: as the user says, and by default if
    the tree was fitted to compiled steps.
    """
    if "compile" in cfg.model_fields_set or paths.tree is None:
        return cfg.compile
    fitted = DecodingSettings.load(paths.tree)
    return fitted is not None and fitted.compiled


def _prompts(
    cfg: EvalConfig, benchmark: Benchmark, paths: ModelPaths, chat: ChatEncoder
) -> tuple[list[Prompts], str]:
    """Return the prompts to fit a tree to, grouped by conversation, and a description of them.

    They are the prompts of the run's validation split in random order, or of its training split if
    too few conversations are held out. If the run's data are not available or contain too few
    prompts, they are the benchmark's questions.
    """
    run = run_config(paths)
    data = None if run is None else validation_conversations(run, chat, MIN_CONVERSATIONS)
    if data is not None:
        dataset, is_held_out, held_out_count = data
        if len({example.prompt for example in dataset}) >= MIN_CONVERSATIONS:
            source = "validation prompts of the run"
            if not is_held_out:
                source = f"training prompts of the run, which holds {held_out_count or 'none'} out"
            return prompts_by_conversation(dataset, cfg.calibration_tokens, cfg.seed), source
    source = (
        f"questions of bench {benchmark.name}, since the run's data are not available, or too few:"
        " evaluate on another benchmark"
    )
    return [[chat.prompt(one.opening, one.variables)] for one in benchmark.questions], source


def _sizes_table(choice: TreeChoice) -> Table:
    rows = [
        {
            "nodes": str(size["nodes"]),
            "tokens per step": number(size["tokens_per_step"], 3),
            "ms per step": number(size["step_ms"]),
            "tokens /s": number(size["tokens_per_s"], 1),
        }
        for size in choice.record()["sizes"]
    ]
    return Table.of_rows(rows)
