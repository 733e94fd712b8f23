"""Answers of a model in this process, with batches or with draft heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from medusa_train.checkpoint.load_model import compile_target_model, load_for_decoding
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import REASONING_TAGS, ReasoningTags, is_looping
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError
from medusa_train.inference.accept import Greedy
from medusa_train.inference.batch_decoder import (
    REFILL_FRACTION,
    BatchDecoder,
    PendingRequest,
    RunningBatch,
)
from medusa_train.inference.generate import Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.drafts.base import Draft
from medusa_train.models.target_model import TargetModel
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from medusa_train.selfdistill.model import resolve_model_paths
from medusa_train.selfdistill.replay import Answer, ChatSteps, GeneratedChat, Request
from medusa_train.trees.tree import Tree

DEFAULT_BATCH_SIZE = 16
LOOP_INTERVAL = 32  # steps between two checks whether an answer loops
# batches of requests to keep waiting, so that prompts of similar length can be batched
POOL_BATCHES = 4


class HFEngine:
    """Generates answers with a base model loaded in this process.

    Batching is continuous: waiting requests replace finished ones, except in longrope models, which
    can't batch.

    Every request has its own random generator, seeded by the request, so an answer depends on its
    batch only where rounding decides between two tokens.

    Args:
        temperature: 0 for greedy decoding.
        top_p, top_k: sampling filters; 1 and 0 disable them.
        batch_size: rows of a forward pass; with 1 answers come in the order of the requests.
        draft, tree: heads for speculative decoding. Sampled answers follow the base model's
            distribution, but differ from those without heads.
        stop_looping: end answers in refilled batches soon after they begin to loop, as they will be
            dropped.
    """

    def __init__(
        self,
        target_model: TargetModel,
        *,
        temperature: float,
        max_new_tokens: int,
        top_p: float = 1.0,
        top_k: int = 0,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_tags: ReasoningTags = REASONING_TAGS,
        batch_size: int = 1,
        draft: Draft | None = None,
        tree: Tree | None = None,
        stop_looping: bool = False,
    ) -> None:
        self.target_model = target_model
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.sampling = Sampling(temperature, top_k, top_p) if temperature else None
        self._prompting = ChatPrompting(
            target_model.tokenizer,
            chat_template,
            chat_template_kwargs,
            reasoning_tags=reasoning_tags,
        )
        self._decoder = BatchDecoder(target_model, draft, tree)
        self._batch: RunningBatch | None = None
        if batch_size > 1 and self._decoder.can_batch:
            self._batch = self._decoder.begin(max_new_tokens, rule=self.sampling or Greedy())
        self._stop_looping = stop_looping
        # decoding steps of all answers, and the tokens that they made
        self.steps = self.step_tokens = 0
        self._waiting: list[PendingRequest] = []
        self._asked: dict[int, tuple[Request, int]] = {}  # and the length of its prompt
        self._finished: deque[tuple[int, Answer]] = deque()

    @property
    def capacity(self) -> int:
        """A few batches of requests, from which prompts of similar length are batched; 1 for batch
        size 1.
        """
        return 1 if self.batch_size == 1 else POOL_BATCHES * self.batch_size

    def generate(
        self,
        chats: Iterator[ChatSteps],
        on_answer: Callable[[Answer], None],
        on_chat: Callable[[GeneratedChat], None],
    ) -> None:
        """Generate all conversations; with batch size 1 in their order. See `AnswerSource`."""
        running: dict[int, ChatSteps] = {}  # by their number
        started = 0
        ready: deque[tuple[int, Request]] = deque()  # next requests of running conversations
        pending = 0  # submitted requests without an answer
        while True:
            # 1. keep enough requests submitted: running conversations go first, then new ones begin
            while pending < self.capacity:
                if not ready:
                    steps = next(chats, None)
                    if steps is None:
                        break
                    running[started] = steps
                    ready.append((started, next(steps)))
                    started += 1
                self.submit(*ready.popleft())
                pending += 1
            if not pending:
                return
            # 2. an answer, after which its conversation goes on or is complete
            number, answer = self.next()
            pending -= 1
            on_answer(answer)
            try:
                ready.append((number, running[number].send(answer)))
            except StopIteration as end:
                del running[number]
                on_chat(end.value)

    def submit(self, request_id: int, request: Request) -> None:
        """Queue a request; `next` generates its answer."""
        try:
            prompt = self._prompting.prompt(request)
        except DataError:
            # a chat that the template rejects must not end the run
            self._finished.append((request_id, Answer("", "refused", 0, 0)))
            return
        if len(prompt) > self.target_model.max_context:
            self._finished.append((request_id, Answer("", "context", len(prompt), 0)))
            return
        generator = None
        if self.sampling:  # on the CPU, for the same numbers on every device
            generator = torch.Generator().manual_seed(request.seed)
        self._asked[request_id] = (request, len(prompt))
        self._waiting.append(PendingRequest(request_id, prompt, generator))

    def next(self) -> tuple[int, Answer]:
        """Return the next answer, generating until one is finished."""
        while not self._finished:
            self._generate_some()
        return self._finished.popleft()

    def _generate_some(self) -> None:
        if self._batch is None:
            done = self._answer_batch()
        else:
            done = self._step(self._batch)
        for request_id, out in done:
            self.steps += out.steps
            self.step_tokens += len(out.tokens) - 1
            request, prompt_tokens = self._asked.pop(request_id)
            answer = self._prompting.answer(request, prompt_tokens, out.tokens, out.finish)
            self._finished.append((request_id, answer))

    @property
    def passes(self) -> int:
        """Forward passes of the base model so far."""
        return self._decoder.passes

    def stats(self) -> Mapping[str, str]:
        """Return the tokens per step of the heads."""
        if self._decoder.draft is None or not self.steps:
            return {}
        return {"tokens per step": f"{self.step_tokens / self.steps:.2f}"}

    def _pick(self, count: int) -> list[PendingRequest]:
        """Take the oldest request and those with the most similar prompt lengths from the queue, in
        order.
        """
        length = len(self._waiting[0].prompt)
        nearest = sorted(self._waiting, key=lambda asked: abs(len(asked.prompt) - length))
        picked = {asked.request_id for asked in nearest[:count]}
        batch = [asked for asked in self._waiting if asked.request_id in picked]
        self._waiting = [asked for asked in self._waiting if asked.request_id not in picked]
        return batch

    def _answer_batch(self) -> list[tuple[int, Generation]]:
        """Answer some of the waiting requests to their ends."""
        batch = self._pick(self.batch_size)
        generators = [asked.generator for asked in batch if asked.generator is not None]
        outputs = self._decoder.generate_batch(
            [asked.prompt for asked in batch],
            self.max_new_tokens,
            rule=self.sampling or Greedy(),
            generators=generators or None,
        )
        return [(asked.request_id, out) for asked, out in zip(batch, outputs, strict=True)]

    def _step(self, batch: RunningBatch) -> list[tuple[int, Generation]]:
        """Refill free rows, run one decoding step, and return the requests that are finished."""
        # waiting requests join together once enough rows are free
        free = self.batch_size - len(batch.active)
        if self._waiting and free * REFILL_FRACTION >= self.batch_size:
            batch.add_requests(self._pick(free))
        done = batch.step()
        if self._stop_looping:
            self._end_looping_rows(batch)
        return done

    def _end_looping_rows(self, batch: RunningBatch) -> None:
        for row in batch.active:
            if row.out.steps % LOOP_INTERVAL == 0:
                text = self.target_model.tokenizer.decode(row.out.tokens, skip_special_tokens=True)
                if is_looping(text):
                    row.limit = len(row.out.tokens)


def open_local(cfg: SelfDistillConfig, dtype: str, note: Callable[[str], None]) -> HFEngine:
    """Load the model in this process, compile it if configured, and return its engine.

    `note` receives what is not used, and what ends answers besides the end token.
    """
    paths = resolve_model_paths(cfg)
    batch_size = cfg.batch_size
    if batch_size is None:
        is_single = dtype == "float32" or paths.heads is not None
        batch_size = 1 if is_single else DEFAULT_BATCH_SIZE

    # 1. load it, and name what is not used, and what ends answers
    # float32 answers are reproducible on other machines only without prepacked weights
    model = load_for_decoding(paths, dtype, prepack=dtype != "float32")
    trees = model.draft is not None
    chat = ChatEncoder(
        model.target_model.tokenizer, paths.chat_template, paths.chat_template_kwargs
    )
    unused = chat.template.describe_unused_kwargs()
    if unused is not None:
        note(f"note: {unused}")
    ends = model.target_model.stop_tokens.describe(model.target_model.tokenizer)
    if ends is not None:
        note(ends)

    # 2. compile it
    if cfg.compile:
        compile_target_model(model.target_model, paths, rows=batch_size, trees=trees)
    model.compile_tree(note)
    return HFEngine(
        model.target_model,
        batch_size=batch_size,
        draft=model.draft,
        tree=model.tree,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k or 0,
        max_new_tokens=cfg.max_new_tokens,
        chat_template=paths.chat_template,
        chat_template_kwargs=paths.chat_template_kwargs,
        reasoning_tags=cfg.reasoning_tags,
        stop_looping=cfg.drop_looping,
    )
