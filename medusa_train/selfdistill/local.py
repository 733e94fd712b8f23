"""Generate answers with a model in this process, in batches or with draft heads."""

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
from medusa_train.selfdistill.replay import ChatRequest, GeneratedAnswer, RunningChat
from medusa_train.selfdistill.settings import resolve_model_paths

DEFAULT_BATCH_SIZE = 16
LOOP_INTERVAL = 32  # every 32 steps, check whether an answer loops
# keep this many batches of requests waiting, so that prompts of similar length can be batched
POOL_BATCHES = 4


class HFEngine:
    """Generates answers with a model in this process.

    Batching is continuous: waiting requests replace finished ones. Longrope models cannot decode in
    batches.

    Every request has its own random generator, seeded by the request. So an answer depends on the
    other rows of its batch only if rounding decides between two tokens.

    Args:
        decoder: decoder of the model, with or without heads. Sampled answers with heads follow the
            model's distribution, but they differ from the answers without heads.
        sampling: sampling parameters; None for greedy decoding.
        batch_size: rows of a forward pass. With 1, answers come in the order of the requests.
        stop_looping: end an answer soon after it begins to loop, because it will be dropped.
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
        # how many requests are submitted at a time
        self.capacity = 1 if batch_size == 1 else POOL_BATCHES * batch_size
        # number of decoding steps of all answers, and of the tokens that they generated
        self.steps = self.step_tokens = 0
        self._decoder = decoder
        self._prompting = prompting
        self._sampling = sampling
        self._rows = batch_size if decoder.can_batch else 1
        self._batch = decoder.begin(max_new_tokens, rule=sampling or Greedy())
        self._stop_looping = stop_looping
        self._waiting: list[PendingRequest] = []
        # requests without an answer, each with the length of its prompt
        self._asked: dict[int, tuple[ChatRequest, int]] = {}
        self._finished: deque[tuple[int, GeneratedAnswer]] = deque()

    def generate(
        self, chats: Iterator[RunningChat], on_answer: Callable[[GeneratedAnswer], None]
    ) -> None:
        """Generate all conversations, with batch size 1 in their order. See `AnswerSource`."""
        coming = enumerate(chats)
        running: dict[int, RunningChat] = {}  # conversations in progress, by number
        ready: deque[tuple[int, ChatRequest]] = deque()  # next requests of running conversations
        pending = 0  # submitted requests without an answer
        while True:
            # 1. submit requests up to the capacity: first those of running conversations, then
            # start new conversations
            while pending < self.capacity:
                if not ready:
                    numbered = next(coming, None)
                    if numbered is None:
                        break
                    number, running[number] = numbered
                    ready.append((number, next(running[number])))
                self.submit(*ready.popleft())
                pending += 1
            if not pending:
                return
            # 2. pass the next answer to its conversation, which then continues or is complete
            number, answer = self.next()
            pending -= 1
            on_answer(answer)
            try:
                ready.append((number, running[number].send(answer)))
            except StopIteration:
                del running[number]

    def submit(self, request_id: int, request: ChatRequest) -> None:
        """Queue a request; `next` generates its answer."""
        try:
            prompt = self._prompting.prompt(request)
        except DataError:
            # a chat that the template rejects must not end the run
            self._finished.append((request_id, GeneratedAnswer("", "refused", 0, 0)))
            return
        if len(prompt) > self._decoder.target_model.max_context:
            self._finished.append((request_id, GeneratedAnswer("", "context", len(prompt), 0)))
            return
        generator = None
        if self._sampling:  # on the CPU, so that every device draws the same numbers
            generator = torch.Generator().manual_seed(request.seed)
        self._asked[request_id] = (request, len(prompt))
        self._waiting.append(PendingRequest(request_id, prompt, generator))

    def next(self) -> tuple[int, GeneratedAnswer]:
        """Return the next finished answer and its request id; generate until there is one."""
        while not self._finished:
            # add several waiting requests at once, when enough rows are free
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
        """Return the mean acceptance length with heads (tokens per step)."""
        if self._decoder.draft is None or not self.steps:
            return {}
        return {"tokens per step": f"{self.step_tokens / self.steps:.2f}"}

    def _pick(self, count: int) -> list[PendingRequest]:
        """Remove from the queue and return the oldest request and the requests whose prompt lengths
        are closest to its own, in the queue's order.
        """
        length = len(self._waiting[0].prompt)
        nearest = sorted(self._waiting, key=lambda asked: abs(len(asked.prompt) - length))
        picked = {asked.request_id for asked in nearest[:count]}
        batch = [asked for asked in self._waiting if asked.request_id in picked]
        self._waiting = [asked for asked in self._waiting if asked.request_id not in picked]
        return batch

    def _end_looping_rows(self) -> None:
        for row in self._batch.active:
            if row.generation.steps % LOOP_INTERVAL == 0:
                text = self._prompting.tokenizer.decode(
                    row.generation.tokens, skip_special_tokens=True
                )
                if is_looping(text):
                    row.limit = len(row.generation.tokens)


def open_local(cfg: SelfDistillConfig, dtype: str, note: Callable[[str], None]) -> HFEngine:
    """Load the model in this process, compile it if configured, and return its engine.

    `note` is called with a line about unused template variables, and with a line about additional
    tokens that end answers.
    """
    paths = resolve_model_paths(cfg)
    batch_size = cfg.batch_size
    if batch_size is None:
        is_single = dtype == "float32" or paths.heads is not None
        batch_size = 1 if is_single else DEFAULT_BATCH_SIZE

    # 1. load the model, and report unused template variables and additional end tokens.
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
        compile_target_model(model.target_model, rows=batch_size, trees=trees)
    model.compile_tree(note)
    return HFEngine(
        BatchDecoder(model.target_model, model.draft, model.tree),
        prompting,
        Sampling(cfg.temperature, cfg.top_k or 0, cfg.top_p) if cfg.temperature else None,
        cfg.max_new_tokens,
        batch_size=batch_size,
        stop_looping=cfg.drop_looping,
    )
