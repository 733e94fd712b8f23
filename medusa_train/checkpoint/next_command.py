"""The next command to print after a command, in README's order and with the user's own draft:
train, measure, export, measure in vLLM, serve.

If the user allowed Python code of the target model's repository, each command allows it again, since
the run's own file cannot.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.resolve import (
    DSPARK,
    ModelPaths,
    architectures_of,
    heads_kind,
    read_mapping,
)
from medusa_train.checkpoint.run_directory import CONFIG
from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.config.types import ExportTarget

_TINY = PROJECT_ROOT / "data" / "tiny"


def is_embedded(target_model: str) -> bool:
    """Return whether a target model is the embedded test model."""
    path = resolve_path(target_model)
    return path is not None and path.resolve() == _TINY.resolve()


def after_training(
    target_model: str, run: Path, *, lacks_tree: bool = False, trust_remote_code: bool = False
) -> str:
    """Return the command that measures a run, or fits its tree."""
    bench = "tiny" if is_embedded(target_model) else "mtbench"
    options = ["--calibrate"] if lacks_tree else ["--bench", bench, "--limit", "16"]
    words = ["medusa-eval", *options, "--model", str(run)]
    return shlex.join(words + permission(trust_remote_code))


def after_evaluation(paths: ModelPaths) -> str | None:
    """Return the command that exports a measured draft: EAGLE-3 and DFlash for vLLM, Medusa heads
    for transformers' `generate`. None if no other program runs the draft, or if it is not from a
    run.

    For the embedded test model, return the command that trains a draft for a real model.
    """
    if is_embedded(paths.target_model):
        return "make qwen" if (PROJECT_ROOT / "Makefile").is_file() else None
    targets = {"eagle3": "vllm", "dflash": "vllm", "medusa": "transformers"}
    kind = _kind_of_run(paths)
    if kind not in targets:
        return None
    export = ["medusa-export", str(paths.home), "--to"]
    allowed = permission(paths.trust_remote_code)
    commands = [[*export, targets[kind], *allowed]]
    if paths.trained_target_model:  # the heads need the target model that was trained with them
        commands.insert(0, [*export, "merged", *allowed])
    return " && ".join(map(shlex.join, commands))


def after_export(paths: ModelPaths, to: ExportTarget) -> str | None:
    """Return the command that measures a run's export in vLLM; None for other targets."""
    kind = _kind_of_run(paths)
    if to != "vllm" or kind is None:
        return None
    words = ["--serve", "--bench", "mtbench", "--limit", "16", "--model", str(paths.home)]
    words.append("concurrency=[1, 8]")
    if kind == "eagle3":
        words.append("serve_speculative_tokens=[2, 4]")
    words += permission(paths.trust_remote_code)
    return shlex.join(["medusa-eval", *words])


def after_serving(paths: ModelPaths, report: Mapping[str, Any]) -> str | None:
    """Return the command that serves a run with the number of draft tokens that is recommended for
    the fewest concurrent requests. The target model of a LoRA run is merged before, if it is not.
    None if no number is recommended, or nothing is exported.
    """
    recommended = [one for one in report["recommendation"] if one["use"]]
    export = paths.home / "export" / "vllm"
    kind = _kind_of_run(paths)
    if kind is None or not recommended or not export.is_dir():
        return None
    count = recommended[0]["num_speculative_tokens"]
    has_bias = DSPARK in architectures_of(read_mapping(export / "config.json"))
    method = "dspark" if has_bias else kind
    draft = {"method": method, "model": str(export), "num_speculative_tokens": count}
    model = paths.target_model
    commands = []
    if paths.adapter is not None:
        merged = paths.home / "export" / "merged"
        model = str(merged)
        if not merged.is_dir():
            words = ["medusa-export", str(paths.home), "--to", "merged"]
            commands.append(words + permission(paths.trust_remote_code))
    serve = ["vllm", "serve", model, "--speculative-config", json.dumps(draft)]
    if paths.trust_remote_code:
        serve.append("--trust-remote-code")
    commands.append(serve)
    return " && ".join(map(shlex.join, commands))


def permission(trust_remote_code: bool) -> list[str]:
    """Return the override that allows Python code of the target model's repository, if it was
    allowed.
    """
    return ["trust_remote_code=true"] if trust_remote_code else []


def _kind_of_run(paths: ModelPaths) -> str | None:
    """Return the kind of a run's draft; None if there are no heads, or no run."""
    if paths.heads is None or not (paths.home / CONFIG).is_file():
        return None
    return heads_kind(paths.heads)
