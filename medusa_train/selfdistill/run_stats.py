"""What a run counts, and the table at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.table import Table

from medusa_train.data.conversation import NOTABLE_LOOPING
from medusa_train.progress import duration
from medusa_train.selfdistill.modes import GeneratedChat


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
        self.looping += chat.looping
        if chat.is_empty:
            self.empty += 1
        else:
            self.written += 1
            self.turns += chat.turns
        if chat.dropped is not None:
            self.dropped[chat.dropped] += chat.dropped_turns
            self.cut += not chat.is_empty

    def line(self) -> str:
        """Format the figures beside the bar."""
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
        """Return a line for the user if many answers loop, and say whether they were `dropped`."""
        answers = self.turns + self.cut + self.empty  # those that were generated
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
    """Return the table at the end of a run, with the statistics of its engine in the last rows."""
    # 1. counts, where there is something to count
    counts = {
        "prompts": stats.total,
        "done by an earlier run": stats.earlier,
        "conversations written": stats.written,
        "answers in them": stats.turns,
        "of them with dropped turns": stats.cut,
        "looping answers": stats.looping,
        "conversations dropped": stats.empty,
    }
    for reason, count in sorted(stats.dropped.items()):
        counts[f"dropped turns: {reason}"] = count
    always = ("prompts", "conversations written")
    rows = {name: f"{count:,}" for name, count in counts.items() if count or name in always}
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
