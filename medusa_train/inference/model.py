"""Generate text for text: chats and raw prompts, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.turns import read_messages
from medusa_train.errors import MedusaError
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.detokenize import TextStream
from medusa_train.inference.generate import (
    Decoder,
    FinishReason,
    Step,
    finish_reason,
    stop_tokens,
)
from medusa_train.inference.sampling import Sampling
from medusa_train.io import warn_once
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Proposer
from medusa_train.trees.tree import Tree

Prompt = str | Sequence[Message | Mapping[str, Any]]


class Piece(NamedTuple):
    """Some text of an answer, and whether the token that completed it was an accepted draft token."""

    text: str
    drafted: bool


@dataclass
class Reply:
    """A streamed answer. Iterate over it for its pieces; the attributes grow with them.

    Attributes:
        text: the text so far.
        tokens: ids so far, including the closing end-of-text token or the stop string's tokens.
        steps: verification passes; the prefill, which gives the first token, is not counted.
        seconds: wall time.
        finish: "eos", "length" (max_new_tokens), "context" (the model's positions are used up) or
            "stop" (a stop string); None while the answer is not complete.
    """

    _steps: Iterator[Step]
    _stream: TextStream
    _stops: frozenset[int]
    _max_new_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    finish: FinishReason | Literal["stop"] | None = None

    @property
    def tokens_per_step(self) -> float:
        """Acceleration rate; 1.0 for plain decoding."""
        if not self.steps:
            return 1.0
        return (len(self.tokens) - 1) / self.steps

    def __post_init__(self) -> None:
        self._pieces = self._generate()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces  # the same one: a loop that is left and begun again loses nothing

    def _generate(self) -> Iterator[Piece]:
        started = time.perf_counter()
        for step in self._steps:
            if self.tokens:  # the first step is the prefill
                self.steps += 1
            for index, token in enumerate(step.tokens):
                self.tokens.append(token)
                text = ""
                if token not in self._stops:
                    text = self._stream.push(token)
                self.text += text
                self.seconds = time.perf_counter() - started
                if text:
                    yield Piece(text, drafted=index < step.accepted)
                if self._stream.stopped:
                    self.finish = "stop"
                    return
        # what was held back as the possible beginning of a stop string
        text = self._stream.finish()
        self.text += text
        if text:
            yield Piece(text, drafted=False)
        if self._stream.stopped:
            self.finish = "stop"
        else:
            self.finish = finish_reason(self.tokens, self._stops, self._max_new_tokens)

    def read(self) -> str:
        """Generate the rest and return the whole text."""
        for _ in self:
            pass
        return self.text


class Model:
    """A backbone with its draft and tree that takes and returns text.

    Args:
        backbone: the language model.
        draft, tree: for speculative decoding; without them decoding is plain.
        chat_template: name of the chat template, or a Jinja file; None for the tokenizer's.
        chat_template_kwargs: variables of the chat template.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: Proposer | None = None,
        tree: Tree | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.backbone = backbone
        # turns of a chat: the text so far is not read again
        self._decoder = Decoder(backbone, draft, tree, continues=True)
        self._template = chat_template
        self._template_kwargs = chat_template_kwargs
        self._chat: ChatEncoder | None = None

    def generate(self, prompt: Prompt, max_new_tokens: int = 512, **options: Any) -> str:
        """Return the answer to `prompt`; options as in `reply`."""
        return self.reply(prompt, max_new_tokens, **options).read()

    def reply(
        self,
        prompt: Prompt,
        max_new_tokens: int = 512,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        typical: bool = False,
        epsilon: float = Typical.epsilon,
        delta: float = Typical.delta,
        stop: str | Sequence[str] | None = None,
        eos_ids: Sequence[int] | None = None,
        seed: int | None = None,
        raw: bool = False,
    ) -> Reply:
        """Stream the answer piece by piece. A model streams one answer at a time.

        Args:
            prompt: the user's message; or a chat, as messages with role and content (text, or
                OpenAI's list of text parts), ending with the user's turn.
            max_new_tokens: maximum length of the answer.
            temperature: 0 for greedy decoding; above 0, sampling from the model's distribution.
            top_p, top_k: restrict that distribution, as in transformers.
            typical: typical acceptance at this temperature instead of sampling: longer steps, but
                the tokens do not follow the model's distribution.
            epsilon, delta: thresholds of typical acceptance, see `Typical`.
            stop: strings that end the answer; they are not part of it. None: no strings.
            eos_ids: tokens that end the answer; by default the model's.
            seed: for sampling; None for a new one in every call.
            raw: continue `prompt` as it is, without a chat template.

        Raises:
            DataError: a message has no text, or holds what is not text.
            MedusaError: the prompt does not fit the model's context, an option is out of range, or
                the model has no chat template.
        """
        # 1. the acceptance rule; greedy decoding is the limit of both others
        rule: Rule = None
        if temperature and typical:
            rule = Typical(temperature, epsilon, delta)
        elif temperature:
            rule = Sampling(temperature, top_k, top_p)
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        # 2. where the answer ends. A stop string that is a special token is found among the tokens,
        # since the text is decoded without these
        tokenizer = self.backbone.tokenizer
        stop_texts = _stop_strings(stop)
        stops = set(stop_tokens(self.backbone, eos_ids))
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and str(token) in stop_texts:
                stops.add(token_id)
        # 3. the stream of tokens, and its text
        prompt_ids = self._ids(prompt, raw)
        steps = self._decoder.stream(prompt_ids, max_new_tokens, stops, rule, generator)
        return Reply(steps, TextStream(tokenizer, stop_texts), frozenset(stops), max_new_tokens)

    def _ids(self, prompt: Prompt, raw: bool) -> list[int]:
        """Return the token ids of a prompt, by the chat template unless it is `raw`."""
        if raw and not isinstance(prompt, str):
            raise MedusaError(
                "raw=True continues one text, and this prompt is none: leave raw out for a chat;"
                " for several texts write [model.generate(text, raw=True) for text in texts]"
            )
        if raw:
            return list(self.backbone.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self._chat is None:
            self._chat = ChatEncoder(self.backbone.tokenizer, self._template, self._template_kwargs)
            if (note := self._chat.template.describe_unused_kwargs()) is not None:
                warn_once(note)
        return self._chat.prompt(read_messages(prompt))


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return the strings that end an answer.

    Raises:
        MedusaError: one is empty, or no string.
    """
    if stop is None:
        return []
    if not isinstance(stop, (str, Sequence, Set)):
        raise MedusaError(f"stop: expected a string or a list of strings, got {stop!r}")
    texts = [stop] if isinstance(stop, str) else list(stop)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise MedusaError(f"stop: expected strings that are not empty, got {stop!r}")
    return texts
