"""Answers of a model in this process, with batches or with draft heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch

from medusa_train.checkpoint.load_model import compile_target_model, load_for_decoding
from medusa_train.config.schema import SelfDistillConfig
from medusa_train.data.conversation import is_looping
from medusa_train.errors import DataError
from medusa_train.inference.accept import Greedy
from medusa_train.inference.batch_decoder import REFILL_FRACTION, BatchDecoder, PendingRequest
from medusa_train.inference.sampling import Sampling
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from medusa_train.selfdistill.replay import Answer, ChatSteps, GeneratedChat, Request
from medusa_train.selfdistill.settings import resolve_model_paths

DEFAULT_BATCH_SIZE = 16
LOOP_INTERVAL = 32  # steps between two checks whether an answer loops
# batches of requests to keep waiting, so that prompts of similar length can be batched
POOL_BATCHES = 4


class HFEngine:
    """Generates answers with a model in this process.

    Batching is continuous: waiting requests replace finished ones, except in longrope models, which
    can't batch.

    Every request has its own random generator, seeded by the request, so an answer depends on its
    batch only where rounding decides between two tokens.

    Args:
        decoder: of the model, with or without heads. Sampled answers with heads follow the model's
            distribution, but differ from those without.
        sampling: None for greedy decoding.
        batch_size: rows of a forward pass; with 1 answers come in the order of the requests.
        stop_looping: end answers soon after they begin to loop, as they will be dropped.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        prompting: ChatPrompting,
        sampling: Sampling | None,
        max_new_tokens: int,
        *,
        batch_size: int = 1,
        stop_looping: bool = False,
    ) -> None:
        # A few batches of requests, from which prompts of similar length are batched
        self.capacity = 1 if batch_size == 1 else POOL_BATCHES * batch_size
        # decoding steps of all answers, and the tokens that they made
        self.steps = self.step_tokens = 0
        self._decoder = decoder
        self._prompting = prompting
        self._sampling = sampling
        self._rows = batch_size if decoder.can_batch else 1
        self._batch = decoder.begin(max_new_tokens, rule=sampling or Greedy())
        self._stop_looping = stop_looping
        self._waiting: list[PendingRequest] = []
        self._asked: dict[int, tuple[Request, int]] = {}  # and the length of its prompt
        self._finished: deque[tuple[int, Answer]] = deque()

    def generate(
        self,
        chats: Iterator[ChatSteps],
        on_answer: Callable[[Answer], None],
        on_chat: Callable[[GeneratedChat], None],
    ) -> None:
        """Generate all conversations; with batch size 1 in their order. See `AnswerSource`."""
        coming = enumerate(chats)
        running: dict[int, ChatSteps] = {}  # by their number
        ready: deque[tuple[int, Request]] = deque()  # next requests of running conversations
        pending = 0  # submitted requests without an answer
        while True:
            # 1. keep enough requests submitted: running conversations go first, then new ones begin
            while pending < self.capacity:
                if not ready:
                    numbered = next(coming, None)
                    if numbered is None:
                        break
                    number, steps = numbered
                    running[number] = steps
                    ready.append((number, next(steps)))
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
        if len(prompt) > self._decoder.target_model.max_context:
            self._finished.append((request_id, Answer("", "context", len(prompt), 0)))
            return
        generator = None
        if self._sampling:  # on the CPU, for the same numbers on every device
            generator = torch.Generator().manual_seed(request.seed)
        self._asked[request_id] = (request, len(prompt))
        self._waiting.append(PendingRequest(request_id, prompt, generator))

    def next(self) -> tuple[int, Answer]:
        """Return the next answer, generating until one is finished."""
        while not self._finished:
            # waiting requests join together once enough rows are free
            free = self._rows - len(self._batch.active)
            if self._waiting and free * REFILL_FRACTION >= self._rows:
                self._batch.add_requests(self._pick(free))
            for request_id, out in self._batch.step():
                self.steps += out.steps
                self.step_tokens += len(out.tokens) - 1
                request, prompt_tokens = self._asked.pop(request_id)
                answer = self._prompting.answer(request, prompt_tokens, out.tokens, out.finish)
                self._finished.append((request_id, answer))
            if self._stop_looping:
                self._end_looping_rows()
        return self._finished.popleft()

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

    def _end_looping_rows(self) -> None:
        for row in self._batch.active:
            if row.out.steps % LOOP_INTERVAL == 0:
                text = self._prompting.tokenizer.decode(row.out.tokens, skip_special_tokens=True)
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
    prompting = ChatPrompting(
        model.target_model.tokenizer,
        paths.chat_template,
        paths.chat_template_kwargs,
        reasoning_tags=cfg.reasoning_tags,
    )
    unused = prompting.encoder.template.describe_unused_kwargs()
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
        BatchDecoder(model.target_model, model.draft, model.tree),
        prompting,
        Sampling(cfg.temperature, cfg.top_k or 0, cfg.top_p) if cfg.temperature else None,
        cfg.max_new_tokens,
        batch_size=batch_size,
        stop_looping=cfg.drop_looping,
    )
