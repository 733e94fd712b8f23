"""Generate text from chats or raw prompts, whole or streamed."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from medusa_train.data.conversation import SURROGATES, Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.data.turns import read_messages, read_tools
from medusa_train.errors import DataError, MedusaError
from medusa_train.inference.accept import AcceptanceRule, Greedy, Typical
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
from medusa_train.models.drafts.base import Proposer
from medusa_train.models.target_model import TargetModel
from medusa_train.trees.tree import Tree

Prompt = str | Sequence[Message | Mapping[str, Any]] | Sequence[int]


class Piece(NamedTuple):
    """A piece of an answer's text, and whether the token that completed it was a draft token."""

    text: str
    drafted: bool


@dataclass
class Reply:
    """A streamed answer. Iterate over it for its pieces; each piece updates the attributes.

    A new loop over it continues where the last one stopped.

    Attributes:
        text: the text so far.
        tokens: ids so far, including the closing end-of-text token or the stop string's tokens.
        steps: verification passes; the prefill, which gives the first token, is not counted.
        seconds: wall time.
        finish: "eos", "length" (max_new_tokens), "context" (the model's positions are used up) or
            "stop" (a stop string); None while the answer is not complete.
    """

    _steps: Generator[Step, None, None]
    _stream: TextStream
    _stops: frozenset[int]
    _max_new_tokens: int | None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    finish: FinishReason | Literal["stop"] | None = None

    def __post_init__(self) -> None:
        # This generator must not refer to the reply: a dropped reply in a reference cycle would
        # keep other threads waiting until the garbage collector finds it.
        self._remaining = _tokens_of(self._steps)
        self._started: float | None = None
        self._is_closed = False

    @property
    def tokens_per_step(self) -> float:
        """Mean acceptance length (tokens per step); 1.0 for plain decoding."""
        if not self.steps:
            return 1.0
        return (len(self.tokens) - 1) / self.steps

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """Generate up to the next piece of text."""
        if self._started is None:
            self._started = time.perf_counter()
        try:
            while not self._is_closed:
                piece = self._take_token()
                self.seconds = time.perf_counter() - self._started
                if piece.text:
                    return piece
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def _take_token(self) -> Piece:
        """Take one token, or at the end the text that was held back; return the text that it
        completes, which may be empty.
        """
        next_piece = next(self._remaining, None)
        if self._is_closed:  # by another thread, during the pass
            self.close()
        if next_piece is None:
            self._is_closed = True
            self.finish = finish_reason(self.tokens, self._stops, self._max_new_tokens)
            # text that was held back as the possible beginning of a stop string
            piece = Piece(self._stream.finish(), drafted=False)
        else:
            self.steps, token, drafted = next_piece
            self.tokens.append(token)
            text = "" if token in self._stops else self._stream.push(token)
            piece = Piece(text, drafted)
        self.text += piece.text
        if self._stream.stopped:
            self.finish = "stop"
            self.close()
        return piece

    def close(self) -> None:
        """End the answer now, so that other threads can use the model.

        If another thread is reading it, the answer ends after the current pass.
        """
        self._is_closed = True
        with suppress(ValueError):  # the generator is running in another thread
            self._steps.close()

    def read(self) -> str:
        """Generate the rest of the answer and return the whole text."""
        for _ in self:
            pass
        return self.text


def _tokens_of(steps: Iterator[Step]) -> Iterator[tuple[int, int, bool]]:
    """Yield each token with the number of its step, 0 for the prefill, and whether it was
    drafted.
    """
    for number, step in enumerate(steps):
        for index, token in enumerate(step.tokens):
            yield number, token, index < step.accepted


class Model:
    """A target model with its draft and tree; takes and returns text.

    Threads may share a model: it answers one prompt after the other.

    Args:
        target_model: the language model.
        draft, tree: draft and tree of speculative decoding; without them, decoding is plain.
        chat_template: name of the chat template, or a Jinja file; None for the tokenizer's.
        chat_template_kwargs: variables of the chat template.
    """

    def __init__(
        self,
        target_model: TargetModel,
        draft: Proposer | None = None,
        tree: Tree | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.target_model = target_model
        # `continues`: the next turn of a chat does not read the earlier turns again
        self._decoder = Decoder(target_model, draft, tree, continues=True)
        self._template = chat_template
        self._template_kwargs = chat_template_kwargs
        self._chat: ChatEncoder | None = None
        # Encoding changes a setting of the tokenizer, which all threads share.
        self._encoding = threading.Lock()

    def generate(self, prompt: Prompt, max_new_tokens: int | None = 512, **options: Any) -> str:
        """Return the answer to `prompt`; options as in `reply`."""
        return self.reply(prompt, max_new_tokens, **options).read()

    def reply(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 512,
        *,
        temperature: float | None = 0.0,
        top_p: float | None = 1.0,
        top_k: int | None = 0,
        typical: bool = False,
        epsilon: float | None = Typical.epsilon,
        delta: float | None = Typical.delta,
        stop: str | Sequence[str] | None = None,
        eos_ids: int | Iterable[int] | None = None,
        seed: int | None = None,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """Stream the answer piece by piece. Numbers may be numpy's or torch's; None means the
        default of an option.

        A model streams one answer at a time. The next call waits until this answer is complete,
        closed or dropped. If nobody has read from it for 10 seconds (0.2 seconds if the thread that
        read it makes the next call), the next answer starts and this one ends with an error.

        Args:
            prompt: the user's message; or a chat, as messages with role and content (text, or
                OpenAI's list of text parts), ending with the user's turn, or with the results of
                an answer's `tool_calls`, whose role is `tool`.
            max_new_tokens: maximum length of the answer; None: up to the end of the context.
            temperature: 0 for greedy decoding; above 0, sampling from the model's distribution.
            top_p, top_k: restrict that distribution, as in transformers.
            typical: use typical acceptance at this temperature instead of sampling: steps accept
                more tokens, but the tokens do not follow the model's distribution.
            epsilon, delta: thresholds of typical acceptance, see `Typical`.
            stop: strings that end the answer; they are not part of it. None: no strings.
            eos_ids: one or several token ids that end the answer; by default the model's.
            seed: random seed for sampling; None for a new seed in every call.
            raw: continue `prompt` as it is, without a chat template. It is a text, which gets the
                tokenizer's BOS token unless it begins with it, or token ids.
            tools: functions that the model may call, as OpenAI's clients describe them. Calls are
                part of the answer's text, in the model's markup; nothing is executed.

        Raises:
            DataError: a message has no text, or contains something else, or the last message is the
                assistant's; `tools` is not a list of functions, or the chat template does not
                support tools.
            MedusaError: the prompt does not fit the model's context, an option is out of range or
                has the wrong type, or the model has no chat template.
        """
        if max_new_tokens is not None:
            max_new_tokens = _integer("max_new_tokens", max_new_tokens)
        # 1. the acceptance rule; at temperature 0, the other two rules become greedy decoding
        rule: AcceptanceRule = Greedy()
        temperature = _number("temperature", temperature, 0.0)
        if temperature and typical:
            rule = Typical(
                temperature,
                _number("epsilon", epsilon, Typical.epsilon),
                _number("delta", delta, Typical.delta),
            )
        elif temperature:
            most_probable = 0 if top_k is None else _integer("top_k", top_k)
            rule = Sampling(temperature, most_probable, _number("top_p", top_p, 1.0))
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            seed = _integer("seed", seed)
            if not -(2**63) <= seed < 2**64:
                raise MedusaError(f"seed: expected a number of 64 bits, got {seed}")
            generator.manual_seed(seed)
        # 2. where the answer ends. A stop string that is a special token becomes a stop token,
        # because the text is decoded without special tokens
        tokenizer = self.target_model.tokenizer
        stop_texts = _stop_strings(stop)
        ending = (
            None
            if eos_ids is None
            else _token_ids("eos_ids: expected a token id or a list of them", eos_ids)
        )
        stops = set(stop_tokens(self.target_model, ending))
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special and str(token) in stop_texts:
                stops.add(token_id)
        # 3. the stream of tokens, and the stream of text
        prompt_ids = self._ids(prompt, raw, tools)
        steps = self._decoder.stream(prompt_ids, max_new_tokens, stops, rule, generator)
        return Reply(steps, TextStream(tokenizer, stop_texts), frozenset(stops), max_new_tokens)

    def _ids(
        self, prompt: Prompt, raw: bool, tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the token ids of a prompt, rendered by the chat template unless it is `raw`."""
        if raw and tools:
            raise MedusaError("tools are written by the chat template, which raw=True leaves out")
        if raw:
            if isinstance(prompt, str):
                with self._encoding:
                    return self._raw_ids(prompt)
            if isinstance(prompt, (list, tuple)) and isinstance(
                next(iter(prompt), 0), (str, Mapping)
            ):
                raise MedusaError(
                    "with raw=True, expected a text or a list of token ids: leave raw out for a"
                    " chat; for several texts write [model.generate(text, raw=True) for text in"
                    " texts]"
                )
            return _token_ids(
                "prompt: with raw=True, expected a text or a list of token ids", prompt
            )
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = read_messages(prompt)
        variables = read_tools(tools)
        with self._encoding:
            if self._chat is None:
                self._chat = ChatEncoder(
                    self.target_model.tokenizer, self._template, self._template_kwargs
                )
                if (note := self._chat.template.describe_unused_kwargs()) is not None:
                    warn_once(note)
            return self._chat.prompt(messages, variables)

    def _raw_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, with the tokenizer's prefix of every text (BOS).

        A text that a chat template rendered may begin with BOS already; then the prefix is not
        repeated.
        """
        if SURROGATES.search(text):
            raise DataError("the prompt contains a lone surrogate, which UTF-8 cannot encode")
        tokenizer = self.target_model.tokenizer
        before = list(tokenizer("")["input_ids"])
        ids = list(tokenizer(text)["input_ids"])
        count = len(before)
        while before and ids[count : 2 * count] == before:
            ids = ids[count:]
        return ids


def _integer(name: str, value: Any) -> int:
    """Return an integer of any library as an int; raises MedusaError for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise MedusaError(f"{name}: expected an integer, got {value!r}") from None


def _number(name: str, value: Any, default: float) -> float:
    """Return a number of any library as a float, or `default` for None; raises MedusaError for
    anything else.
    """
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        raise MedusaError(f"{name}: expected a number, got {value!r}") from None


def _token_ids(expected: str, ids: Any) -> list[int]:
    """Return the list of one token id or of a flat collection of them (list, array, tensor).

    Raises a MedusaError that begins with `expected` for anything else.
    """
    try:
        if isinstance(ids, bytes):  # meant as text, but Python iterates over its numbers
            raise TypeError
        if getattr(ids, "ndim", 1) and hasattr(ids, "__iter__"):  # a scalar tensor has __iter__ too
            return [operator.index(token) for token in ids]
        return [operator.index(ids)]
    except TypeError:
        raise MedusaError(f"{expected}, got {ids!r:.80}") from None


def _stop_strings(stop: str | Sequence[str] | None) -> list[str]:
    """Return the strings that end an answer.

    Raises:
        MedusaError: one is empty or not a string.
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
