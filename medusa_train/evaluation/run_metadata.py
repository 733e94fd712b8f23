"""What was measured, on what and with what: the facts that a report begins with. Times nothing."""

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

from medusa_train.checkpoint.load import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import EvalConfig
from medusa_train.evaluation.metrics import first_difference
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.speed import describe_baseline
from medusa_train.models.backbone import Backbone
from medusa_train.models.prepack import is_prepacked


def collect_metadata(
    cfg: EvalConfig,
    bench: Bench,
    subject: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    records: Sequence[TurnRecord],
    skipped: Sequence[SkippedTurn],
    command: str,
) -> dict[str, Any]:
    """The `meta` of report.json; whoever knows more (exactness, time taken) adds it."""
    draft, tree = subject.draft, subject.tree
    further = records[0].others if records else {}
    same = sum(first_difference(record.plain.tokens, record.generate.tokens) is None for record in records)
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
        "packed": is_prepacked(subject.backbone.model),
        "attention": subject.backbone.attention,
        "compiled": subject.backbone.compiled is not None,
        "heads": None if draft is None else draft.num_heads,
        "early_stop": getattr(draft, "threshold", 0.0),
        "tree_nodes": None if tree is None else tree.size,
        "tree_depth": None if tree is None else tree.max_depth,
        "tree_file": None if paths.tree is None else short_path(str(paths.tree)),
        "baselines": {
            "baseline_tokens_per_s": "the same decoding loop with the empty tree",
            "generate_tokens_per_s": describe_baseline("generate", transformers.__version__, None),
            **{name: describe_baseline(name, transformers.__version__, cfg.assistant_model) for name in further},
        },
        "plain_equal_generate": same,
        "exactness": None if draft is None else dict.fromkeys(EQUALITY_DTYPES, "not compared"),
        "device": device_name(subject.backbone),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def short_path(path: str) -> str:
    """A path below the current directory or the project, from there; others and hub names as they are."""
    for root in (Path.cwd(), PROJECT_ROOT):
        if Path(path).is_absolute() and Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path


def device_name(backbone: Backbone) -> str:
    """The name of the GPU or CPU that the backbone runs on."""
    if backbone.device.type == "cuda":
        return str(torch.cuda.get_device_name(backbone.device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def measurement_settings(cfg: EvalConfig, bench: Bench, paths: ModelPaths) -> dict[str, Any]:
    """Everything that answers and their times depend on: what a stopped evaluation must share to be gone on with."""
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
