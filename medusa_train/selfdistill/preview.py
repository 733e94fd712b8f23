"""What `--dry-run` shows: the first prompts as whoever answers would get them. Loads no weights, asks no server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.hub import hub_is_unreachable
from medusa_train.progress import duration
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.run import RunStats, build_mode, model_name, resolve_model_paths

SHOWN = 3


def preview(cfg: SelfDistillConfig, seeds: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """(title, text) of the first request of each of the first seeds.

    Raises:
        BackboneError, DataError, ConfigError: there is no such model, or no chat template that takes the chat.
    """
    requests = [(seed, next(build_mode(cfg)(seed))) for seed in seeds[:SHOWN]]
    if cfg.engine == "openai":
        yield from ((_title(seed), _body(cfg, request)) for seed, request in requests)
        return
    from transformers import AutoTokenizer

    from medusa_train.models.loading import resolve_backbone
    from medusa_train.selfdistill.chat_prompting import ChatPrompting

    paths = resolve_model_paths(cfg)
    where, _ = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        where, trust_remote_code=paths.trust_remote_code, local_files_only=hub_is_unreachable()
    )
    speakers = ChatPrompting(tokenizer, paths.chat_template)
    for seed, request in requests:
        yield f"{_title(seed)}, {len(speakers.prompt(request))} tokens", speakers.text(request)


def _title(seed: Prompt) -> str:
    turns = f"{len(seed.turns)} turns" if len(seed.turns) > 1 else "1 turn"
    return f"{seed.id} ({seed.source}), {turns}"


def _body(cfg: SelfDistillConfig, request: Request) -> str:
    from medusa_train.selfdistill.openai_engine import ServerSampling

    sampling = ServerSampling(cfg.temperature, cfg.max_new_tokens, cfg.top_p, cfg.top_k)
    return json.dumps(sampling.body(model_name(cfg), request), indent=2, ensure_ascii=False)


def describe(stats: RunStats) -> str:
    """Format tokens per second and dropped turns for the progress line."""
    parts = [f"{stats.tokens_per_s:,.0f} tokens/s"]
    if stats.dropped:
        parts.append("dropped turns: " + ", ".join(f"{count} {why}" for why, count in sorted(stats.dropped.items())))
    return ", ".join(parts)


def summary(stats: RunStats, figures: Mapping[str, str] | None = None) -> Table:
    """The table at the end of a run, with the `figures` of its engine below."""
    table = Table(title="self-distillation", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("how many", justify="right")
    rows: list[tuple[str, str]] = [("seed conversations", f"{stats.total:,}")]
    if stats.earlier:
        rows.append(("done by an earlier run", f"{stats.earlier:,}"))
    rows += [("conversations written", f"{stats.written:,}"), ("answers in them", f"{stats.turns:,}")]
    if stats.cut:
        rows.append(("of them shorter than their seed", f"{stats.cut:,}"))
    if stats.looping:
        rows.append(("answers that loop", f"{stats.looping:,}"))
    if stats.empty:
        rows.append(("conversations with no answer left", f"{stats.empty:,}"))
    rows += [(f"dropped turns: {why}", f"{count:,}") for why, count in sorted(stats.dropped.items())]
    rows += [
        ("tokens generated", f"{stats.tokens:,}"),
        ("time", duration(stats.seconds)),
        ("tokens per second", f"{stats.tokens_per_s:,.0f}"),
        *(figures or {}).items(),
    ]
    for row in rows:
        table.add_row(*row)
    return table
