"""Describe what an evaluation ran, on which machine and with which settings: `meta` of report.json,
and the settings that a resumed run must share.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.load_model import LoadedModel, added_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, find_heads
from medusa_train.config.paths import public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES
from medusa_train.evaluation.questions import Benchmark
from medusa_train.evaluation.turns import GENERATE, PLAIN, Turn
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.io import installed_version
from medusa_train.models.drafts.lookup import RestDraft
from medusa_train.models.precision import device_name
from medusa_train.models.prepack import is_prepacked
from medusa_train.trees.tree import Tree

#: Baselines whose key in the report's meta is not the name of their decoder.
BASELINE_KEYS = {PLAIN: "baseline_tokens_per_s", GENERATE: "generate_tokens_per_s"}


def collect_metadata(
    cfg: EvalConfig,
    benchmark: Benchmark,
    model: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    baselines: Mapping[str, str],
    turns: Sequence[Turn],
    command: str,
) -> dict[str, Any]:
    """Return `meta` of report.json after the benchmark is timed, as plain JSON values. Output
    equality is not compared yet.

    Args:
        baselines: descriptions of the decoders that the tree is compared with, by name.
    """
    mode = DecodingMode.from_config(cfg)
    target_model = model.target_model
    runner = target_model.step_runner
    plain_equal_generate = exactness = None
    if mode.acceptance == "greedy":
        if GENERATE in baselines:
            answers = [turn.answers for turn in turns if not turn.skipped]
            plain_equal_generate = sum(one[PLAIN].tokens == one[GENERATE].tokens for one in answers)
        if model.proposer is not None:
            exactness = dict.fromkeys(EQUALITY_DTYPES, "not compared")
    return {
        "model": paths.name and public_name(paths.name),
        "base_model": public_name(paths.target_model),
        "bench": benchmark.name,
        "bench_file": public_name(str(benchmark.path)),
        "questions": len(benchmark.questions),
        "skipped_turns": sum(turn.skipped for turn in turns),
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template": paths.chat_template and public_name(paths.chat_template),
        "chat_template_kwargs": dict(paths.chat_template_kwargs) or None,
        "stop_tokens": list(target_model.eos_ids),
        "decoding": mode.as_json,
        "backbone": paths.target_model_form,
        "dtype": dtype,
        "packed": is_prepacked(target_model.model),
        "attention": target_model.attention,
        "compiled": target_model.compiled is not None,
        "cuda_graphs": getattr(runner, "works", runner is not None),
        **_describe_draft(model, paths),
        "baselines": {BASELINE_KEYS.get(name, name): baselines[name] for name in baselines},
        "plain_equal_generate": plain_equal_generate,
        "exactness": exactness,
        "device": device_name(target_model.device),
        "threads": torch.get_num_threads(),
        "medusa_train": installed_version("medusa-train"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _describe_draft(model: LoadedModel, paths: ModelPaths) -> dict[str, Any]:
    """Return a description of the draft and its tree."""
    draft, tree, dynamic = model.draft, model.tree, model.dynamic
    # a replayed CUDA graph always fills the whole tree, so there is no early stop
    fixed_shape = model.proposer is not None and model.proposer.fixed_shape
    is_replayed = model.target_model.step_runner is not None and fixed_shape
    datastore = weights = None
    if isinstance(model.lookup, RestDraft):
        datastore = model.lookup.datastore.describe()
    if paths.heads is not None:
        weights = digest_files(find_heads(paths.heads).files)[:16]
    nodes: int | str | None = None
    if dynamic is not None:
        nodes = "dynamic"
    elif tree is not None:
        nodes = tree.size
    return {
        "draft": None if paths.lookup is None else paths.lookup.describe(),
        "datastore": datastore,
        "heads": None if draft is None else draft.max_depth,
        "weights": weights,
        "early_stop": 0.0 if draft is None or is_replayed else draft.threshold,
        "tree_nodes": nodes,
        "tree_depth": None if tree is None or dynamic is not None else tree.max_depth,
        "dynamic_trees": None if dynamic is None else dynamic._asdict(),
        "tree_file": None if paths.tree is None else public_name(str(paths.tree)),
    }


def measurement_settings(
    cfg: EvalConfig, benchmark: Benchmark, paths: ModelPaths
) -> dict[str, Any]:
    """Return everything that the answers and their times depend on. An interrupted evaluation is
    resumed only if these settings are equal.
    """
    mode = DecodingMode.from_config(cfg)
    keys = {"max_new_tokens", "dtype", "compile", "generate", "prompt_lookup", "assistant_model"}
    draft = tree = None
    if paths.lookup is not None:
        draft = [paths.lookup.name, paths.lookup.settings]
    if paths.tree is not None:
        # an empty tree is not timed; older logs in which it was timed are discarded
        tree = Tree.load(paths.tree).paths or "empty"
    return {
        "format": 4,  # version of the log's line format
        **benchmark_settings(benchmark),
        **model_settings(paths),
        **cfg.model_dump(include=keys),
        "draft": draft,
        "tree": tree,
        "dynamic": paths.tree_mode,
        "threshold": paths.threshold,
        "backbone": paths.target_model_form,
        "chat_template_kwargs": dict(paths.chat_template_kwargs),
        "decoding": mode.as_json,
        "seed": None if mode.acceptance == "greedy" else mode.seed,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.node(),
    }


def benchmark_settings(benchmark: Benchmark) -> dict[str, Any]:
    """Return what identifies the questions of a benchmark, wherever its file is."""
    questions = [replace(question, source="") for question in benchmark.questions]
    digest = hashlib.sha256(repr(questions).encode()).hexdigest()
    return {"bench": benchmark.name, "questions": digest}


def model_settings(paths: ModelPaths) -> dict[str, Any]:
    """Return what identifies a model's weights, its chat template (by content, since it may be a
    file), and the tokens that end its answers.
    """
    weights = []
    for folder in (paths.heads, paths.adapter, Path(paths.target_model)):
        if folder is not None:
            for file in sorted([*folder.glob("*.pt"), *folder.glob("*.safetensors")]):
                status = file.stat()
                weights.append([file.name, status.st_size, status.st_mtime_ns])
    chat_template = paths.chat_template
    if chat_template:
        chat_template = get_template(chat_template)
    return {
        "model": paths.name,
        "base_model": paths.target_model,
        "chat_template": chat_template,
        "weights": weights,
        "special_tokens": dict(paths.special_tokens) or None,
        "stop_tokens": list(added_stop_tokens(paths)) or None,
    }
