"""Describe what an evaluation ran, on what and with what: `meta` of report.json, and the settings of a resumed run."""

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

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import EvalConfig
from medusa_train.evaluation.metrics import first_difference
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.speed import GENERATE, describe_baseline
from medusa_train.models.backbone import Backbone
from medusa_train.models.prepack import is_prepacked


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
    """Return `meta` of report.json after the timed pass: plain JSON values. Output equality is still open."""
    draft, tree = model.draft, model.tree
    extra_baselines = records[0].others if records else {}
    equal = sum(first_difference(record.plain.tokens, record.generate.tokens) is None for record in records)
    return {
        "model": None if paths.name is None else short_path(paths.name),
        "base_model": short_path(paths.base_model),
        "bench": bench.name,
        "bench_file": short_path(str(bench.path)),
        "questions": len(bench.questions),
        "skipped_turns": len(skipped),
        "max_new_tokens": cfg.max_new_tokens,
        "backbone": paths.backbone_form,
        "dtype": dtype,
        "packed": is_prepacked(model.backbone.model),
        "attention": model.backbone.attention,
        "compiled": model.backbone.compiled is not None,
        "heads": None if draft is None else draft.num_heads,
        "early_stop": getattr(draft, "threshold", 0.0),
        "tree_nodes": None if tree is None else tree.size,
        "tree_depth": None if tree is None else tree.max_depth,
        "tree_file": None if paths.tree is None else short_path(str(paths.tree)),
        "baselines": {
            "baseline_tokens_per_s": "the same decoding loop with the empty tree",
            "generate_tokens_per_s": describe_baseline(GENERATE, transformers.__version__, None),
            **{
                name: describe_baseline(name, transformers.__version__, cfg.assistant_model) for name in extra_baselines
            },
        },
        "plain_equal_generate": equal,
        "exactness": None if draft is None else dict.fromkeys(EQUALITY_DTYPES, "not compared"),
        "device": device_name(model.backbone),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def measurement_settings(cfg: EvalConfig, bench: Bench, paths: ModelPaths) -> dict[str, Any]:
    """Return everything that answers and their times depend on; an interrupted evaluation is resumed if it is equal."""
    questions = json.dumps([[question.question_id, *question.turns] for question in bench.questions])
    weights = [file for folder in (paths.heads, paths.adapter, Path(paths.base_model)) for file in _files(folder)]
    return {
        "bench": bench.name,
        "questions": hashlib.sha256(questions.encode()).hexdigest(),
        "model": paths.name,
        "base_model": paths.base_model,
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "tree": None if paths.tree is None else paths.tree.read_text(encoding="utf-8"),
        "backbone": paths.backbone_form,
        "chat_template": paths.chat_template,
        "max_new_tokens": cfg.max_new_tokens,
        "dtype": cfg.dtype,
        "compile": cfg.compile,
        "prompt_lookup": cfg.prompt_lookup,
        "assistant_model": cfg.assistant_model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.node(),
    }


def _files(folder: Path | None) -> list[Path]:
    if folder is None or not folder.is_dir():
        return []
    return sorted(file for pattern in ("*.safetensors", "*.pt") for file in folder.glob(pattern))


def short_path(path: str) -> str:
    """Return a path relative to the current directory or the project if it lies below; other names unchanged."""
    for root in (Path.cwd(), PROJECT_ROOT):
        if Path(path).is_absolute() and Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path


def device_name(backbone: Backbone) -> str:
    """Return the name of the GPU or CPU that the backbone runs on."""
    if backbone.device.type == "cuda":
        return str(torch.cuda.get_device_name(backbone.device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
