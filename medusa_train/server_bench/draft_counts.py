"""Read vLLM's counters of speculative decoding from its `/metrics` page (Prometheus text format)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^vllm:(\w+?)_total(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Totals since the server was started, or between two moments (`since`); summed over the server's engines.

    Attributes:
        drafts: number of verified drafts, one per decoding step and sequence.
        draft_tokens: number of proposed tokens.
        accepted: number of accepted tokens by position in the draft.
        generated: tokens generated for all requests.
    """

    drafts: int
    draft_tokens: int
    accepted: tuple[int, ...]
    generated: int

    def since(self, earlier: DraftCounts) -> DraftCounts | None:
        """Return the counts after `earlier`; None if a counter is lower now, since the server was restarted."""
        width = max(len(self.accepted), len(earlier.accepted))
        now, before = (counts.accepted + (0,) * (width - len(counts.accepted)) for counts in (self, earlier))
        accepted = tuple(n - b for n, b in zip(now, before, strict=True))
        difference = DraftCounts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            accepted,
            self.generated - earlier.generated,
        )
        if min(difference.drafts, difference.draft_tokens, difference.generated, *accepted) < 0:
            return None
        return difference

    def __add__(self, other: DraftCounts) -> DraftCounts:
        width = max(len(self.accepted), len(other.accepted))
        one, two = (counts.accepted + (0,) * (width - len(counts.accepted)) for counts in (self, other))
        return DraftCounts(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            tuple(a + b for a, b in zip(one, two, strict=True)),
            self.generated + other.generated,
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per verified draft: the accepted ones and one of the backbone; None without drafts."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts whose token at each position was accepted; empty without drafts."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    @property
    def speculative_tokens(self) -> int | None:
        """Mean number of proposed tokens per draft, rounded: num_speculative_tokens; None without drafts."""
        return round(self.draft_tokens / self.drafts) if self.drafts else None


def parse_metrics(page: str) -> DraftCounts | None:
    """Parse a `/metrics` page; None if it is not vLLM's. A vLLM without speculative decoding has no drafts."""
    totals = {"spec_decode_num_drafts": 0, "spec_decode_num_draft_tokens": 0, "generation_tokens": 0}
    accepted: dict[int, int] = {}
    is_vllm = False
    for name, labels, number in _SAMPLE.findall(page):
        is_vllm = True
        if name in totals:
            totals[name] += int(float(number))
        elif name == "spec_decode_num_accepted_tokens_per_pos" and (position := _POSITION.search(labels)):
            index = int(position[1])
            accepted[index] = accepted.get(index, 0) + int(float(number))
    if not is_vllm:
        return None
    drafts, draft_tokens, generated = totals.values()
    per_position = tuple(accepted.get(index, 0) for index in range(max(accepted, default=-1) + 1))
    return DraftCounts(drafts, draft_tokens, per_position, generated)
