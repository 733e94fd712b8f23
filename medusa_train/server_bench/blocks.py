"""Divide the questions of a benchmark into blocks, let a server answer a block with several
concurrent conversations, and measure it: answers, times and the server's counters.
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
from medusa_train.selfdistill.replay import GeneratedAnswer
from medusa_train.selfdistill.server_answers import parse_answer, request_body
from medusa_train.servers.client import Servers
from medusa_train.servers.responses import RequestRejected

_SAMPLE = re.compile(r'^vllm:(\w+?)_total(?:\{(?:.*?position="(\d+)")?.*\})?\s+(\S+)', re.MULTILINE)


@dataclass(frozen=True)
class DraftCounts:
    """Totals since the server was started, or between two moments; summed over its engines."""

    drafts: int = 0  # number of verified drafts: one per decoding step and sequence
    accepted: tuple[int, ...] = ()  # number of accepted tokens by position in the draft
    generated: int = 0  # number of generated tokens of all requests

    def plus(self, other: DraftCounts, sign: int = 1) -> DraftCounts:
        """Return the sum of both totals; with `sign` -1 the difference, counted since `other`."""
        accepted = zip_longest(self.accepted, other.accepted, fillvalue=0)
        return DraftCounts(
            self.drafts + sign * other.drafts,
            tuple(one + sign * two for one, two in accepted),
            self.generated + sign * other.generated,
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per verified draft: the accepted tokens and one token of the target model. None
        without drafts.
        """
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts whose token at each position was accepted; empty without drafts."""
        return [count / self.drafts for count in self.accepted] if self.drafts else []

    @property
    def speculative_tokens(self) -> int | None:
        """num_speculative_tokens: the number of counted positions; None without drafts."""
        return len(self.accepted) if self.drafts else None


def parse_metrics(page: str) -> DraftCounts | None:
    """Parse a `/metrics` page; None if it is not from vLLM.

    Without speculative decoding the number of drafts is 0.
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


#: Identifies a turn: the question's id, how often the question was asked before, and the turn's
#: number.
TurnKey = tuple[int | str, int, int]


@dataclass(frozen=True)
class ServedAnswer:
    """One turn of a question, answered by a server."""

    question_id: int | str
    turn: int  # number of the turn, from 1
    repeat: int  # how often the question was asked before at this concurrency
    text: str
    tokens: int  # number of tokens, from the server's `usage`
    started: float  # seconds from the beginning of the block to the request
    # seconds from the request to the first text; None for an empty answer
    first_token: float | None
    seconds: float  # seconds from the request to the end of the answer
    category: str = ""  # the question's category

    @property
    def key(self) -> TurnKey:
        """Identifies the turn in the answers of all servers."""
        return self.question_id, self.repeat, self.turn


@dataclass(frozen=True)
class Measurement:
    """The answers of one server to one block of conversations."""

    answers: tuple[ServedAnswer, ...]
    #: Number of prompts that were skipped: they do not fit into the context, or they are chats with
    #: tools that the server rejects. Their conversations end before them.
    skipped: int = 0
    drafts: DraftCounts | None = None  # difference of the server's counters; None if it has none


class BlockKey(NamedTuple):
    """Key of a block. A session is a set of servers that run at the same time."""

    session: str
    concurrency: int
    number: int


#: An entry of the log: a block and its finished measurements by server name, or a note for the
#: report.
BlockEntry = tuple[BlockKey, dict[str, Measurement]] | str
BLOCK_ENTRY: TypeAdapter[BlockEntry] = TypeAdapter(BlockEntry)


WARM_UP_TOKENS = 32
#: Least number of conversations, as a multiple of the concurrency: of one block, and of all blocks.
#: Shorter blocks are mostly ramp-up and tail.
BLOCK_LENGTH, LEAST_CONVERSATIONS = 2, 10

#: Names of servers: one without heads, one with heads, and a server that is measured alone.
PLAIN, HEADS, ALONE = "plain", "heads", "server"


class BlockFault(Exception):
    """Requests of a block failed, so its times cannot be used. The message is the reason."""


class AskedQuestion(NamedTuple):
    """A question, and how often it was asked before at this concurrency (`repeat`)."""

    question: Question
    repeat: int


@dataclass(frozen=True)
class MeasuredServer:
    """A server to measure."""

    name: str  # the server's name in reports
    url: str  # base URL with the version, such as http://HOST:PORT/v1
    model: str  # the model's name on the server
    is_vllm: bool  # whether the server accepts vLLM's parameters


@dataclass(frozen=True)
class MeasuredServers:
    """The servers of one measurement, and what is known about them.

    Attributes:
        sessions: for each session name a function that returns a context manager, in which the
            session's servers run. Sessions are measured in this order.
        settings: what answers and times depend on.
        metadata: the servers' entries in `meta` of served.json.
        notes: remarks for the report.
        stop: stops the servers that the sessions started.
    """

    sessions: Mapping[str, Callable[[], AbstractContextManager[Sequence[MeasuredServer]]]]
    settings: Mapping[str, Any]
    metadata: Mapping[str, Any]
    notes: Sequence[str] = ()
    stop: Callable[[], None] = lambda: None


def plan_blocks(questions: Sequence[Question], concurrency: int) -> list[list[AskedQuestion]]:
    """Divide the conversations of one concurrency into blocks. The servers answer a block in turns.

    A short benchmark is repeated until there are at least `LEAST_CONVERSATIONS * concurrency`
    conversations. For chats with tools, a block contains questions of only one category, because a
    server counts its drafts for a whole block.
    """
    repeats = -(-LEAST_CONVERSATIONS * concurrency // len(questions))
    groups: dict[str, list[AskedQuestion]] = {}
    for repeat in range(repeats):
        for question in questions:
            kind = question.category if question.messages else ""
            groups.setdefault(kind, []).append(AskedQuestion(question, repeat))
    blocks = []
    for conversations in groups.values():
        count = max(1, len(conversations) // (BLOCK_LENGTH * concurrency))
        bounds = [index * len(conversations) // count for index in range(count + 1)]
        blocks += [conversations[start:end] for start, end in pairwise(bounds)]
    return blocks


@dataclass
class ServerBenchmark:
    """Measures one server, with as many concurrent conversations as `servers` takes requests.

    Its connections are open within `async with bench.servers`.

    Attributes:
        parameters: parameters of every request, see `request_parameters`.
        seed: the sampling seed of every turn is derived from this seed.
        rejected_tools: why the server rejected a chat with tools; "" if it has not rejected any.
    """

    target: MeasuredServer
    servers: Servers
    parameters: Mapping[str, Any]
    seed: int
    rejected_tools: str = ""

    async def warm_up(self, questions: Sequence[Question], count: int) -> None:
        """Ask concurrently for the first tokens of `count` answers."""
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
        conversations: Sequence[AskedQuestion],
        on_conversation: Callable[[int], None] = lambda tokens: None,
    ) -> Measurement:
        """Let the server answer a block of conversations, and measure it.

        Args:
            on_conversation: called after each conversation with its number of tokens.

        Raises:
            BlockFault: requests were rejected or had to be repeated, or the server's counters fell.
            ServerError: the server does not answer anymore.
        """
        retries = self.servers.retries
        before = await self._read_counts()
        began = time.perf_counter()
        answers: list[ServedAnswer] = []
        skipped = 0
        faults: list[str] = []

        async def converse(conversation: AskedQuestion) -> None:
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
                else:  # let the other conversations finish, so that no request is left running
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
        self, conversation: AskedQuestion, began: float, answers: list[ServedAnswer]
    ) -> None:
        """Ask all turns of a question, with the server's own answers as history. Append the answers
        to `answers`.
        """
        question, repeat = conversation
        # with this salt, later turns may find their own history in the prefix cache, but other
        # conversations cannot
        salt = secrets.token_hex(8)
        messages: list[Message] = []
        for turn in range(1, 1 + len(question.turns)):
            messages += question.asked(turn)
            name = f"{question.question_id} {turn} {repeat}"
            seed = zlib.crc32(name.encode(), self.seed & 0xFFFFFFFF)
            answer, response = await self._ask(question, messages, seed, salt)
            started, first, finished = response["timing"].values()
            # use the reasoning if there is no answer, since an empty message may be rejected in the
            # next request
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
    ) -> tuple[GeneratedAnswer, dict[str, Any]]:
        """Return one streamed answer to a question: parsed, and as returned by `read_stream`."""
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
                " (max_tokens), so its results cannot be trusted"
            )
        if wrong is not None:
            raise ServerError(f"server {self.target.url}: {wrong}")
        return answer, response
