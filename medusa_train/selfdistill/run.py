"""A run of self-distillation, from the configuration to the written conversations."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_train.config.paths import PROJECT_ROOT, resolve_path
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import Message
from medusa_train.data.records import first_problems
from medusa_train.data.sources import open_seed_dataset
from medusa_train.selfdistill.engines import Engine, Request
from medusa_train.selfdistill.modes import ChatSteps, DropRules, GeneratedChat, question, replay, selftalk
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt, Selection, Shard, read_prompts, select_prompts, short_name

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths
    from medusa_train.selfdistill.openai_engine import ServerSampling

DEFAULT_BATCH_SIZE = 16


def output_path(cfg: SelfDistillConfig) -> Path:
    """Return the output file, without the shard."""
    if cfg.output is not None:
        return Path(cfg.output)
    name = "questions" if cfg.mode == "questions" else short_name(cfg.seed_dataset)
    return Path("runs") / "selfdistill" / f"{name}.jsonl"


def resolve_shard(text: str | None) -> Shard | None:
    """Return the shard of this process: `text` (i/n), else by the rank that torchrun or DeepSpeed set.

    Raises:
        ConfigError: `text` is not a valid shard.
    """
    if text is not None:
        return Shard.parse(text)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Shard(int(os.environ.get("RANK", "0")) + 1, world) if world > 1 else None


def load_prompts(cfg: SelfDistillConfig, note: Callable[[str], None]) -> tuple[list[Prompt], Counter[str]]:
    """Return the selected prompts of all shards, and the number of skipped ones by reason.

    Args:
        note: receives lines for the user: downloads, and invalid records that were skipped.

    Raises:
        DataError, ConfigError: as `open_seed_dataset` and `read_prompts`.
    """
    if cfg.mode == "questions":  # the model writes the prompts
        assert cfg.limit is not None  # checked with the configuration
        return [Prompt(f"question-{number:06d}", (), source="by the model") for number in range(cfg.limit)], Counter()
    invalid: list[str] | None = [] if cfg.skip_bad_records else None
    prompts = read_prompts(open_seed_dataset(cfg.seed_dataset, note, split=cfg.split), cfg.type, skipped=invalid)
    selection = Selection(cfg.max_turns, cfg.min_chars, cfg.max_chars, cfg.sample, cfg.sample_seed, cfg.limit)
    selected, skipped = select_prompts(prompts, selection)
    if invalid:
        note("\n".join(["skipped invalid records:", *first_problems(invalid)]))
        skipped["broken"] += len(invalid)
    return selected, skipped


def build_mode(cfg: SelfDistillConfig) -> Callable[[Prompt], ChatSteps]:
    """Return the generator function of the configured mode, with its settings applied."""
    rules = DropRules(cfg.drop_truncated, cfg.drop_looping)
    if cfg.mode == "selftalk":
        return partial(selftalk, random_seed=cfg.seed, rules=rules, rounds=cfg.rounds)
    return partial(question if cfg.mode == "questions" else replay, random_seed=cfg.seed, rules=rules)


def resolve_dtype(cfg: SelfDistillConfig) -> str | None:
    """Return the model's dtype; None for a server."""
    if cfg.engine == "openai":
        return None
    if cfg.dtype != "auto":
        return cfg.dtype
    from medusa_train.models.precision import auto_dtype  # imports torch

    return auto_dtype()


def open_engine(
    cfg: SelfDistillConfig, dtype: str | None, answers: int = 0, note: Callable[[str], None] = print
) -> Engine:
    """Load the model, or connect to the server, that generates the answers.

    Args:
        answers: number of answers to generate, by which `compile: auto` decides.
        note: receives that decision, the number of processes, and lines about servers that do not answer.

    Raises:
        BackboneError, CheckpointError, DataError: the model, run or chat template cannot be used.
        ConfigError: the server's address is invalid, or several processes are wanted on a GPU.
    """
    if cfg.engine == "openai":
        return _openai_engine(cfg, note)
    from medusa_train.selfdistill.local_model import LocalModel
    from medusa_train.selfdistill.process_engine import ProcessEngine
    from medusa_train.selfdistill.processes import choose_processes

    assert dtype is not None  # only a server has none
    _select_local_gpu()
    paths = resolve_model_paths(cfg)
    default = 1 if dtype == "float32" or paths.heads is not None else DEFAULT_BATCH_SIZE
    batch_size = cfg.batch_size or (default if cfg.processes == "auto" else max(default, cfg.processes))
    options = {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "top_k": cfg.top_k or 0,
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template": paths.chat_template,
        "chat_template_kwargs": paths.chat_template_kwargs,
        "reasoning_tags": cfg.reasoning_tags,
    }
    model = LocalModel(paths, dtype, options, cfg.compile, answers * cfg.max_new_tokens)
    processes = choose_processes(cfg.processes, batch_size)
    if processes == 1:
        return model.open(batch_size, note)
    return ProcessEngine(model, batch_size, processes, adjustable=cfg.processes == "auto", note=note)


def resolve_model_paths(cfg: SelfDistillConfig) -> ModelPaths:
    """Return the paths of the backbone, its adapter and, if configured, the heads.

    `base_model` may be a run: its trained backbone is used, with the adapter merged.

    Raises:
        CheckpointError: the heads or the run do not exist.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    model, base = cfg.heads, cfg.base_model
    if model is None and base is not None and _is_run(base):
        model, base = base, None
    paths = resolve_model(
        model,
        base,
        None,
        chat_template=cfg.chat_template,
        chat_template_kwargs=cfg.chat_template_kwargs,
        trust_remote_code=cfg.trust_remote_code,
    )
    return paths if cfg.heads is not None else replace(paths, heads=None, tree=None)


def _is_run(name: str) -> bool:
    path = resolve_path(name)
    return path is not None and (path / "heads").is_dir() and (path / "config.yaml").is_file()


def _openai_engine(cfg: SelfDistillConfig, note: Callable[[str], None]) -> Engine:
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


def server_sampling(cfg: SelfDistillConfig) -> ServerSampling:
    """Return the parameters that every request has in common."""
    from medusa_train.selfdistill.openai_engine import ServerSampling

    return ServerSampling(cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k, cfg.chat_template_kwargs)


def _select_local_gpu() -> None:
    """Use the GPU of this process's local rank, if a launcher set one."""
    import torch

    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def model_name(cfg: SelfDistillConfig) -> str:
    """Return the model's name in the output; the trained backbone of a run is named after the run."""
    if cfg.base_model is not None:
        return cfg.base_model if cfg.engine == "openai" else public_name(cfg.base_model)
    paths = resolve_model_paths(cfg)
    trained = paths.adapter is not None or Path(paths.base_model).is_relative_to(paths.home)
    return public_name(str(paths.home) if trained else paths.base_model)


def public_name(name: str) -> str:
    """Return a name without private directories: hub names and relative paths unchanged, absolute paths relative to the
    project or working directory, or else only their last part.
    """
    path = resolve_path(name)
    if path is None or not Path(name).expanduser().is_absolute():
        return name
    for root in (PROJECT_ROOT, Path.cwd()):
        if path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
    return path.name


def distill(
    prompts: Sequence[Prompt],
    engine: Engine,
    writer: OutputWriter,
    *,
    mode: Callable[[Prompt], ChatSteps],
    metadata: dict[str, Any],
    on_progress: Callable[[RunStats], None] = lambda stats: None,
) -> RunStats:
    """Generate a conversation for each of `prompts` that is not in `writer.done`, and write it.

    As many conversations are in progress as the engine has capacity for. Each is written when it is complete; an engine
    of capacity 1 writes them in the order of the prompts.

    Args:
        mode: `replay`, `selftalk` or `question`, with its settings.
        metadata: fields of every output line besides the conversation, see `record_metadata`.
        on_progress: called at the start, after every answer and after every conversation.
    """
    todo = [prompt for prompt in prompts if prompt.id not in writer.done]
    stats = RunStats(total=len(prompts), earlier=len(prompts) - len(todo))
    waiting = iter(enumerate(todo))
    active: dict[int, ChatSteps] = {}
    ready: deque[tuple[int, Request]] = deque()
    pending = 0  # requests submitted to the engine and not answered
    on_progress(stats)
    while True:
        while pending < engine.capacity:
            if not ready and (started := next(waiting, None)) is not None:
                chat_id, prompt = started
                active[chat_id] = mode(prompt)
                ready.append((chat_id, next(active[chat_id])))
            if not ready:
                break
            engine.submit(*ready.popleft())
            pending += 1
        if not pending:
            return stats
        chat_id, answer = engine.next()
        pending -= 1
        stats.tokens += answer.completion_tokens
        on_progress(stats)
        try:
            ready.append((chat_id, active[chat_id].send(answer)))
        except StopIteration as end:
            del active[chat_id]
            chat: GeneratedChat = end.value
            write_chat(chat, writer, metadata)
            stats.count(chat)
            on_progress(stats)


def write_chat(chat: GeneratedChat, writer: OutputWriter, metadata: dict[str, Any]) -> None:
    """Append a conversation to the output, or its id to the dropped ones if nothing in it is kept."""
    identity = {"id": chat.prompt.id, "seed_id": chat.prompt.id}
    dropped = {"dropped": {"reason": chat.dropped, "turns": chat.dropped_turns}} if chat.dropped else {}
    if chat.is_empty:
        writer.drop({**identity, **dropped})
        return
    metadata = dict(metadata)
    counts = {"prompt": chat.prompt_tokens, "completion": chat.completion_tokens}
    answers = {"finish_reasons": chat.finish_reasons, "token_counts": counts} if chat.turns else {}
    writer.write(
        {
            **identity,
            "model": metadata.pop("model"),
            "messages": [_message_record(message) for message in chat.messages],
            **metadata,
            **answers,
            **dropped,
        }
    )


def _message_record(message: Message) -> dict[str, Any]:
    return {**message.as_dict(), **({} if message.token_ids is None else {"token_ids": list(message.token_ids)})}


@dataclass
class RunStats:
    """Statistics of a run.

    Attributes:
        total: prompts selected.
        earlier: prompts finished by an earlier run.
        written: conversations written by this run.
        turns: answers in them.
        cut: written conversations with dropped turns.
        looping: looping answers in them.
        empty: conversations of which nothing is kept.
        dropped: dropped turns by `DropReason`.
        tokens: generated tokens, dropped answers included.
    """

    total: int = 0
    earlier: int = 0
    written: int = 0
    turns: int = 0
    cut: int = 0
    looping: int = 0
    empty: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> int:
        """Prompts that are done."""
        return self.earlier + self.written + self.empty

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def count(self, chat: GeneratedChat) -> None:
        """Add a finished conversation."""
        if not chat.is_empty:
            self.written += 1
            self.turns += chat.turns
        else:
            self.empty += 1
        self.looping += chat.looping
        if chat.dropped is not None:
            self.dropped[chat.dropped] += chat.dropped_turns
            self.cut += not chat.is_empty


def record_metadata(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return the fields of every output line that tell how it was generated."""
    metadata: dict[str, Any] = {"model": model_name(cfg), "sampling": _sampling(cfg, dtype)}
    if cfg.mode != "replay":
        metadata["mode"] = cfg.mode
    return metadata


def output_settings(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return all settings that a conversation depends on; missing keys equal None.

    The selection of prompts is not among them, so that a run can be extended; nor is the server's address.
    """
    selftalk, questions = cfg.mode == "selftalk", cfg.mode == "questions"
    default_tags = SelfDistillConfig.model_fields["reasoning_tags"].default
    return {
        "model": model_name(cfg),
        "seed_dataset": None if questions else public_name(cfg.seed_dataset),
        "type": cfg.type,
        "chat_template": cfg.chat_template,
        **_sampling(cfg, dtype),
        "drop_truncated": cfg.drop_truncated,
        **_without_none(
            split=cfg.split, max_turns=cfg.max_turns, heads=None if cfg.heads is None else public_name(cfg.heads)
        ),
        **_without_none(drop_looping=cfg.drop_looping or None, engine="openai" if cfg.engine == "openai" else None),
        **_without_none(
            chat_template_kwargs=cfg.chat_template_kwargs,
            reasoning_tags=None if cfg.reasoning_tags == default_tags else list(cfg.reasoning_tags),
        ),
        **_without_none(mode=cfg.mode if selftalk or questions else None, rounds=cfg.rounds if selftalk else None),
    }


def _sampling(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    return {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new_tokens": cfg.max_new_tokens,
        "seed": cfg.seed,
        **_without_none(dtype=dtype, top_k=cfg.top_k),
    }


def _without_none(**settings: Any) -> dict[str, Any]:
    """Omit unset settings: a new key leaves the files of runs that do not use it unchanged."""
    return {name: value for name, value in settings.items() if value is not None}
