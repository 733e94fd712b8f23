"""Ask a server the questions of a bench, a number of conversations at once: answers, times,
counters, and their log.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise, zip_longest
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from medusa_train.data.conversation import REASONING_TAGS, Message
from medusa_train.errors import ServerError
from medusa_train.evaluation.questions import Question
from medusa_train.selfdistill.replay import Answer
from medusa_train.selfdistill.server_answers import parse_answer, request_body
from medusa_train.servers.client import Servers
from medusa_train.servers.responses import RequestRejected

_SAMPLE = re.compile(r'^vllm:(\w+?)_total(?:\{(?:.*?position="(\d+)")?.*\})?\s+(\S+)', re.MULTILINE)


@dataclass(frozen=True)
class DraftCounts:
    """Totals since the server was started, or between two moments; summed over the server's engines."""

    drafts: int = 0  # verified ones, one per decoding step and sequence
    accepted: tuple[int, ...] = ()  # by position in the draft
    generated: int = 0  # tokens of all requests

    def plus(self, other: DraftCounts, sign: int = 1) -> DraftCounts:
        """Return the sum of both, or with `sign` -1 what was counted after `other`."""
        accepted = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return DraftCounts(
            self.drafts + sign * other.drafts,
            tuple(one + sign * two for one, two in accepted),
            self.generated + sign * other.generated,
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per verified draft: the accepted ones and one of the target model; None without
        drafts.
        """
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts whose token at each position was accepted; empty without drafts."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    @property
    def speculative_tokens(self) -> int | None:
        """num_speculative_tokens, the positions that are counted; None without drafts."""
        return len(self.accepted) if self.drafts else None


def parse_metrics(page: str) -> DraftCounts | None:
    """Parse a `/metrics` page; None if it is not vLLM's.

    A vLLM without speculative decoding has no drafts.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    accepted: defaultdict[int, float] = defaultdict(float)
    for name, position, number in _SAMPLE.findall(page):
        totals[name] += float(number)
        if position and name == "spec_decode_num_accepted_tokens_per_pos":
            accepted[int(position)] += float(number)
    if not totals:
        return None
    per_position = (int(accepted[index]) for index in range(max(accepted, default=-1) + 1))
    drafts, generated = totals["spec_decode_num_drafts"], totals["generation_tokens"]
    return DraftCounts(int(drafts), tuple(per_position), int(generated))


@dataclass(frozen=True)
class ServedAnswer:
    """One turn of a question, answered by a server."""

    question_id: int | str
    turn: int  # from 1
    repeat: int  # how often the question was asked before at this concurrency
    text: str
    tokens: int  # by the server's `usage`
    started: float  # seconds from the beginning of the block to the request
    # seconds from the request to the first text; None for an empty answer
    first_token: float | None
    seconds: float  # from the request to the end
    category: str = ""  # of the question


@dataclass(frozen=True)
class Measurement:
    """The answers of one server to one block of conversations."""

    answers: tuple[ServedAnswer, ...]
    #: Number of prompts that do not fit into the context, or of chats with tools that the server
    #: rejects; their conversations end before them.
    skipped: int = 0
    drafts: DraftCounts | None = None  # difference of the server's counters; None if it has none


class Block(NamedTuple):
    """Key of a block; a session is the servers that ran at the same time."""

    session: str
    concurrency: int
    number: int


#: An entry of the log: the finished measurements of a block by the name of their servers, or a
# note for the report.
BlockEntry = tuple[Block, dict[str, Measurement]] | str
BLOCK_ENTRY: TypeAdapter[BlockEntry] = TypeAdapter(BlockEntry)


WARM_UP_TOKENS = 32
#: Least number of conversations per concurrent one, in a block and in all; shorter blocks are
# mostly ramp-up and tail.
BLOCK_LENGTH, LEAST_CONVERSATIONS = 2, 10

#: Names of servers: without heads, with heads, and one that is measured alone.
PLAIN, HEADS, ALONE = "plain", "heads", "server"


class BlockFault(Exception):
    """Requests of a block failed, so its times cannot be used; the message says why."""


class Conversation(NamedTuple):
    """A question that is asked for the `repeat`-th time at one concurrency, counted from 0."""

    question: Question
    repeat: int


@dataclass(frozen=True)
class Target:
    """A server to measure."""

    name: str  # in reports
    url: str  # with the version
    model: str  # its name on the server
    is_vllm: bool  # whether it takes vLLM's parameters


@dataclass(frozen=True)
class MeasuredServers:
    """The servers of one measurement, and what is known of them.

    Attributes:
        sessions: by name, a context manager in which servers run at the same time, in the order to
            measure them.
        settings: what answers and times depend on.
        metadata: their part of `meta` of served.json.
        notes: remarks for the report.
        stop: ends what the sessions started.
    """

    sessions: Mapping[str, Callable[[], AbstractContextManager[Sequence[Target]]]]
    settings: Mapping[str, Any]
    metadata: Mapping[str, Any]
    notes: Sequence[str] = ()
    stop: Callable[[], None] = lambda: None


def plan_blocks(questions: Sequence[Question], concurrency: int) -> list[list[Conversation]]:
    """Divide the conversations of one concurrency into blocks, which servers are given in turns.

    A short bench is repeated until there are `LEAST_CONVERSATIONS` times as many conversations as
    run concurrently. Questions of chats with tools share no block with those of another category: a
    server counts its drafts for a whole block.
    """
    repeats = -(-LEAST_CONVERSATIONS * concurrency // len(questions))
    groups: dict[str, list[Conversation]] = {}
    for repeat in range(repeats):
        for question in questions:
            kind = question.category if question.messages else ""
            groups.setdefault(kind, []).append(Conversation(question, repeat))
    blocks = []
    for conversations in groups.values():
        count = max(1, len(conversations) // (BLOCK_LENGTH * concurrency))
        bounds = [index * len(conversations) // count for index in range(count + 1)]
        blocks += [conversations[start:end] for start, end in pairwise(bounds)]
    return blocks


@dataclass
class ServerBench:
    """Measures one server, as many conversations at a time as `servers` takes requests.

    Its connections are open within `async with bench.servers`.

    Attributes:
        parameters: of every request, see `request_parameters`.
        seed: every turn derives its seed of sampling from it.
        rejected_tools: why the server rejected a chat with tools; "" if it did not so far.
    """

    target: Target
    servers: Servers
    parameters: Mapping[str, Any]
    seed: int
    rejected_tools: str = ""

    async def warm_up(self, questions: Sequence[Question], count: int) -> None:
        """Ask for the beginnings of `count` answers, concurrently."""
        length = min(WARM_UP_TOKENS, self.parameters["max_tokens"])

        async def ask(question: Question) -> None:
            try:
                await self._ask(
                    question, question.opening, 0, secrets.token_hex(8), max_tokens=length
                )
            except RequestRejected as rejected:
                if not (rejected.too_long or question.messages):
                    raise ServerError(
                        f"server {self.target.url}: rejects requests: {rejected}"
                    ) from None

        await self.servers.for_each(ask, islice(cycle(questions), count))

    async def measure(
        self,
        conversations: Sequence[Conversation],
        on_conversation: Callable[[int], None] = lambda tokens: None,
    ) -> Measurement:
        """Answer a block; `on_conversation` is called with the number of tokens of every finished
        conversation.

        Raises:
            BlockFault: requests were rejected or had to be repeated, or the server's counters fell.
            ServerError: the server does not answer any more.
        """
        retries = self.servers.retries
        before = await self._read_counts()
        began = time.perf_counter()
        answers: list[ServedAnswer] = []
        skipped = 0
        faults: list[str] = []

        async def converse(conversation: Conversation) -> None:
            nonlocal skipped
            question, _ = conversation
            turns: list[ServedAnswer] = []
            try:
                await self._converse(conversation, began, turns)
            except RequestRejected as rejected:
                if rejected.too_long:
                    skipped += 1
                elif question.messages:  # a chat template may not render the calls in a chat
                    skipped += 1
                    self.rejected_tools = self.rejected_tools or str(rejected)
                else:  # the others go on, so that none is under way at the end
                    faults.append(str(rejected))
            answers.extend(turns)
            on_conversation(sum(answer.tokens for answer in turns))

        await self.servers.for_each(converse, conversations)
        if faults or self.servers.retries > retries:
            raise BlockFault(faults[0] if faults else self.servers.last_fault)
        after = await self._read_counts()
        drafts = after.plus(before, -1) if before and after else None
        is_missing = (before is None) != (after is None)
        if is_missing or (drafts and min(drafts.drafts, drafts.generated, *drafts.accepted) < 0):
            raise BlockFault(
                "/metrics did not answer, or its counters fell, as after a restart of the server"
            )
        return Measurement(tuple(answers), skipped, drafts)

    async def _read_counts(self) -> DraftCounts | None:
        page = await self.servers.servers[0].read_metrics()
        return None if page is None else parse_metrics(page)

    async def _converse(
        self, conversation: Conversation, began: float, answers: list[ServedAnswer]
    ) -> None:
        """Ask all turns of a question, with the server's own answers as history; they are appended
        to `answers`.
        """
        question, repeat = conversation
        # later turns may find their history in the prefix cache, other conversations not
        salt = secrets.token_hex(8)
        messages: list[Message] = []
        for turn in range(1, 1 + len(question.turns)):
            messages += question.asked(turn)
            name = f"{question.question_id} {turn} {repeat}"
            seed = zlib.crc32(name.encode(), self.seed & 0xFFFFFFFF)
            answer, response = await self._ask(question, messages, seed, salt)
            started, first, finished = response["timing"].values()
            # reasoning without an answer; empty messages may be rejected in the next request
            text = answer.text or response["choices"][0]["message"]["reasoning_content"]
            answers.append(
                ServedAnswer(
                    question.question_id,
                    turn,
                    repeat,
                    text,
                    answer.completion_tokens,
                    started - began,
                    None if first is None else first - started,
                    finished - started,
                    question.category,
                )
            )
            messages.append(Message("assistant", text))

    async def _ask(
        self, question: Question, messages: Sequence[Message], seed: int, salt: str, **changes: Any
    ) -> tuple[Answer, dict[str, Any]]:
        """Return one streamed answer to a question, parsed and as `read_stream` returns it."""
        body = request_body(self.parameters, messages, seed, question.variables)
        body |= {"model": self.target.model, **changes}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.target.is_vllm:
            body["cache_salt"] = salt
        response = await self.servers.complete(body)
        limit = body["max_tokens"]
        answer = parse_answer(response, REASONING_TAGS, limit)
        wrong = None
        if response["timing"]["first_token"] is not None and not answer.completion_tokens:
            wrong = (
                "does not report the length of streamed answers (`usage`), so tokens per second"
                " cannot be measured"
            )
        elif answer.completion_tokens > limit:
            wrong = (
                f"reports {answer.completion_tokens} tokens for an answer of at most {limit}"
                " (max_tokens), so its figures cannot be trusted"
            )
        if wrong is not None:
            raise ServerError(f"server {self.target.url}: {wrong}")
        return answer, response
