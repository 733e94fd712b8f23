"""What was measured of a server: its answers with their times, vLLM's counters of drafts, and the log of both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from medusa_train.evaluation.records import MeasurementLog

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
        difference = self._combined(earlier, -1)
        lowest = min(difference.drafts, difference.draft_tokens, difference.generated, *difference.accepted)
        return None if lowest < 0 else difference

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combined(other, 1)

    def _combined(self, other: DraftCounts, sign: int) -> DraftCounts:
        accepted = (one + sign * two for one, two in zip_longest(self.accepted, other.accepted, fillvalue=0))
        return DraftCounts(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            tuple(accepted),
            self.generated + sign * other.generated,
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


@dataclass(frozen=True)
class ServedAnswer:
    """One turn of a question, answered by a server.

    Attributes:
        turn: counted from 1.
        repeat: how often the question was asked before at this concurrency; greedy answers are equal.
        tokens: length by the server's `usage`.
        started: seconds from the beginning of the block to the request.
        first_token: seconds from the request to the first text; None for an empty answer.
        seconds: seconds from the request to the end of the answer.
    """

    question_id: int | str
    turn: int
    repeat: int
    text: str
    tokens: int
    started: float
    first_token: float | None
    seconds: float


@dataclass(frozen=True)
class Measurement:
    """The answers of one server to one block of conversations.

    Attributes:
        answers: in the order in which they ended.
        skipped: question and turn of prompts that do not fit into the context; their conversations end before them.
        drafts: difference of the server's counters; None if it has none.
    """

    answers: tuple[ServedAnswer, ...]
    skipped: tuple[tuple[int | str, int], ...] = ()
    drafts: DraftCounts | None = None


class Block(NamedTuple):
    """Key of a block: the servers that ran at the same time, the concurrency, and the block's number."""

    session: str
    concurrency: int
    number: int


_MEASURED = TypeAdapter(dict[str, Measurement])


class BlockLog(MeasurementLog["tuple[Block, dict[str, Measurement]] | str"]):
    """The measured blocks by the name of their servers, and remarks, appended as they are finished.

    Attributes:
        blocks: measurements by block and name of the server.
        notes: remarks on them, for the report.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(path, settings, _parse)
        self.notes = [entry for entry in self.entries if isinstance(entry, str)]
        self.blocks = dict(entry for entry in self.entries if not isinstance(entry, str))

    def start(self) -> None:
        """Replace the file by what was read of it, and open it for appending."""
        self.begin([*({"note": note} for note in self.notes), *(_block(*item) for item in self.blocks.items())])

    def append(self, block: Block, measured: Mapping[str, Measurement]) -> None:
        """Append one block."""
        self.blocks[block] = dict(measured)
        self.write(_block(block, measured))

    def note(self, text: str) -> None:
        """Append a remark, once."""
        if text not in self.notes:
            self.notes.append(text)
            self.write({"note": text})


def _block(block: Block, measured: Mapping[str, Measurement]) -> dict[str, Any]:
    return {"block": block, "measured": {name: asdict(value) for name, value in measured.items()}}


def _parse(record: dict[str, Any]) -> tuple[Block, dict[str, Measurement]] | str:
    if "note" in record:
        return str(record["note"])
    return Block(*record["block"]), _MEASURED.validate_python(record["measured"])
