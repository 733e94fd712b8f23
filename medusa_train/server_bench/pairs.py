"""Ask a server the questions of a bench, a number of conversations at once: answers, times,
counters, and their log.
"""

from __future__ import annotations

import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
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

_SAMPLE = re.compile(r"^vllm:(\w+?)_total(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Totals since the server was started, or between two moments (`since`); summed over the
    server's engines.
    """

    drafts: int  # verified ones, one per decoding step and sequence
    accepted: tuple[int, ...]  # by position in the draft
    generated: int = 0  # tokens of all requests

    def since(self, earlier: DraftCounts) -> DraftCounts | None:
        """Return the counts after `earlier`; None if one is lower now: of another server, or after
        a restart.
        """
        new = self._combined(earlier, -1)
        return None if min(new.drafts, new.generated, *new.accepted) < 0 else new

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combined(other, 1)

    def _combined(self, other: DraftCounts, sign: int) -> DraftCounts:
        accepted = (
            one + sign * two for one, two in zip_longest(self.accepted, other.accepted, fillvalue=0)
        )
        return DraftCounts(
            self.drafts + sign * other.drafts,
            tuple(accepted),
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
    totals = {"spec_decode_num_drafts": 0, "generation_tokens": 0}
    accepted: dict[int, int] = {}
    is_vllm = False
    for name, labels, number in _SAMPLE.findall(page):
        is_vllm = True
        if name in totals:
            totals[name] += int(float(number))
        elif name == "spec_decode_num_accepted_tokens_per_pos" and (
            position := _POSITION.search(labels)
        ):
            index = int(position[1])
            accepted[index] = accepted.get(index, 0) + int(float(number))
    if not is_vllm:
        return None
    drafts, generated = totals.values()
    per_position = (accepted.get(index, 0) for index in range(max(accepted, default=-1) + 1))
    return DraftCounts(drafts, tuple(per_position), generated)


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
    #: Question and turn of prompts that do not fit into the context, or of chats with tools that the
    # server rejects; their conversations end before them.
    skipped: tuple[tuple[int | str, int], ...] = ()
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

    @property
    def has_heads(self) -> bool:
        """Whether it is to be served with a draft; False if unknown."""
        return self.name not in (PLAIN, ALONE)


@dataclass(frozen=True)
class RequestOptions:
    """What every request has in common; every turn derives its seed of sampling from `seed`.

    See `Servers`.
    """

    parameters: Mapping[str, Any]  # of `request_parameters`, but for the model
    seed: int
    timeout: float
    retry_seconds: float
    key_variable: str
    #: At which the model's answers end; sent to vLLM, which reads no chat template for them.
    stop_tokens: tuple[int, ...] = ()

    def connect(self, url: str, concurrency: int) -> Servers:
        """Return the client of a server."""
        return Servers(
            [url],
            key_variable=self.key_variable,
            timeout=self.timeout,
            retry_seconds=self.retry_seconds,
            concurrency=concurrency,
        )


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


class ServerBench:
    """Measures one server, with `concurrency` conversations at a time.

    Its connections are open within `async with bench.servers`.

    Attributes:
        rejected_tools: why the server rejected a chat with tools; "" if it did not so far.
    """

    def __init__(self, target: Target, options: RequestOptions, concurrency: int) -> None:
        self.target = target
        self.concurrency = concurrency
        self.servers = options.connect(target.url, concurrency)
        self._options = options
        self.rejected_tools = ""

    async def warm_up(self, questions: Sequence[Question], count: int) -> None:
        """Ask for the beginnings of `count` answers, concurrently."""
        length = min(WARM_UP_TOKENS, self._options.parameters["max_tokens"])

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
        skipped: list[tuple[int | str, int]] = []
        faults: list[str] = []

        async def converse(conversation: Conversation) -> None:
            turns: list[ServedAnswer] = []
            try:
                await self._converse(conversation, began, turns)
            except RequestRejected as rejected:
                # a chat template may not render the calls in a chat
                if rejected.too_long or conversation.question.messages:
                    skipped.append((conversation.question.question_id, len(turns) + 1))
                    if not rejected.too_long:
                        self.rejected_tools = self.rejected_tools or str(rejected)
                else:  # the others go on, so that none is under way at the end
                    faults.append(str(rejected))
            answers.extend(turns)
            on_conversation(sum(answer.tokens for answer in turns))

        await self.servers.for_each(converse, conversations)
        if faults or self.servers.retries > retries:
            raise BlockFault(faults[0] if faults else self.servers.last_fault)
        after = await self._read_counts()
        drafts = before and after and after.since(before)
        if drafts is None and (before or after):
            raise BlockFault(
                "/metrics did not answer, or its counters fell, as after a restart of the server"
            )
        return Measurement(tuple(answers), tuple(skipped), drafts)

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
            seed = zlib.crc32(
                f"{question.question_id} {turn} {repeat}".encode(), self._options.seed & 0xFFFFFFFF
            )
            answer, response = await self._ask(question, messages, seed, salt)
            started, first = response["timing"]["started"], response["timing"]["first_token"]
            # reasoning that has no answer
            cut_off = response["choices"][0]["message"]["reasoning_content"]
            answers.append(
                ServedAnswer(
                    question.question_id,
                    turn,
                    repeat,
                    answer.text or cut_off,
                    answer.completion_tokens,
                    started - began,
                    None if first is None else first - started,
                    response["timing"]["finished"] - started,
                    question.category,
                )
            )
            messages.append(
                Message("assistant", answer.text or cut_off)
            )  # empty ones may be refused

    async def _ask(
        self, question: Question, messages: Sequence[Message], seed: int, salt: str, **changes: Any
    ) -> tuple[Answer, dict[str, Any]]:
        """Return one streamed answer to a question, parsed and as `read_stream` returns it."""
        body = request_body(self._options.parameters, messages, seed, question.variables)
        body |= {"model": self.target.model, **changes}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.target.is_vllm:
            body["cache_salt"] = salt
            if self._options.stop_tokens:
                body["stop_token_ids"] = list(self._options.stop_tokens)
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
