"""Selection of prompts: deduplication, length limits, random samples and shards.

Whether and how a prompt is answered never depends on the other prompts selected.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_train.errors import ConfigError
from medusa_train.selfdistill.prompts import Prompt


@dataclass(frozen=True)
class Shard:
    """Part `index` (from 1) of `count`; a prompt's shard depends on its id only."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parse `i/n`.

        Raises:
            ConfigError: it has another form, or i is not in 1..n.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--shard {text}: expected i/n with i from 1 to n, for example 1/4, 2/4, 3/4 and 4/4")
        return cls(int(match[1]), int(match[2]))

    def holds(self, prompt: Prompt) -> bool:
        """Return whether `prompt` belongs to this shard."""
        return _hash("shard", prompt.id) % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class Selection:
    """Criteria for prompts; None for no restriction.

    Attributes:
        max_turns: keep only the first user turns.
        min_chars, max_chars: total characters of the user turns.
        sample: size of a random sample with `sample_seed`; larger samples contain the smaller ones.
        limit: keep only the first prompts of these.
    """

    max_turns: int | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    sample: int | None = None
    sample_seed: int = 42
    limit: int | None = None


def select_prompts(prompts: Sequence[Prompt], selection: Selection) -> tuple[list[Prompt], Counter[str]]:
    """Return the selected prompts in order, and the number of others by reason ("repeated", "short" or "long").

    Of prompts with the same turns and system message the first is kept.
    """
    skipped: Counter[str] = Counter()
    chosen: list[Prompt] = []
    seen: set[tuple[str | None, tuple[str, ...]]] = set()
    for prompt in prompts:
        if selection.max_turns is not None:
            prompt = replace(prompt, turns=prompt.turns[: selection.max_turns])
        length = sum(map(len, prompt.turns))
        if (prompt.system, prompt.turns) in seen:
            skipped["repeated"] += 1
        elif selection.min_chars is not None and length < selection.min_chars:
            skipped["short"] += 1
        elif selection.max_chars is not None and length > selection.max_chars:
            skipped["long"] += 1
        else:
            seen.add((prompt.system, prompt.turns))
            chosen.append(prompt)
    if selection.sample is not None and selection.sample < len(chosen):
        drawn = sorted(chosen, key=lambda prompt: _hash(selection.sample_seed, prompt.id))[: selection.sample]
        names = {prompt.id for prompt in drawn}
        chosen = [prompt for prompt in chosen if prompt.id in names]
    return chosen[: selection.limit], skipped


def _hash(salt: int | str, name: str) -> int:
    """Return a deterministic pseudo-random number."""
    return int.from_bytes(hashlib.sha256(f"{salt}\x00{name}".encode()).digest()[:8], "big")
