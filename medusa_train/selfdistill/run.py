"""A run of self-distillation: generate, write and count conversations; report dropped ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import NOTABLE_LOOPING
from medusa_train.progress import duration
from medusa_train.selfdistill.output import OutputWriter, dropped_path, write_chat
from medusa_train.selfdistill.prompts import Prompt
from medusa_train.selfdistill.replay import (
    ChatSteps,
    GeneratedAnswer,
    GeneratedChat,
    RunningChat,
    is_asked_again,
)
from medusa_train.selfdistill.settings import model_name

MOST = 0.5  # warn if more than this share of the prompts was dropped


class AnswerSource(Protocol):
    """Generates answers: a model in this process, or servers."""

    def generate(
        self, chats: Iterator[RunningChat], on_answer: Callable[[GeneratedAnswer], None]
    ) -> None:
        """Generate all conversations, several at a time; `on_answer` is called with every
        answer.
        """

    def stats(self) -> Mapping[str, str]:
        """Return statistics for the summary, by name."""


def open_answer_source(
    cfg: SelfDistillConfig, dtype: str | None, note: Callable[[str], None]
) -> AnswerSource:
    """Load the model, or prepare the connections to the servers, as configured.

    `note` is called with lines about unused settings, and about servers that do not answer.
    """
    if cfg.engine != "openai":
        from medusa_train.selfdistill.local import open_local

        assert dtype is not None  # None only for a server
        return open_local(cfg, dtype, note)
    from medusa_train.selfdistill.server_answers import ServerAnswers, request_parameters
    from medusa_train.servers.client import Servers

    assert cfg.server_url is not None  # checked with the configuration
    servers = Servers(
        cfg.server_url,
        key_variable=cfg.api_key_env,
        timeout=cfg.request_timeout,
        retry_seconds=cfg.retry_seconds,
        concurrency=cfg.concurrency,
        optional=["skip_special_tokens", "return_token_ids"],
        note=note,
    )
    keys = {"temperature", "max_new_tokens", "top_p", "top_k", "chat_template_kwargs"}
    parameters = request_parameters(**cfg.model_dump(include=keys))
    return ServerAnswers(servers, model_name(cfg), parameters, cfg.reasoning_tags)


def distill(
    prompts: Sequence[Prompt],
    source: AnswerSource,
    writer: OutputWriter,
    *,
    mode: Callable[[Prompt], ChatSteps],
    metadata: dict[str, Any],
    on_progress: Callable[[RunStats], None] = lambda stats: None,
) -> RunStats:
    """Generate a conversation for each of `prompts` that is not in `writer.done`, and write it when
    it is complete.

    Args:
        mode: `replay` or `selftalk`, with its settings.
        metadata: fields of every output line in addition to the conversation, see
            `record_metadata`.
    """
    todo = [prompt for prompt in prompts if prompt.id not in writer.done]
    stats = RunStats(total=len(prompts), earlier=len(prompts) - len(todo))
    on_progress(stats)

    def on_answer(answer: GeneratedAnswer) -> None:
        stats.tokens += answer.completion_tokens
        on_progress(stats)

    def run_chat(prompt: Prompt) -> RunningChat:
        chat = yield from mode(prompt)
        write_chat(chat, writer, metadata)
        stats.count(chat)
        on_progress(stats)

    source.generate(map(run_chat, todo), on_answer)
    return stats


@dataclass
class RunStats:
    """Statistics of a run."""

    total: int = 0  # number of prompts
    earlier: int = 0  # number of prompts that an earlier run finished
    written: int = 0  # number of written conversations
    turns: int = 0  # number of answers in the written conversations
    cut: int = 0  # number of written conversations with dropped turns
    looping: int = 0  # number of generated answers that loop, including dropped ones
    empty: int = 0  # number of conversations of which nothing is kept
    dropped: Counter[str] = field(default_factory=Counter)  # number of turns by `DropReason`
    tokens: int = 0  # number of generated tokens, including dropped answers
    started: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> int:
        """Number of finished prompts."""
        return self.earlier + self.written + self.empty

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def count(self, chat: GeneratedChat) -> None:
        """Add a finished conversation."""
        self.looping += chat.looping
        if chat.is_empty:
            self.empty += 1
        else:
            self.written += 1
            self.turns += len(chat.answers)
        if chat.dropped is not None:
            self.dropped[chat.dropped] += chat.dropped_turns
            self.cut += not chat.is_empty

    def line(self) -> str:
        """Format the numbers next to the progress bar."""
        line = f"{self.rate} tokens/s"
        if self.dropped:
            dropped = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
            line += f", dropped turns: {', '.join(dropped)}"
        return line

    @property
    def rate(self) -> str:
        """Generated tokens per second."""
        return f"{self.tokens / max(self.seconds, 1e-9):,.0f}"

    def looping_warning(self, dropped: bool) -> str | None:
        """Return a warning if many answers loop; it says whether they were `dropped`."""
        answers = self.turns + self.cut + self.empty  # number of generated answers
        share = self.looping / max(1, answers)
        if share <= NOTABLE_LOOPING:
            return None
        effect = "were dropped"
        if not dropped:
            effect = "are kept, and heads would learn to repeat (drop_looping: false)"
        return (
            f"warning: {self.looping:,} answers ({share:.0%}) loop and {effect}; greedy answers of"
            " small models often do; sampling at a temperature of 0.3 to 0.7 loops less"
        )


def summary(stats: RunStats, engine_stats: Mapping[str, str]) -> Table:
    """Return the table at the end of a run. Its last rows are the engine's statistics."""
    # 1. counts above zero
    counts = {
        "done by an earlier run": stats.earlier,
        "conversations written": stats.written,
        "answers in them": stats.turns,
        "of them with dropped turns": stats.cut,
        "looping answers": stats.looping,
        "conversations dropped": stats.empty,
        **{f"dropped turns: {reason}": n for reason, n in sorted(stats.dropped.items())},
    }
    rows = {"prompts": f"{stats.total:,}"}
    for name, count in counts.items():
        if count or name == "conversations written":
            rows[name] = f"{count:,}"
    # 2. advice and speed
    if stats.dropped["length"] or stats.dropped["possibly cut"]:
        rows["to keep such answers"] = "raise max_new_tokens, or set drop_truncated: false"
    rows["tokens generated"] = f"{stats.tokens:,}"
    rows["time"] = duration(stats.seconds)
    rows["tokens per second"] = stats.rate
    rows.update(engine_stats)
    # 3. the table
    table = Table("name", title="self-distillation", title_justify="left", show_header=False)
    table.add_column("value", justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def drop_report(output: Path, kept: int, reasons: Counter[str], cfg: SelfDistillConfig) -> str:
    """Say why most prompts of `output` have no kept answer, or why some got reasoning in place of
    an answer; "" if neither is the case.

    Args:
        kept: number of conversations in the file.
        reasons: number of dropped prompts by reason.
    """
    # 1. how many prompts have no answer
    count = reasons.total()
    if not kept:
        head = f"{output}: no answer was kept, so there is no file"
    elif count > MOST * (count + kept) or reasons["only reasoning"]:
        head = f"warning: {count:,} of {count + kept:,} prompts have no kept answer"
    else:
        return ""
    # 2. one line per reason, the most frequent first, and the file that lists the prompts
    lines = [f"{head}:" if reasons else head]
    for reason, number in reasons.most_common():
        lines.append(f"  {number:,} {reason}: {_remedy(reason, cfg)}")
    from_server = cfg.engine == "openai"
    if not all(is_asked_again(reason, from_server=from_server) for reason in reasons):
        lines.append(
            f"{dropped_path(output)} lists those that are not asked again. With other settings,"
            " choose another output=FILE.jsonl"
        )
    return "\n".join(lines)


def _remedy(reason: str, cfg: SelfDistillConfig) -> str:
    """Return what to do about prompts that were dropped for `reason`."""
    remedies = {
        "length": f"set max_new_tokens above {cfg.max_new_tokens}, or drop_truncated=false",
        "possibly cut": (
            "the server does not say that they are whole (no finish_reason, as many tokens as"
            " max_new_tokens, or reasoning that does not end); set max_new_tokens above"
            f" {cfg.max_new_tokens}, or keep them by drop_truncated=false"
        ),
        "context": (
            "the model's context is full; choose shorter prompts by max_chars or max_turns, or"
            " fewer max_new_tokens"
        ),
        "looping": (
            f"temperature is {cfg.temperature:g}, and at 0.3 to 0.7 fewer answers repeat"
            " themselves; or set drop_looping=false"
        ),
        "refused": "the chat template rejects these chats; choose another by chat_template",
        "empty": "the model ends at once; it may need another chat_template",
    }
    if cfg.engine == "openai":
        again = "then run the same command, which asks them again"
        remedies |= {
            "refused": f"the server rejected them; see its log, {again}",
            "failed": (
                "the server did not answer in time, or ended answers for an unknown reason; see"
                f" the table above and its log, {again}"
            ),
            "only reasoning": (
                "the text came as reasoning (`reasoning_content`), without an answer; start the"
                f" server without its reasoning parser, or with the model's, {again}. If the model"
                " is not to reason, set chat_template_kwargs={enable_thinking: false}"
            ),
            "empty": f"the server sent no text; check its chat template and model, {again}",
        }
    return remedies.get(reason, "see docs/how-to/make-training-data.md")
