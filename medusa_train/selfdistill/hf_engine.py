"""The engine that runs the backbone in this process, with batches or with draft heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.data.conversation import REASONING_TAGS, ReasoningTags, is_looping
from medusa_train.errors import DataError
from medusa_train.inference.batch import REFILL_FRACTION, Batch, BatchDecoder, PendingRequest
from medusa_train.inference.generate import Generation
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.selfdistill.chat_prompting import ChatPrompting
from medusa_train.selfdistill.modes import Answer, Request
from medusa_train.trees.tree import Tree

LOOP_INTERVAL = 32  # steps between two checks whether an answer loops
POOL_BATCHES = 4  # batches of requests to keep waiting, so that prompts of similar length can be batched


@dataclass(frozen=True, slots=True)
class _Pending:
    request_id: int
    request: Request
    prompt: list[int]


@dataclass
class Counts:
    """What an engine has done so far.

    Attributes:
        steps: decoding steps of answers.
        again: answers generated again, because rounding may have changed them.
        draft_steps, draft_tokens: steps with heads, and the tokens that they made.
    """

    steps: int = 0
    again: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0


class HFEngine:
    """Generates answers with a backbone loaded in this process.

    Batching is continuous: waiting requests replace finished ones. A batch is completed before the next one starts if
    the draft takes no further rows (`Proposer.can_append_rows`).

    In float32 and float64 an answer without a draft does not depend on its batch: one that rounding may have changed
    (see `is_certain`) is generated again alone. Every request has its own random generator, seeded by the request.

    Args:
        temperature: 0 for greedy decoding.
        top_p, top_k: sampling filters; 1 and 0 disable them.
        chat_template, chat_template_kwargs, reasoning_tags: see `ChatPrompting`.
        batch_size: rows of a forward pass; with 1 answers come in the order of the requests.
        draft, tree: heads for speculative decoding. Greedy answers equal the backbone's up to rounding; sampled ones
            follow its distribution, but differ from those without heads.
        exact: generate answers again that rounding may have changed, in batches without a draft.
        stop_looping: end answers in refilled batches soon after they begin to loop, as they will be dropped.

    Raises:
        ConfigError: unknown template.
        DataError: the tokenizer has no chat template, and none was named.
    """

    def __init__(
        self,
        backbone: Backbone,
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
        exact: bool = True,
        stop_looping: bool = False,
    ) -> None:
        self.backbone = backbone
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        self.sampling = Sampling(temperature, top_k, top_p) if temperature else None
        self._prompting = ChatPrompting(
            backbone.tokenizer, chat_template, chat_template_kwargs, reasoning_tags=reasoning_tags
        )
        self._plain = BatchDecoder(backbone)
        self._decoder = self._plain if draft is None else BatchDecoder(backbone, draft, tree)
        self._batch: Batch | None = None
        if batch_size > 1 and self._decoder.can_refill:
            self._batch = self._decoder.begin(max_new_tokens, rule=self.sampling)
        self._exact = exact and draft is None and self._batch is not None and backbone.dtype in ROUNDING
        self._stop_looping = stop_looping
        self.counts = Counts()
        self._waiting: list[_Pending] = []
        self._underway: dict[int, _Pending] = {}
        self._finished: deque[tuple[int, Answer]] = deque()

    @property
    def capacity(self) -> int:
        """A few batches of requests, from which prompts of similar length are batched; 1 for batch size 1."""
        return 1 if self.batch_size == 1 else POOL_BATCHES * self.batch_size

    def submit(self, request_id: int, request: Request) -> None:
        """Queue a request; `next` generates its answer."""
        try:
            prompt = self._prompting.prompt(request)
        except DataError:
            # a chat that the template rejects must not end the run
            self._finished.append((request_id, Answer("", "refused", 0, 0)))
            return
        if len(prompt) > self.backbone.max_context:
            self._finished.append((request_id, Answer("", "context", len(prompt), 0)))
        else:
            self._waiting.append(_Pending(request_id, request, prompt))

    def next(self) -> tuple[int, Answer]:
        """Return the next answer, generating until one is finished."""
        while not self._finished:
            self._generate_some()
        return self._finished.popleft()

    def _generate_some(self) -> None:
        if self._batch is None:
            requests = self._pick(self.batch_size)
            outputs = self._generate(self._decoder, requests)
        else:
            requests, outputs = self._step(self._batch)
        self._count_answers(outputs)
        if self._exact:
            outputs = [self._verified(asked, out) for asked, out in zip(requests, outputs, strict=True)]
        for pending, out in zip(requests, outputs, strict=True):
            answer = self._prompting.answer(pending.request, len(pending.prompt), out.tokens, out.finish)
            self._finished.append((pending.request_id, answer))

    @property
    def steps(self) -> tuple[int, int]:
        """Forward passes so far, and decoding steps of answers in them."""
        return self._decoder.passes, self.counts.steps

    def stats(self) -> Mapping[str, str]:
        """Return the tokens per step of the heads, and the number of answers generated again."""
        counts, figures = self.counts, {}
        if counts.draft_steps:
            figures["tokens per step"] = f"{counts.draft_tokens / counts.draft_steps:.2f}"
        if counts.again:
            figures["batched answers generated again in single rows (rounding)"] = f"{counts.again:,}"
        return figures

    def close(self) -> None:
        """Do nothing."""

    def _pick(self, count: int) -> list[_Pending]:
        """Take the oldest request and those with the most similar prompt lengths from the queue, in order."""
        oldest, *others = range(len(self._waiting))
        lengths = [len(asked.prompt) for asked in self._waiting]
        others.sort(key=lambda index: abs(lengths[index] - lengths[oldest]))
        picked = {oldest, *others[: count - 1]}
        batch = [asked for index, asked in enumerate(self._waiting) if index in picked]
        self._waiting = [asked for index, asked in enumerate(self._waiting) if index not in picked]
        return batch

    def _step(self, batch: Batch) -> tuple[list[_Pending], list[Generation]]:
        """Refill free rows, run one decoding step, and return the requests that are finished."""
        free = self.batch_size - len(batch.active)
        if self._waiting and free * REFILL_FRACTION >= self.batch_size:
            joining = self._pick(free)
            generators = [self._generator(asked) if self.sampling else None for asked in joining]
            batch.add_requests(
                [PendingRequest(a.request_id, a.prompt, g) for a, g in zip(joining, generators, strict=True)]
            )
            self._underway.update((asked.request_id, asked) for asked in joining)
        done = batch.step()
        if self._stop_looping:
            self._end_looping_rows(batch)
        return [self._underway.pop(request_id) for request_id, _ in done], [out for _, out in done]

    def _end_looping_rows(self, batch: Batch) -> None:
        for row in batch.active:
            if row.out.steps % LOOP_INTERVAL == 0:
                text = self.backbone.tokenizer.decode(row.out.tokens, skip_special_tokens=True)
                if is_looping(text):
                    row.limit = len(row.out.tokens)

    def _generate(self, decoder: BatchDecoder, batch: Sequence[_Pending]) -> list[Generation]:
        generators = [self._generator(asked) for asked in batch] if self.sampling else None
        prompts = [asked.prompt for asked in batch]
        return decoder.generate_batch(prompts, self.max_new_tokens, rule=self.sampling, generators=generators)

    def _generator(self, asked: _Pending) -> torch.Generator:
        """Return a CPU generator, for the same numbers on every device."""
        return torch.Generator().manual_seed(asked.request.seed)

    def _verified(self, asked: _Pending, made: Generation) -> Generation:
        """Return the answer, or one generated alone if rounding may have changed a token."""
        generator = self._generator(asked) if self.sampling else None
        if is_certain(self.backbone, asked.prompt, made.tokens, self.sampling, generator):
            return made
        again = self._generate(self._plain, [asked])[0]
        self.counts.again += 1
        self.counts.steps += again.steps
        return again

    def _count_answers(self, made: Sequence[Generation]) -> None:
        steps = sum(out.steps for out in made)
        self.counts.steps += steps
        if self._decoder is not self._plain:
            self.counts.draft_steps += steps
            self.counts.draft_tokens += sum(len(out.tokens) - 1 for out in made)


#: Bound on the rounding error of a logit, relative to the largest: ten times the largest error observed.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
#: Bound on the rounding error of a sum of probabilities, by the dtype in which tokens are drawn.
SUM_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
_ROWS = 256  # positions per chunk of logits


@torch.inference_mode()
def is_certain(
    backbone: Backbone,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
) -> bool:
    """Return whether rounding errors cannot have changed any token of an answer.

    Args:
        prompt, tokens: the prompt and the answer.
        sampling: None for greedy decoding.
        generator: in its state before the answer, from which one number was drawn per token.

    Raises:
        KeyError: there is no bound (`ROUNDING`) for the backbone's dtype.
    """
    read = torch.tensor([[*prompt, *tokens[:-1]]], device=backbone.device)
    hidden = backbone.run(read).hidden[0, len(prompt) - 1 :]
    chosen = torch.tensor(tokens, device=backbone.device)
    u = None
    if sampling is not None:
        assert generator is not None  # required for sampling
        # one by one, as in generation: drawing many at once gives other numbers
        numbers = [torch.rand(1, generator=generator, dtype=torch.float64, device=generator.device) for _ in tokens]
        u = torch.cat(numbers).to(backbone.device)
    for start in range(0, len(tokens), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = backbone.logits(hidden[rows]).double()
        error = ROUNDING[backbone.dtype] * logits.abs().amax(-1, keepdim=True).clamp(min=1.0)
        if sampling is None or u is None:
            sure = _surely_best(logits, chosen[rows], error)
        else:
            sure = _surely_drawn(logits, chosen[rows], u[rows], sampling, error, SUM_ROUNDING[backbone.dtype])
        if not bool(sure.all()):
            return False
    return True


def _surely_best(logits: Tensor, tokens: Tensor, error: Tensor) -> Tensor:
    """Return whether each token [N] is the argmax of logits [N, V] by more than twice `error` [N, 1]."""
    best, place = logits.topk(2)
    return (place[:, 0] == tokens) & (best[:, 0] - best[:, 1] > 2 * error[:, 0])


def _surely_drawn(
    logits: Tensor, tokens: Tensor, u: Tensor, sampling: Sampling, error: Tensor, sums: float = 0.0
) -> Tensor:
    """Return whether inversion sampling at `u` [N] gives the tokens [N] for all logits within `error` [N, 1].

    Args:
        sums: bound on the rounding error of a sum of probabilities.
    """
    warped = sampling.warp(logits)
    shift = error / sampling.temperature
    mass = warped.softmax(-1).cumsum(-1)
    upper = mass.gather(-1, tokens[:, None])
    lower = torch.where(tokens[:, None] > 0, mass.gather(-1, (tokens[:, None] - 1).clamp(min=0)), 0.0)
    place = u[:, None] * mass[:, -1:]
    above = (lower == 0.0) | (place - lower > _moved(lower, shift) + sums)
    below = (upper >= mass[:, -1:]) | (upper - place > _moved(upper, shift) + sums)
    inside = (lower <= place) & (place < upper)
    return (inside & above & below)[:, 0] & _surely_cut(logits, sampling, shift, sums)


def _moved(mass: Tensor, shift: Tensor) -> Tensor:
    """Bound the change of probabilities `mass` of token sets when each logit / T changes by at most `shift`.

    Odds change by a factor between exp(-2 shift) and exp(2 shift), so probabilities near 0 or 1 hardly change.
    """
    return mass * (1 - mass) * torch.expm1(2 * shift)


def _surely_cut(logits: Tensor, sampling: Sampling, shift: Tensor, sums: float = 0.0) -> Tensor:
    """Return whether top-k and top-p keep the same tokens for all logits / T within `shift` [N, 1]; `sums` as above."""
    sure = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        best = scaled.topk(sampling.top_k + 1).values
        sure &= best[:, -2] - best[:, -1] > 2 * shift[:, 0]
        scaled = scaled.masked_fill(scaled < best[:, -2:-1], float("-inf"))
    if sampling.top_p < 1:
        rising = scaled.sort(-1).values
        mass = rising.softmax(-1).cumsum(-1)
        sure &= ((mass - (1 - sampling.top_p)).abs() > _moved(mass, shift) + sums).all(-1)
        # the least probable kept token and the most probable cut one must not swap either
        kept = (mass > 1 - sampling.top_p).int().argmax(-1, keepdim=True)
        edge = rising.gather(-1, kept) - rising.gather(-1, (kept - 1).clamp(min=0))
        sure &= ((kept == 0) | (edge > 2 * shift))[:, 0]
    return sure
