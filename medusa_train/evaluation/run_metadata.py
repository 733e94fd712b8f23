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

from medusa_train.checkpoint.load_model import LoadedModel, added_stop_tokens
from medusa_train.checkpoint.resolve import FIXED, ModelPaths, find_heads
from medusa_train.config.paths import public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.evaluation.figures import first_difference
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.timed_decoders import GENERATE, describe_baseline, reference_decoders
from medusa_train.inference.decoding_settings import DecodingMode
from medusa_train.io import installed_version
from medusa_train.models.drafts.lookup import RestDraft
from medusa_train.models.precision import device_name
from medusa_train.models.prepack import is_prepacked
from medusa_train.tree_search.traces import digest_files
from medusa_train.trees.tree import Tree


def collect_metadata(
    cfg: EvalConfig,
    bench: Bench,
    model: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    records: Sequence[TurnRecord],
    skipped: Sequence[SkippedTurn],
    command: str,
) -> dict[str, Any]:
    """Return `meta` of report.json after the timed pass: plain JSON values.

    Output equality is still open.
    """
    draft, mode = model.draft, DecodingMode.from_config(cfg)
    tree = model.tree if model.dynamic is None else None
    greedy = mode.acceptance == "greedy"
    extra_baselines, references = records[0].others, reference_decoders(model)
    proposer = model.proposer
    fixed_shape = proposer is not None and proposer.fixed_shape
    is_replayed = model.backbone.step_runner is not None and fixed_shape
    pairs = [(one.plain.tokens, one.generate.tokens) for one in records if one.generate is not None]
    return {
        "model": None if paths.name is None else public_name(paths.name),
        "base_model": public_name(paths.base_model),
        "bench": bench.name,
        "bench_file": public_name(str(bench.path)),
        "questions": len(bench.questions),
        "skipped_turns": len(skipped),
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template": None if paths.chat_template is None else public_name(paths.chat_template),
        "chat_template_kwargs": dict(paths.chat_template_kwargs) or None,
        "stop_tokens": list(model.backbone.eos_ids),
        "decoding": mode.as_json,
        "backbone": paths.backbone_form,
        "dtype": dtype,
        "packed": is_prepacked(model.backbone.model),
        "attention": model.backbone.attention,
        "compiled": model.backbone.compiled is not None,
        "cuda_graphs": getattr(
            model.backbone.step_runner, "works", model.backbone.step_runner is not None
        ),
        "draft": None if paths.lookup is None else paths.lookup.describe(),
        "datastore": model.lookup.datastore.describe()
        if isinstance(model.lookup, RestDraft)
        else None,
        "heads": None if draft is None else draft.num_heads,
        "weights": None
        if paths.heads is None
        else digest_files(find_heads(paths.heads).files)[:16],
        "early_stop": 0.0 if is_replayed or draft is None else draft.threshold,
        "tree_nodes": "dynamic"
        if model.dynamic is not None
        else None
        if tree is None
        else tree.size,
        "tree_depth": None if tree is None else tree.max_depth,
        "dynamic_trees": None if model.dynamic is None else model.dynamic._asdict(),
        "tree_file": None if paths.tree is None else public_name(str(paths.tree)),
        "baselines": {
            "baseline_tokens_per_s": "the same decoding loop with the empty tree",
            **({"generate_tokens_per_s": describe_baseline(GENERATE, None, mode)} if pairs else {}),
            **{name: one.description for name, one in references.items()},
            **{
                name: describe_baseline(name, cfg.assistant_model, mode)
                for name in extra_baselines
                if name not in references
            },
        },
        "plain_equal_generate": sum(first_difference(*pair) is None for pair in pairs)
        if greedy and pairs
        else None,
        "exactness": None
        if model.proposer is None or not greedy
        else dict.fromkeys(EQUALITY_DTYPES, "not compared"),
        "device": device_name(model.backbone.device),
        "threads": torch.get_num_threads(),
        "medusa_train": installed_version("medusa-train"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def measurement_settings(cfg: EvalConfig, bench: Bench, paths: ModelPaths) -> dict[str, Any]:
    """Return everything that answers and their times depend on; an interrupted evaluation is
    resumed if it is equal.
    """
    mode = DecodingMode.from_config(cfg)
    return {
        **bench_settings(bench),
        **model_settings(paths),
        "draft": None if paths.lookup is None else [paths.lookup.name, paths.lookup.settings],
        # an empty tree is not timed: a log of turns in which it was starts over
        "tree": None if paths.tree is None else Tree.load(paths.tree).paths or "empty",
        **({} if paths.tree_mode == FIXED else {"dynamic": paths.tree_mode}),
        **({} if paths.threshold is None else {"threshold": paths.threshold}),
        "backbone": paths.backbone_form,
        "chat_template_kwargs": dict(paths.chat_template_kwargs) or None,
        "max_new_tokens": cfg.max_new_tokens,
        "decoding": mode.as_json,
        "seed": None if mode.acceptance == "greedy" else mode.seed,
        "dtype": cfg.dtype,
        "compile": cfg.compile,
        **({} if cfg.generate else {"generate": False}),
        "prompt_lookup": cfg.prompt_lookup,
        "assistant_model": cfg.assistant_model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.node(),
    }


def bench_settings(bench: Bench) -> dict[str, Any]:
    """Return what identifies the questions of a bench."""
    asked = [
        [q.question_id, *(one.content for one in q.opening), *q.turns[1:]] for q in bench.questions
    ]
    return {
        "bench": bench.name,
        "questions": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
    }


def model_settings(paths: ModelPaths) -> dict[str, Any]:
    """Return what identifies the weights of a model, its chat template, which may be a file, and
    where its answers end.
    """
    folders = [
        folder
        for folder in (paths.heads, paths.adapter, Path(paths.base_model))
        if folder is not None
    ]
    weights = [
        file
        for folder in folders
        for kind in ("*.pt", "*.safetensors")
        for file in sorted(folder.glob(kind))
    ]
    return {
        "model": paths.name,
        "base_model": paths.base_model,
        "chat_template": paths.chat_template and get_template(paths.chat_template).source,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "special_tokens": dict(paths.special_tokens) or None,
        "stop_tokens": list(added_stop_tokens(paths)) or None,
    }
