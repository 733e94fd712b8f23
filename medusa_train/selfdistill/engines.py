"""The model of self-distillation: its files, names and dtype, and the engine that generates its
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.config.paths import public_name, resolve_path
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.selfdistill.answers import Engine

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths
    from medusa_train.selfdistill.hf_engine import HFEngine
    from medusa_train.selfdistill.openai_engine import ServerSampling

DEFAULT_BATCH_SIZE = 16
TIMED_PROMPT = 100  # tokens of the prompts with which a step is timed


def resolve_model_paths(cfg: SelfDistillConfig) -> ModelPaths:
    """Return the paths of the backbone, its adapter and, if configured, the heads.

    `base_model` may be a run: its trained backbone is used, with the adapter merged.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    model = cfg.heads
    base = cfg.base_model
    if model is None and base is not None and _is_run(base):
        model = base
        base = None
    paths = resolve_model(
        model,
        base,
        None,
        chat_template=cfg.chat_template,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        trust_remote_code=cfg.trust_remote_code,
    )
    if cfg.heads is not None:
        return paths
    return replace(paths, heads=None, tree=None)


def _is_run(name: str) -> bool:
    """Return whether `name` is a run directory with heads."""
    directory = resolve_path(name)
    if directory is None:
        return False
    return (directory / "heads").is_dir() and (directory / "config.yaml").is_file()


def model_name(cfg: SelfDistillConfig) -> str:
    """Return the model's name in the output; the trained backbone of a run is named after the run."""
    if cfg.engine == "openai":
        return str(cfg.base_model)  # checked with the configuration
    if cfg.base_model is not None:
        return public_name(cfg.base_model)
    paths = resolve_model_paths(cfg)
    is_trained = paths.adapter is not None or Path(paths.base_model).is_relative_to(paths.home)
    return public_name(str(paths.home) if is_trained else paths.base_model)


def weights_digest(cfg: SelfDistillConfig) -> str | None:
    """Return a hash of the weights of a model or heads of which only the last part of the path is
    in the output.

    `a/merged` and `b/merged` have the same name there. None for other names, and for servers.
    """
    from medusa_train.checkpoint.digest import digest_files

    if cfg.engine == "openai":
        return None
    # 1. directories of which the name is not the whole path
    paths = [Path(name).expanduser() for name in (cfg.base_model, cfg.heads) if name]
    shortened = [
        path for path in paths if path.is_absolute() and public_name(str(path)) == path.name
    ]
    if not shortened:
        return None
    # 2. the files of their weights
    files: list[Path] = []
    for path in shortened:
        for folder in ("", "adapter/", "heads/"):
            for suffix in ("safetensors", "bin"):
                files.extend(path.glob(f"{folder}*.{suffix}"))
    return digest_files(files)


def resolve_dtype(cfg: SelfDistillConfig, note: Callable[[str], None]) -> str | None:
    """Return the model's dtype; None for a server. `note` receives why `auto` is slow here."""
    if cfg.engine == "openai":
        return None
    if cfg.dtype != "auto":
        return cfg.dtype
    from medusa_train.checkpoint.load_model import auto_dtype_of  # imports torch

    return auto_dtype_of(resolve_model_paths(cfg), note)


def open_engine(
    cfg: SelfDistillConfig,
    dtype: str | None,
    note: Callable[[str], None],
    loading: AbstractContextManager[object] | None = None,
) -> Engine:
    """Load the model, or connect to the server, that generates the answers.

    Args:
        note: receives that decision, and lines about servers that do not answer.
        loading: entered while torch is imported and the weights are read.
    """
    if cfg.engine == "openai":
        from medusa_train.selfdistill.openai_engine import OpenAIEngine
        from medusa_train.servers.client import OpenAIClient

        assert cfg.server_url is not None  # checked with the configuration
        server = OpenAIClient(
            cfg.server_url,
            key_variable=cfg.api_key_env,
            timeout=cfg.request_timeout,
            retry_seconds=cfg.retry_seconds,
            concurrency=cfg.concurrency,
            note=note,
        )
        return OpenAIEngine(server, model_name(cfg), server_sampling(cfg), cfg.reasoning_tags)
    assert dtype is not None  # only a server has none
    paths = resolve_model_paths(cfg)
    return open_hf_engine(cfg, paths, dtype, note, loading)


def server_sampling(cfg: SelfDistillConfig) -> ServerSampling:
    """Return the parameters that every request has in common."""
    from medusa_train.selfdistill.openai_engine import ServerSampling

    return ServerSampling(
        cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k, cfg.chat_template_kwargs
    )


def open_hf_engine(
    cfg: SelfDistillConfig,
    paths: ModelPaths,
    dtype: str,
    note: Callable[[str], None],
    loading: AbstractContextManager[object] | None = None,
) -> HFEngine:
    """Load the model in this process, compile it where wanted, and return its engine; see
    `open_engine`.
    """
    batch_size = cfg.batch_size
    if batch_size is None:
        is_single = dtype == "float32" or paths.heads is not None
        batch_size = 1 if is_single else DEFAULT_BATCH_SIZE

    # 1. load it, and name what is not used, and what ends answers
    # float32 answers are reproducible on other machines only without prepacked weights
    with nullcontext() if loading is None else loading:
        from medusa_train.checkpoint.load_model import compile_backbone, load_for_decoding
        from medusa_train.data.tokenize import ChatEncoder
        from medusa_train.selfdistill.hf_engine import HFEngine

        model = load_for_decoding(paths, dtype, prepack=dtype != "float32")
    trees = model.draft is not None
    chat = ChatEncoder(model.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
    unused = chat.template.describe_unused_kwargs()
    if unused is not None:
        note(f"note: {unused}")
    ends = model.backbone.stop_tokens.describe(model.backbone.tokenizer)
    if ends is not None:
        note(ends)

    # 2. compile it
    if cfg.compile:
        compile_backbone(model.backbone, paths, rows=batch_size, trees=trees)
    model.compile_tree(note)
    return HFEngine(
        model.backbone,
        batch_size=batch_size,
        draft=model.draft,
        tree=model.tree,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k or 0,
        max_new_tokens=cfg.max_new_tokens,
        chat_template=paths.chat_template,
        chat_template_kwargs=paths.chat_template_kwargs,
        reasoning_tags=cfg.reasoning_tags,
        stop_looping=cfg.drop_looping,
    )
