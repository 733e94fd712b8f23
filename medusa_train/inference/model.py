"""A model to talk to: text in, text out, by the decoding loop. Knows no files and no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.inference.accept import Rule, Typical
from medusa_train.inference.detokenize import TextStream
from medusa_train.inference.generate import Decoder, FinishReason, Step, finish_reason
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.trees.tree import Tree

Prompt = str | Sequence[Message | Mapping[str, str]]


class Piece(NamedTuple):
    """Some text of an answer, and whether the token that completed it was a draft's accepted guess."""

    text: str
    drafted: bool


@dataclass
class Reply:
    """An answer under way: iterate over it for its pieces; the figures are complete afterwards.

    Attributes:
        text: so far. tokens: ids so far, the closing eos or the stop string's end included.
        steps: verification passes so far (the prefill, which gives the first token, is none).
        seconds: wall time so far.
        finish: why it ended: "eos", "length" (max_new_tokens), "context" (the model's positions are used up),
            "stop" (a stop string); None while it has not.
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
        """Acceleration rate: 1.0 for plain decoding."""
        return (len(self.tokens) - 1) / self.steps if self.steps else 1.0

    def __iter__(self) -> Iterator[Piece]:
        started = time.perf_counter()
        for step in self._steps:
            self.steps += bool(self.tokens)
            for place, token in enumerate(step.tokens):
                self.tokens.append(token)
                piece = Piece(self._stream.push(token), place < step.accepted)
                self.text += piece.text
                self.seconds = time.perf_counter() - started
                if piece.text:
                    yield piece
                if self._stream.stopped:
                    self.finish = "stop"
                    return
        rest = Piece(self._stream.finish(), False)
        self.text += rest.text
        if rest.text:
            yield rest
        self.finish = "stop" if self._stream.stopped else finish_reason(self.tokens, self._stops, self._max_new_tokens)

    def read(self) -> str:
        """The whole text."""
        for _ in self:
            pass
        return self.text


class Model:
    """A backbone with its draft and tree, asked in text.

    Args:
        backbone: who decides. draft, tree: who guesses what; without them decoding is plain.
        chat_template: name of the template that chats are written in; None for the tokenizer's own.
    """

    def __init__(
        self,
        backbone: Backbone,
        draft: Draft | None = None,
        tree: Tree | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backbone = backbone
        self._decoder = Decoder(backbone, draft, tree)
        self._template = chat_template
        self._chat: ChatEncoder | None = None

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 512,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        typical: bool = False,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        seed: int | None = None,
        raw: bool = False,
    ) -> str:
        """The answer to `prompt`.

        Args:
            prompt: what the user says; or a chat, as messages with role and content, that ends with the user's turn.
            max_new_tokens: of the answer at most.
            temperature: 0 for greedy decoding; above, sampling from the model's own distribution.
            top_p, top_k: cut that distribution, as transformers does.
            typical: accept what is plausible at this temperature instead of sampling: longer steps, but another
                distribution (see `Typical`).
            stop: strings that end the answer, and are no part of it.
            eos_ids: tokens that end it; the model's own by default.
            seed: of sampling; None for another one at every call.
            raw: continue `prompt` as it stands, without a chat template.

        Raises:
            MedusaError: the prompt does not fit the model's context, an option is out of range, or the model has no
                chat template.
        """
        return self.reply(
            prompt,
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            typical=typical,
            stop=stop,
            eos_ids=eos_ids,
            seed=seed,
            raw=raw,
        ).read()

    def reply(
        self,
        prompt: Prompt,
        max_new_tokens: int = 512,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        typical: bool = False,
        stop: str | Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
        seed: int | None = None,
        raw: bool = False,
    ) -> Reply:
        """The same answer piece by piece, as its text becomes safe to show, with figures; one at a time."""
        rule = _rule(temperature, top_p, top_k, typical)
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        stops = frozenset(self.backbone.eos_ids if eos_ids is None else eos_ids)
        return Reply(
            self._decoder.stream(self._ids(prompt, raw), max_new_tokens, stops, rule, generator),
            TextStream(self.backbone.tokenizer, [stop] if isinstance(stop, str) else stop),
            stops,
            max_new_tokens,
        )

    def _ids(self, prompt: Prompt, raw: bool) -> list[int]:
        if raw:
            return list(self.backbone.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, str):
            prompt = [Message("user", prompt)]
        if self._chat is None:
            self._chat = ChatEncoder(self.backbone.tokenizer, self._template)
        return self._chat.prompt([turn if isinstance(turn, Message) else Message(**turn) for turn in prompt])  # type: ignore[arg-type]


def _rule(temperature: float, top_p: float, top_k: int, typical: bool) -> Rule:
    if not temperature:
        return None  # where both rules end as it falls
    return Typical(temperature) if typical else Sampling(temperature, top_k, top_p)
