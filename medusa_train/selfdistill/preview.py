"""Output for the terminal: first prompts (`--dry-run`), progress and summary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.hub import hub_is_unreachable
from medusa_train.progress import duration
from medusa_train.selfdistill.engines import Request
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.run import RunStats, build_mode, model_name, resolve_model_paths, server_sampling

SHOWN = 3


def preview(cfg: SelfDistillConfig, prompts: Sequence[Prompt]) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of the first request of each of the first prompts.

    Raises:
        BackboneError, DataError, ConfigError: the model does not exist, or has no suitable chat template.
    """
    requests = [(prompt, next(build_mode(cfg)(prompt))) for prompt in prompts[:SHOWN]]
    if cfg.engine == "openai":
        yield from ((_title(prompt), _body(cfg, request)) for prompt, request in requests)
        return
    from transformers import AutoTokenizer

    from medusa_train.models.loading import resolve_backbone
    from medusa_train.selfdistill.chat_prompting import ChatPrompting

    paths = resolve_model_paths(cfg)
    where, _ = resolve_backbone(paths.base_model, trust_remote_code=paths.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        where, trust_remote_code=paths.trust_remote_code, local_files_only=hub_is_unreachable()
    )
    prompting = ChatPrompting(tokenizer, paths.chat_template, paths.chat_template_kwargs)
    for prompt, request in requests:
        yield f"{_title(prompt)}, {len(prompting.prompt(request))} tokens", prompting.text(request)


def _title(prompt: Prompt) -> str:
    turns = f"{len(prompt.turns)} turns" if len(prompt.turns) > 1 else "1 turn"
    return f"{prompt.id} ({prompt.source}), {turns}"


def _body(cfg: SelfDistillConfig, request: Request) -> str:
    return json.dumps(server_sampling(cfg).body(model_name(cfg), request), indent=2, ensure_ascii=False)


def describe(stats: RunStats) -> str:
    """Format tokens per second and dropped turns for the progress line."""
    parts = [f"{stats.tokens_per_s:,.0f} tokens/s"]
    if stats.dropped:
        parts.append("dropped turns: " + ", ".join(f"{count} {why}" for why, count in sorted(stats.dropped.items())))
    return ", ".join(parts)


def summary(stats: RunStats, engine_stats: Mapping[str, str] | None = None) -> Table:
    """Return the table at the end of a run, with the statistics of its engine in the last rows."""
    table = Table(title="self-distillation", title_justify="left", show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    rows: list[tuple[str, str]] = [("prompts", f"{stats.total:,}")]
    if stats.earlier:
        rows.append(("done by an earlier run", f"{stats.earlier:,}"))
    rows.append(("conversations written", f"{stats.written:,}"))
    if stats.turns:
        rows.append(("answers in them", f"{stats.turns:,}"))
    if stats.cut:
        rows.append(("of them with dropped turns", f"{stats.cut:,}"))
    if stats.looping:
        rows.append(("looping answers", f"{stats.looping:,}"))
    if stats.empty:
        rows.append(("conversations dropped", f"{stats.empty:,}"))
    rows += [(f"dropped turns: {why}", f"{count:,}") for why, count in sorted(stats.dropped.items())]
    if stats.dropped["length"]:
        rows.append(("to keep such answers", "raise max_new_tokens, or set drop_truncated: false"))
    rows += [
        ("tokens generated", f"{stats.tokens:,}"),
        ("time", duration(stats.seconds)),
        ("tokens per second", f"{stats.tokens_per_s:,.0f}"),
        *(engine_stats or {}).items(),
    ]
    for row in rows:
        table.add_row(*row)
    return table
