"""The run: every seed that is not done yet becomes a conversation and is written. Knows no command line, no model."""

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
from medusa_train.data.records import first_problems
from medusa_train.data.sources import open_seed_dataset
from medusa_train.selfdistill.engines import Answer, Engine, Request
from medusa_train.selfdistill.modes import ChatSteps, DropRules, GeneratedChat, replay, selftalk
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import Prompt, read_prompts, short_name
from medusa_train.selfdistill.select_prompts import Selection, Shard, select_prompts

if TYPE_CHECKING:
    from medusa_train.checkpoint.resolve import ModelPaths


@dataclass
class RunStats:
    """What a run did, and what an earlier one had done.

    Attributes:
        total: seeds asked for. earlier: of them, finished by an earlier run.
        written: conversations written now; turns: answers in them; cut: of them, written shorter than the seed.
        looping: answers among those written that loop.
        empty: conversations of which nothing was left.
        dropped: dropped turns by reason ("length", "context", "refused", "empty", "looping", "repeated").
        tokens: generated now, dropped answers included.
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
        """Seeds that need nothing more."""
        return self.earlier + self.written + self.empty

    @property
    def seconds(self) -> float:
        """Since this run started."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of this run."""
        return self.tokens / max(self.seconds, 1e-9)

    def count(self, talk: GeneratedChat) -> None:
        """Take note of a finished conversation."""
        if talk.turns:
            self.written += 1
            self.turns += talk.turns
        else:
            self.empty += 1
        self.looping += talk.looping
        if talk.dropped is not None:
            self.dropped[talk.dropped] += talk.dropped_turns
            self.cut += bool(talk.turns)


def distill(
    seeds: Sequence[Prompt],
    engine: Engine,
    writer: OutputWriter,
    *,
    mode: Callable[[Prompt], ChatSteps],
    metadata: dict[str, Any],
    on_progress: Callable[[RunStats], None] = lambda stats: None,
) -> RunStats:
    """Make a conversation of each of `seeds` and write it; those in `writer.done` are left out.

    As many conversations are under way as the engine wants requests at hand. Each is written as soon as it is
    finished; an engine that takes one request at a time writes them in the order of the seeds.

    Args:
        mode: `replay` or `selftalk` with its settings.
        metadata: what every line says beside the conversation: `model`, `sampling`, ...
        on_progress: called at the start, after every answer and after every conversation.
    """
    left = [seed for seed in seeds if seed.id not in writer.done]
    stats = RunStats(total=len(seeds), earlier=len(seeds) - len(left))
    coming = iter(enumerate(left))
    underway: dict[int, ChatSteps] = {}
    ready: deque[tuple[int, Request]] = deque()
    asked = 0  # requests that the engine has not answered yet
    on_progress(stats)
    while True:
        while asked < engine.capacity:
            if not ready and (begun := next(coming, None)) is not None:
                request_id, seed = begun
                underway[request_id] = mode(seed)
                ready.append((request_id, next(underway[request_id])))
            if not ready:
                break
            engine.submit(*ready.popleft())
            asked += 1
        if not asked:
            return stats
        request_id, answer = engine.next()
        asked -= 1
        stats.tokens += answer.completion_tokens
        finished = _go_on(request_id, answer, underway, ready)
        on_progress(stats)
        if finished is not None:
            write(finished, writer, metadata)
            stats.count(finished)
            on_progress(stats)


def _go_on(
    request_id: int, answer: Answer, underway: dict[int, ChatSteps], ready: deque[tuple[int, Request]]
) -> GeneratedChat | None:
    """Hand a conversation its answer: its next request goes to `ready`, or it is finished and returned."""
    try:
        ready.append((request_id, underway[request_id].send(answer)))
    except StopIteration as end:
        del underway[request_id]
        talk: GeneratedChat = end.value
        return talk
    return None


def write(talk: GeneratedChat, writer: OutputWriter, facts: dict[str, Any]) -> None:
    """Append a conversation, or the note that nothing was left of it."""
    identity = {"id": talk.seed.id, "seed_id": talk.seed.id}
    dropped = {"dropped": {"reason": talk.dropped, "turns": talk.dropped_turns}} if talk.dropped else {}
    if not talk.turns:
        writer.drop({**identity, **dropped})
        return
    facts = dict(facts)
    writer.write(
        {
            **identity,
            "model": facts.pop("model"),
            "messages": [message.as_dict() for message in talk.messages],
            **facts,
            "finish_reasons": talk.finish_reasons,
            "token_counts": {"prompt": talk.prompt_tokens, "completion": talk.completion_tokens},
            **dropped,
        }
    )


BATCH = 16


def output_path(cfg: SelfDistillConfig) -> Path:
    """The file that the conversations go to, shards apart."""
    if cfg.output is not None:
        return Path(cfg.output)
    return Path("runs") / "selfdistill" / f"{short_name(cfg.seed_dataset)}.jsonl"


def resolve_shard(text: str | None) -> Shard | None:
    """The part that this process answers: `text` (i/n), else the rank that torchrun or DeepSpeed gave it.

    Raises:
        ConfigError: `text` is no shard.
    """
    if text is not None:
        return Shard.parse(text)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Shard(int(os.environ.get("RANK", "0")) + 1, world) if world > 1 else None


def load_prompts(cfg: SelfDistillConfig, note: Callable[[str], None]) -> tuple[list[Prompt], Counter[str]]:
    """The seeds to answer, shards apart, and how many were left out for which reason.

    Args:
        note: told what a user should know: where seeds come from, which records were skipped.

    Raises:
        DataError, ConfigError: as `open_seed_dataset` and `read_prompts` do.
    """
    skipped: list[str] | None = [] if cfg.skip_bad_records else None
    seeds = read_prompts(open_seed_dataset(cfg.seed_dataset, note, split=cfg.split), cfg.type, skipped=skipped)
    asked = Selection(cfg.max_turns, cfg.min_chars, cfg.max_chars, cfg.sample, cfg.sample_seed, cfg.limit)
    chosen, left_out = select_prompts(seeds, asked)
    if skipped:
        note("\n".join(["broken records, skipped:", *first_problems(skipped)]))
        left_out["broken"] += len(skipped)
    return chosen, left_out


def build_mode(cfg: SelfDistillConfig) -> Callable[[Prompt], ChatSteps]:
    """The mode with its settings: what turns a seed into a conversation."""
    rules = DropRules(cfg.drop_truncated, cfg.drop_looping)
    if cfg.mode == "selftalk":
        return partial(selftalk, random_seed=cfg.seed, rules=rules, rounds=cfg.rounds)
    return partial(replay, random_seed=cfg.seed, rules=rules)


def resolve_dtype(cfg: SelfDistillConfig) -> str | None:
    """What the model computes in; None where a server does."""
    if cfg.engine == "openai":
        return None
    if cfg.dtype != "auto":
        return cfg.dtype
    from medusa_train.models.precision import auto_dtype  # imports torch

    return auto_dtype()


def record_metadata(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """What every line says of how it was made."""
    facts: dict[str, Any] = {"model": model_name(cfg), "sampling": _sampling(cfg, dtype)}
    if cfg.mode != "replay":
        facts["mode"] = cfg.mode
    return facts


def output_settings(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Everything that a conversation depends on; a key that is None means the same as one that is not there.

    Which seeds are answered is none of it (more may be answered later), nor is the server's address.
    """
    selftalk = cfg.mode == "selftalk"
    return {
        "model": model_name(cfg),
        "seed_dataset": public_name(cfg.seed_dataset),
        "type": cfg.type,
        "chat_template": cfg.chat_template,
        **_sampling(cfg, dtype),
        "drop_truncated": cfg.drop_truncated,
        **_said(split=cfg.split, max_turns=cfg.max_turns, heads=None if cfg.heads is None else public_name(cfg.heads)),
        **_said(drop_looping=cfg.drop_looping or None, engine="openai" if cfg.engine == "openai" else None),
        **_said(mode=cfg.mode if selftalk else None, rounds=cfg.rounds if selftalk else None),
    }


def _sampling(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    return {
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
        "max_new_tokens": cfg.max_new_tokens,
        "seed": cfg.seed,
        **_said(dtype=dtype, top_k=cfg.top_k),
    }


def _said(**settings: Any) -> dict[str, Any]:
    """Those settings that say something: a file that knows fewer of them stays the same, byte for byte."""
    return {name: value for name, value in settings.items() if value is not None}


def model_name(cfg: SelfDistillConfig) -> str:
    """How the lines name the model; a run's trained backbone goes by the run."""
    if cfg.base_model is not None:
        return cfg.base_model if cfg.engine == "openai" else public_name(cfg.base_model)
    paths = resolve_model_paths(cfg)
    trained = paths.adapter is not None or Path(paths.base_model).is_relative_to(paths.home)
    return public_name(str(paths.home) if trained else paths.base_model)


def public_name(name: str) -> str:
    """A name that may leave this machine: a hub name or a relative path as it is, else a path within the project
    or the working directory, else the last part of it."""
    path = resolve_path(name)
    if path is None or not Path(name).expanduser().is_absolute():
        return name
    for root in (PROJECT_ROOT, Path.cwd()):
        if path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
    return path.name


def open_engine(cfg: SelfDistillConfig, dtype: str | None) -> Engine:
    """Whoever answers, ready to be asked.

    Raises:
        BackboneError, CheckpointError, DataError: the model, run or chat template cannot be used.
        ConfigError: no address of a server.
    """
    if cfg.engine == "openai":
        return _server(cfg)
    from medusa_train.checkpoint.load import load_with_draft
    from medusa_train.selfdistill.hf_engine import HFEngine

    assert dtype is not None  # only a server's is unknown
    _take_own_device()
    paths = resolve_model_paths(cfg)
    # float32 is chosen where the answers must be the same on other machines; whether to prepack is measured on this one
    subject = load_with_draft(paths, dtype, prepack=dtype != "float32")
    return HFEngine(
        subject.backbone,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k or 0,
        max_new_tokens=cfg.max_new_tokens,
        chat_template=paths.chat_template,
        batch_size=cfg.batch_size or (1 if dtype == "float32" or subject.draft is not None else BATCH),
        draft=subject.draft,
        tree=subject.tree,
    )


def resolve_model_paths(cfg: SelfDistillConfig) -> ModelPaths:
    """Where the model of this process lies; a run's backbone is loaded as it was trained, adapter folded in.

    Raises:
        CheckpointError: the heads or the run that are named are not there.
    """
    from medusa_train.checkpoint.resolve import resolve_model

    model, base = cfg.heads, cfg.base_model
    if model is None and base is not None and _is_run(base):
        model, base = base, None
    paths = resolve_model(model, base, None, chat_template=cfg.chat_template, trust_remote_code=cfg.trust_remote_code)
    return paths if cfg.heads is not None else replace(paths, heads=None, tree=None)


def _is_run(name: str) -> bool:
    found = resolve_path(name)
    return found is not None and (found / "heads").is_dir() and (found / "config.yaml").is_file()


def _server(cfg: SelfDistillConfig) -> Engine:
    from medusa_train.openai_client import OpenAIClient
    from medusa_train.selfdistill.openai_engine import OpenAIEngine, ServerSampling

    assert cfg.server_url is not None  # checked with the configuration
    server = OpenAIClient(
        cfg.server_url, key_variable=cfg.api_key_env, timeout=cfg.request_timeout, retry_seconds=cfg.retry_seconds
    )
    sampling = ServerSampling(cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k)
    return OpenAIEngine(server, model_name(cfg), sampling, cfg.concurrency)


def _take_own_device() -> None:
    """One GPU for each process of a launcher; CPUs are shared."""
    import torch

    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
