"""A run of self-distillation, from the configuration to the written conversations."""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from medusa_train.config.paths import expand_user, public_name
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import NOTABLE_LOOPING
from medusa_train.data.records import Unread, first_problems
from medusa_train.data.sources import open_prompts
from medusa_train.errors import ConfigError, DataError
from medusa_train.progress import LoadingProgress, RunProgress, duration
from medusa_train.selfdistill.answers import DropRules, Engine, Request
from medusa_train.selfdistill.engines import (
    model_name,
    resolve_model_paths,
    server_sampling,
    weights_digest,
)
from medusa_train.selfdistill.modes import ChatSteps, GeneratedChat, question, replay, selftalk
from medusa_train.selfdistill.output import OutputWriter
from medusa_train.selfdistill.prompts import (
    Prompt,
    Selection,
    Shard,
    read_prompts,
    select_prompts,
    short_name,
)

PREVIEWED = 3  # prompts


def output_path(cfg: SelfDistillConfig) -> Path:
    """Return the output file, without the shard."""
    if cfg.output is not None:
        return expand_user(cfg.output)
    name = "questions" if cfg.mode == "questions" else short_name(cfg.seed_dataset)
    return Path("runs") / "selfdistill" / f"{name}.jsonl"


def resolve_shard(text: str | None) -> Shard | None:
    """Return the shard of this process: `text` (i/n), else by the rank that torchrun or DeepSpeed
    set.
    """
    if text is not None:
        return Shard.parse(text)
    world = _number_from_env("WORLD_SIZE", 1)
    rank = _number_from_env("RANK", 0)
    if not 0 <= rank < max(world, 1):
        raise ConfigError(f"invalid process environment: rank {rank} of {world} processes")
    return Shard(rank + 1, world) if world > 1 else None


def _number_from_env(name: str, default: int) -> int:
    """Return an environment variable that launchers set; ConfigError if it is not a number."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.strip().isdigit():
        raise ConfigError(f"environment variable {name}={text!r} is not a number")
    return int(text)


def load_prompts(
    cfg: SelfDistillConfig, progress: RunProgress
) -> tuple[list[Prompt], Counter[str]]:
    """Return the selected prompts of all shards, and the number of skipped ones by reason."""
    if cfg.mode == "questions":  # the model writes the prompts
        assert cfg.limit is not None  # checked with the configuration
        return [
            Prompt(f"question-{number:06d}", (), source="by the model")
            for number in range(cfg.limit)
        ], Counter()
    invalid: list[str] | None = [] if cfg.skip_bad_records else None
    with LoadingProgress(progress) as shown:
        source = open_prompts(cfg.seed_dataset, cfg.split, shown.update)
        unread = Unread()
        prompts = read_prompts(source, cfg.type, skipped=invalid, unread=unread)
    for note in (*source.notes, *unread.describe(cfg.seed_dataset)):
        progress.print(note)
    selection = Selection(
        cfg.max_turns, cfg.min_chars, cfg.max_chars, cfg.sample, cfg.sample_seed, cfg.limit
    )
    selected, skipped = select_prompts(prompts, selection)
    if invalid:
        progress.print("\n".join(["skipped invalid records:", *first_problems(invalid)]))
        skipped["broken"] += len(invalid)
    if not selected:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise DataError(
            f"{cfg.seed_dataset}: no prompts are left ({reasons}); change min_chars, max_chars,"
            " limit ..."
        )
    return selected, skipped


def build_mode(cfg: SelfDistillConfig) -> Callable[[Prompt], ChatSteps]:
    """Return the generator function of the configured mode, with its settings applied."""
    rules = DropRules(cfg.drop_truncated, cfg.drop_looping)
    if cfg.mode == "selftalk":
        return partial(selftalk, random_seed=cfg.seed, rules=rules, rounds=cfg.rounds)
    return partial(
        question if cfg.mode == "questions" else replay, random_seed=cfg.seed, rules=rules
    )


def preview(cfg: SelfDistillConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of the first request of each of the first prompts."""
    requests = [(prompt, next(build_mode(cfg)(prompt))) for prompt in prompts[:PREVIEWED]]
    if cfg.engine == "openai":
        for prompt, request in requests:
            body = server_sampling(cfg).body(model_name(cfg), request)
            yield _title(prompt), json.dumps(body, indent=2, ensure_ascii=False)
        return
    from medusa_train.models.loading import load_tokenizer, resolve_backbone
    from medusa_train.selfdistill.chat_prompting import ChatPrompting

    paths = resolve_model_paths(cfg)
    where, _ = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    tokenizer = load_tokenizer(
        where, trust_remote_code=paths.trust_remote_code, special_tokens=paths.special_tokens
    )
    prompting = ChatPrompting(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    for prompt, request in requests:
        try:
            yield (
                f"{_title(prompt)}, {len(prompting.prompt(request))} tokens",
                prompting.text(request),
            )
        except DataError as error:  # counted as refused by the run
            yield _title(prompt), str(error)


def _title(prompt: Prompt) -> str:
    turns = f"{len(prompt.turns)} turns" if len(prompt.turns) > 1 else "1 turn"
    return f"{prompt.id} ({prompt.source}), {turns}"


def record_metadata(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return the fields of every output line that tell how it was generated."""
    metadata: dict[str, Any] = {"model": model_name(cfg), "sampling": _sampling(cfg, dtype)}
    if cfg.mode != "replay":
        metadata["mode"] = cfg.mode
    return metadata


def output_settings(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    """Return all settings that a conversation depends on; missing keys equal None.

    A key at its default is left out if it was added later, so that the files of earlier runs can be
    continued. The selection of prompts is not among them, so that a run can be extended; nor is the
    server's address.
    """
    default_tags = SelfDistillConfig.model_fields["reasoning_tags"].default
    return _without_none(
        model=model_name(cfg),
        seed_dataset=None if cfg.mode == "questions" else public_name(cfg.seed_dataset),
        type=cfg.type,
        chat_template=cfg.chat_template,
        **_sampling(cfg, dtype),
        drop_truncated=cfg.drop_truncated,
        split=cfg.split,
        max_turns=cfg.max_turns,
        heads=None if cfg.heads is None else public_name(cfg.heads),
        weights=weights_digest(cfg),
        drop_looping=cfg.drop_looping or None,
        engine="openai" if cfg.engine == "openai" else None,
        chat_template_kwargs=cfg.chat_template_kwargs,
        special_tokens=cfg.special_tokens,
        stop_tokens=_added_stop_tokens(cfg),
        reasoning_tags=None if cfg.reasoning_tags == default_tags else list(cfg.reasoning_tags),
        mode=None if cfg.mode == "replay" else cfg.mode,
        rounds=cfg.rounds if cfg.mode == "selftalk" else None,
    )


def _added_stop_tokens(cfg: SelfDistillConfig) -> list[int] | None:
    """Return the tokens that end answers beside those of the generation config, at which earlier
    versions did not stop; None without any, and for servers.
    """
    if cfg.engine == "openai":
        return None
    from medusa_train.checkpoint.load_model import added_stop_tokens

    return list(added_stop_tokens(resolve_model_paths(cfg))) or None


def _sampling(cfg: SelfDistillConfig, dtype: str | None) -> dict[str, Any]:
    return _without_none(
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        max_new_tokens=cfg.max_new_tokens,
        seed=cfg.seed,
        dtype=dtype,
        top_k=cfg.top_k,
    )


def _without_none(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


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

    As many conversations are in progress as the engine has capacity for. Each is written when it is
    complete; an engine of capacity 1 writes them in the order of the prompts.

    Args:
        mode: `replay`, `selftalk` or `question`, with its settings.
        metadata: fields of every output line besides the conversation, see `record_metadata`.
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
    """Append a conversation to the output, or report it as dropped if nothing in it is kept."""
    identity = {"id": chat.prompt.id, "seed_id": chat.prompt.id}
    dropped = (
        {"dropped": {"reason": chat.dropped, "turns": chat.dropped_turns}} if chat.dropped else {}
    )
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
            "messages": [
                one.as_dict()
                | ({} if one.token_ids is None else {"token_ids": list(one.token_ids)})
                for one in chat.messages
            ],
            **metadata,
            **answers,
            **dropped,
        }
    )


@dataclass
class RunStats:
    """Statistics of a run."""

    total: int = 0  # prompts
    earlier: int = 0  # of them finished by an earlier run
    written: int = 0  # conversations
    turns: int = 0  # answers in them
    cut: int = 0  # written conversations with dropped turns
    looping: int = 0  # generated answers that loop, dropped ones included
    empty: int = 0  # conversations of which nothing is kept
    dropped: Counter[str] = field(default_factory=Counter)  # turns by `DropReason`
    tokens: int = 0  # generated ones, dropped answers included
    started: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> int:
        """Prompts that are done."""
        return self.earlier + self.written + self.empty

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

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

    def line(self) -> str:
        """Format the figures beside the bar."""
        dropped = ", ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
        return f"{self.rate} tokens/s" + (f", dropped turns: {dropped}" if dropped else "")

    @property
    def rate(self) -> str:
        """Generated tokens per second."""
        return f"{self.tokens / max(self.seconds, 1e-9):,.0f}"

    def looping_warning(self, dropped: bool) -> str | None:
        """Return a line for the user if many answers loop, and say whether they were `dropped`."""
        # mode questions: no turns
        share = self.looping / max(1, max(self.turns, self.written) + self.cut + self.empty)
        if share <= NOTABLE_LOOPING:
            return None
        effect = (
            "were dropped"
            if dropped
            else "are kept, and heads would learn to repeat (drop_looping: false)"
        )
        advice = (
            "greedy answers of small models often do; sampling at a temperature of 0.3 to 0.7 loops"
            " less"
        )
        return f"warning: {self.looping:,} answers ({share:.0%}) loop and {effect}; {advice}"


def summary(stats: RunStats, engine_stats: Mapping[str, str]) -> Table:
    """Return the table at the end of a run, with the statistics of its engine in the last rows."""
    counts = {
        "prompts": stats.total,
        "done by an earlier run": stats.earlier,
        "conversations written": stats.written,
        "answers in them": stats.turns,
        "of them with dropped turns": stats.cut,
        "looping answers": stats.looping,
        "conversations dropped": stats.empty,
        **{f"dropped turns: {why}": count for why, count in sorted(stats.dropped.items())},
    }
    always = ("prompts", "conversations written")
    rows = {name: f"{count:,}" for name, count in counts.items() if count or name in always}
    if stats.dropped["length"]:
        rows["to keep such answers"] = "raise max_new_tokens, or set drop_truncated: false"
    rows |= {"tokens generated": f"{stats.tokens:,}", "time": duration(stats.seconds)}
    rows |= {"tokens per second": stats.rate, **engine_stats}
    table = Table("name", title="self-distillation", title_justify="left", show_header=False)
    table.add_column("value", justify="right")
    for row in rows.items():
        table.add_row(*row)
    return table
