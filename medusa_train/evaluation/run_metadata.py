"""Describe what an evaluation ran, on what and with what: `meta` of report.json, and the settings
of a resumed run.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.load_model import LoadedModel, added_stop_tokens
from medusa_train.checkpoint.resolve import FIXED, ModelPaths, find_heads
from medusa_train.config.paths import public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.timed_decoders import describe_baseline, reference_decoders
from medusa_train.evaluation.turns import GENERATE, PLAIN, TREE, Turn
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.io import installed_version
from medusa_train.models.drafts.lookup import RestDraft
from medusa_train.models.precision import device_name
from medusa_train.models.prepack import is_prepacked
from medusa_train.trees.tree import Tree


def collect_metadata(
    cfg: EvalConfig,
    bench: Bench,
    model: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    turns: Sequence[Turn],
    command: str,
) -> dict[str, Any]:
    """Return `meta` of report.json after the timed pass: plain JSON values.

    Output equality is still open.
    """
    mode = DecodingMode.from_config(cfg)
    return {
        "model": _public_name(paths.name),
        "base_model": public_name(paths.base_model),
        "bench": bench.name,
        "bench_file": public_name(str(bench.path)),
        "questions": len(bench.questions),
        "skipped_turns": sum(turn.skipped for turn in turns),
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template": _public_name(paths.chat_template),
        "chat_template_kwargs": dict(paths.chat_template_kwargs) or None,
        "stop_tokens": list(model.target_model.eos_ids),
        "decoding": mode.as_json,
        **_describe_target_model(model, paths, dtype),
        **_describe_draft(model, paths),
        **_describe_baselines(cfg, model, turns, mode),
        "device": device_name(model.target_model.device),
        "threads": torch.get_num_threads(),
        "medusa_train": installed_version("medusa-train"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _public_name(name: str | None) -> str | None:
    if name is None:
        return None
    return public_name(name)


def _describe_target_model(model: LoadedModel, paths: ModelPaths, dtype: str) -> dict[str, Any]:
    """Return how the target model's passes are computed."""
    target_model = model.target_model
    runner = target_model.step_runner
    return {
        "backbone": paths.target_model_form,
        "dtype": dtype,
        "packed": is_prepacked(target_model.model),
        "attention": target_model.attention,
        "compiled": target_model.compiled is not None,
        "cuda_graphs": getattr(runner, "works", runner is not None),
    }


def _describe_draft(model: LoadedModel, paths: ModelPaths) -> dict[str, Any]:
    """Return what drafts, and its tree."""
    draft, tree, dynamic = model.draft, model.tree, model.dynamic
    # a graph that is replayed always fills its whole tree
    fixed_shape = model.proposer is not None and model.proposer.fixed_shape
    is_replayed = model.target_model.step_runner is not None and fixed_shape
    datastore = weights = None
    if isinstance(model.lookup, RestDraft):
        datastore = model.lookup.datastore.describe()
    if paths.heads is not None:
        weights = digest_files(find_heads(paths.heads).files)[:16]
    described: dict[str, Any] = {
        "draft": None if paths.lookup is None else paths.lookup.describe(),
        "datastore": datastore,
        "heads": None if draft is None else draft.num_heads,
        "weights": weights,
        "early_stop": 0.0 if draft is None or is_replayed else draft.threshold,
        "tree_nodes": None if tree is None else tree.size,
        "tree_depth": None if tree is None else tree.max_depth,
        "dynamic_trees": None,
        "tree_file": None if paths.tree is None else public_name(str(paths.tree)),
    }
    if dynamic is not None:
        trees = {"tree_nodes": "dynamic", "tree_depth": None, "dynamic_trees": dynamic._asdict()}
        described.update(trees)
    return described


def _describe_baselines(
    cfg: EvalConfig, model: LoadedModel, turns: Sequence[Turn], mode: DecodingMode
) -> dict[str, Any]:
    """Return what the tree is compared with, and how answers are."""
    greedy = mode.acceptance == "greedy"
    references = reference_decoders(model)
    answered = [turn.answers for turn in turns if not turn.skipped]
    pairs = [(one[PLAIN], one[GENERATE]) for one in answered if GENERATE in one]
    baselines = {"baseline_tokens_per_s": "the same decoding loop with the empty tree"}
    if pairs:
        baselines["generate_tokens_per_s"] = describe_baseline(GENERATE, None, mode)
    for name, reference in references.items():
        baselines[name] = reference.description
    for name in answered[0]:
        if name not in (TREE, PLAIN, GENERATE, *references):
            baselines[name] = describe_baseline(name, cfg.assistant_model, mode)
    plain_equal_generate = None
    if greedy and pairs:
        plain_equal_generate = sum(plain.tokens == other.tokens for plain, other in pairs)
    exactness = None
    if greedy and model.proposer is not None:
        exactness = dict.fromkeys(EQUALITY_DTYPES, "not compared")
    return {
        "baselines": baselines,
        "plain_equal_generate": plain_equal_generate,
        "exactness": exactness,
    }


def measurement_settings(cfg: EvalConfig, bench: Bench, paths: ModelPaths) -> dict[str, Any]:
    """Return everything that answers and their times depend on; an interrupted evaluation is
    resumed if it is equal.
    """
    mode = DecodingMode.from_config(cfg)
    settings: dict[str, Any] = {
        "format": 2,  # of the log's lines
        **bench_settings(bench),
        **model_settings(paths),
        "draft": None,
        "tree": None,
        "backbone": paths.target_model_form,
        "chat_template_kwargs": dict(paths.chat_template_kwargs) or None,
        "max_new_tokens": cfg.max_new_tokens,
        "decoding": mode.as_json,
        "seed": None,
        "dtype": cfg.dtype,
        "compile": cfg.compile,
        "prompt_lookup": cfg.prompt_lookup,
        "assistant_model": cfg.assistant_model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": platform.node(),
    }
    if paths.lookup is not None:
        settings["draft"] = [paths.lookup.name, paths.lookup.settings]
    if paths.tree is not None:
        # an empty tree is not timed: a log of turns in which it was starts over
        settings["tree"] = Tree.load(paths.tree).paths or "empty"
    if mode.acceptance != "greedy":
        settings["seed"] = mode.seed
    if torch.cuda.is_available():
        settings["device"] = torch.cuda.get_device_name()

    # Keys that are there only if they are set.
    if paths.tree_mode != FIXED:
        settings["dynamic"] = paths.tree_mode
    if paths.threshold is not None:
        settings["threshold"] = paths.threshold
    if not cfg.generate:
        settings["generate"] = False
    return settings


def bench_settings(bench: Bench) -> dict[str, Any]:
    """Return what identifies the questions of a bench."""
    asked: list[list[Any]] = []
    for question in bench.questions:
        opening = [message.content for message in question.opening]
        asked.append([question.question_id, *opening, *question.turns[1:]])
        if question.messages:
            asked.append([question.variables, *(message.parts for message in question.messages)])
    return {
        "bench": bench.name,
        "questions": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
    }


def model_settings(paths: ModelPaths) -> dict[str, Any]:
    """Return what identifies the weights of a model, its chat template, which may be a file, and
    where its answers end.
    """
    files = []
    for folder in (paths.heads, paths.adapter, Path(paths.base_model)):
        if folder is not None:
            files += sorted(folder.glob("*.pt"))
            files += sorted(folder.glob("*.safetensors"))
    weights = []
    for file in files:
        status = file.stat()
        weights.append([file.name, status.st_size, status.st_mtime_ns])
    chat_template = paths.chat_template
    if chat_template:
        chat_template = get_template(chat_template).source
    return {
        "model": paths.name,
        "base_model": paths.base_model,
        "chat_template": chat_template,
        "weights": weights,
        "special_tokens": dict(paths.special_tokens) or None,
        "stop_tokens": list(added_stop_tokens(paths)) or None,
    }
