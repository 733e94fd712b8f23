"""Set up a measurement of servers: servers and models, options of requests, output directory and metadata."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.resolve import ModelPaths, runs_directory
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.run_metadata import bench_settings, model_settings, short_path
from medusa_train.inference.decoding_settings import DecodingMode
from medusa_train.selfdistill.openai_engine import ServerSampling
from medusa_train.server_bench.measure import ALONE, HEADS, PLAIN, RequestOptions, Target, open_server
from medusa_train.server_bench.serve import ServedModel, Session


def find_targets(cfg: EvalConfig, options: RequestOptions) -> list[Target]:
    """Check the servers of `server_url` and `against`, and find their models' names; the plain one comes first.

    Raises:
        ConfigError: a server does not list the model, or lists several and none was named.
        ServerError: it cannot be reached.
    """
    assert cfg.server_url is not None
    if cfg.against is None:
        return [_target(ALONE, cfg.server_url, cfg.base_model, options, has_heads=False)]
    return [
        _target(PLAIN, cfg.against, cfg.base_model, options, has_heads=False),
        _target(HEADS, cfg.server_url, cfg.base_model, options, has_heads=True),
    ]


def _target(name: str, url: str, model: str | None, options: RequestOptions, *, has_heads: bool) -> Target:
    server = open_server(url, options)
    try:
        models = server.list_models()
    finally:
        server.close()
    listed = ", ".join(models)
    if model is None and len(models) != 1:
        problem = f"lists several models ({listed})" if models else "does not list its models"
        raise ConfigError(f"server {server.url}: {problem}; set base_model to the name of the one to measure")
    if model is not None and models and model not in models:
        raise ConfigError(f"server {server.url}: does not serve {model}; its models: {listed} (set base_model)")
    chosen = model or next(iter(models))
    entry = models.get(chosen, {})
    root = entry.get("root")
    return Target(
        name, server.url, chosen, has_heads, entry.get("owned_by") == "vllm", root if isinstance(root, str) else None
    )


def model_notes(targets: Sequence[Target], paths: ModelPaths | None) -> list[str]:
    """Note servers that may serve different models, or another one than the run in whose directory they report.

    Servers report only a name, vLLM also what it loaded. The same model may have another path on another machine, so
    this is no error.
    """
    notes = []
    loaded = {target.name: target.root or target.model for target in targets}
    if len(set(loaded.values())) > 1:
        listed = ", ".join(f"{name} {model}" for name, model in loaded.items())
        notes.append(f"the servers name different models ({listed}): the comparison holds only for the same backbone")
    if paths is not None and paths.adapter is None:  # a merged backbone has another name
        backbone = Path(paths.base_model).name
        known = {target.name: target.root for target in targets if target.root is not None}
        others = [f"{name} serves {model}" for name, model in known.items() if not _same_name(model, backbone)]
        if others:
            notes.append(
                f"{', '.join(others)}, and the backbone of the run is {backbone}: if that is another model, delete "
                "this report, which the run's model card would quote"
            )
    return notes


def _same_name(model: str, backbone: str) -> bool:
    """Whether two paths or hub names end in the same name."""
    return Path(model).name.casefold() == backbone.casefold()


def request_options(cfg: EvalConfig, mode: DecodingMode, paths: ModelPaths | None) -> RequestOptions:
    """Return what all requests have in common. A server of `--serve` that does not answer has ended."""
    kwargs = cfg.chat_template_kwargs if paths is None else paths.chat_template_kwargs
    rule = mode.baseline_rule
    sampling = ServerSampling(
        0.0 if rule is None else rule.temperature,
        cfg.max_new_tokens,
        1.0 if rule is None else rule.top_p,
        None if rule is None else rule.top_k or None,
        kwargs or None,
    )
    retry_seconds = min(cfg.retry_seconds, 5.0) if cfg.serve else cfg.retry_seconds
    return RequestOptions(sampling, cfg.seed, cfg.request_timeout, retry_seconds, cfg.api_key_env)


def output_directory(cfg: EvalConfig, name: str, paths: ModelPaths | None, targets: Sequence[Target]) -> Path:
    """Return the directory of the report: in the run directory if there is one, else named after the server's model."""
    if cfg.output_dir:
        return Path(cfg.output_dir).expanduser()
    if paths is not None:
        return paths.home / "eval" / f"served-{name}"
    model = re.sub(r"[^\w.-]+", "_", targets[-1].model).strip("_")
    return runs_directory() / "served" / model / name


def settings(
    cfg: EvalConfig,
    bench: Bench,
    mode: DecodingMode,
    paths: ModelPaths | None,
    served: ServedModel | None,
    targets: Sequence[Target],
) -> dict[str, Any]:
    """Return what answers and times depend on; not which concurrencies and numbers of tokens are measured."""
    values = {
        **bench_settings(bench),
        "decoding": mode.settings,
        "seed": cfg.seed,
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template_kwargs": cfg.chat_template_kwargs if paths is None else dict(paths.chat_template_kwargs),
        "warmup": cfg.warmup,
        "machine": platform.node(),
    }
    if served is None or paths is None:
        return {**values, "servers": [[target.name, target.url, target.model] for target in targets]}
    return {**values, **model_settings(paths), "vllm": served.version, "arguments": list(served.options)}


def metadata(
    cfg: EvalConfig,
    bench: Bench,
    mode: DecodingMode,
    paths: ModelPaths | None,
    served: ServedModel | None,
    targets: Sequence[Target],
) -> dict[str, Any]:
    """Return `meta` of served.json: plain JSON values."""
    meta: dict[str, Any] = {
        "model": targets[-1].model if targets else None,
        "base_model": None,
        "bench": bench.name,
        "bench_file": short_path(str(bench.path)),
        "questions": len(bench.questions),
        "max_new_tokens": cfg.max_new_tokens,
        "decoding": mode.settings,
        "concurrency": list(dict.fromkeys(cfg.concurrency)),
    }
    if served is None or paths is None:
        meta["servers"] = {target.name: f"{target.model} at {target.url}" for target in targets}
        meta["turns"] = "in turns, block by block" if len(targets) > 1 else "one server alone"
    else:
        meta |= {"model": short_path(str(paths.home)), "base_model": short_path(served.backbone)}
        meta |= {"heads": short_path(str(served.heads)), "server": served.version, "arguments": list(served.options)}
        meta["turns"] = _describe_turns(served.sessions)
    return {**meta, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _describe_turns(sessions: Sequence[Session]) -> str:
    if all(len(session.servers) > 1 for session in sessions):
        return "the server without heads beside each one with heads, in turns, block by block"
    return "one server at a time; the one without heads first and last, of which the faster counts"
