"""Which seeds of a set are taken: distinct, of the length asked for, drawn at random, shared out among processes.

Pure functions; knows no file and no model. What becomes of one seed never depends on which others are taken.
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
    """Part `index` (from 1) of `count`. Seeds are shared out by their id, so that the other choices change nothing."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read `i/n`, 1/n being the first.

        Raises:
            ConfigError: it is not of that form, or i is not in 1..n.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--shard {text}: expected i/n with i from 1 to n, for example 1/4, 2/4, 3/4 and 4/4")
        return cls(int(match[1]), int(match[2]))

    def holds(self, seed: Prompt) -> bool:
        """Whether `seed` belongs to this part."""
        return _number("shard", seed.id) % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


@dataclass(frozen=True)
class Selection:
    """What is asked for; None leaves a question open.

    Attributes:
        max_turns: only the first so many of the user's turns.
        min_chars, max_chars: characters of the user's turns together.
        sample: draw so many seeds at random, by `sample_seed`; a larger sample holds the smaller ones.
        limit: only the first so many of those.
    """

    max_turns: int | None = None
    min_chars: int | None = None
    max_chars: int | None = None
    sample: int | None = None
    sample_seed: int = 42
    limit: int | None = None


def select_prompts(seeds: Sequence[Prompt], choice: Selection) -> tuple[list[Prompt], Counter[str]]:
    """The seeds that are asked for, in their order, and how many were left out as "repeated", "short" or "long".

    Of seeds in which the user says the same (under the same system prompt) the first is taken.
    """
    left_out: Counter[str] = Counter()
    chosen: list[Prompt] = []
    seen: set[tuple[str | None, tuple[str, ...]]] = set()
    for seed in seeds:
        if choice.max_turns is not None:
            seed = replace(seed, turns=seed.turns[: choice.max_turns])
        length = sum(map(len, seed.turns))
        if (seed.system, seed.turns) in seen:
            left_out["repeated"] += 1
        elif choice.min_chars is not None and length < choice.min_chars:
            left_out["short"] += 1
        elif choice.max_chars is not None and length > choice.max_chars:
            left_out["long"] += 1
        else:
            seen.add((seed.system, seed.turns))
            chosen.append(seed)
    if choice.sample is not None and choice.sample < len(chosen):
        drawn = sorted(chosen, key=lambda seed: _number(choice.sample_seed, seed.id))[: choice.sample]
        names = {seed.id for seed in drawn}
        chosen = [seed for seed in chosen if seed.id in names]
    return chosen[: choice.limit], left_out


def _number(salt: int | str, name: str) -> int:
    """A number that looks random and that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{salt}\x00{name}".encode()).digest()[:8], "big")
