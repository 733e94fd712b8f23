"""Who answers: the engine interface, and the engine that runs the backbone in this process. Knows no seeds, no files.

An engine is asked for one answer at a time and keeps nothing between answers, so that an engine that talks to a
server fits in as well, and so that a conversation comes out the same whenever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from medusa_train.data.chat import ChatEncoder
from medusa_train.data.conversation import Message
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.precision import has_fast_bf16
from medusa_train.selfdistill.sampling import Finish, Sampler

Reason = Literal["stop", "length", "context"]
_REASONS: dict[Finish, Reason] = {"eos": "stop", "length": "length", "context": "context"}


@dataclass(frozen=True)
class Answer:
    """One answer of the model.

    Attributes:
        text: without the token that ends it.
        reason: "stop" (the model ended it), "length" (max_new_tokens) or "context" (the model's positions are
            used up; `text` is empty when not even the prompt fits).
        prompt_tokens, completion_tokens: what it was made from and of, the end token included.
    """

    text: str
    reason: Reason
    prompt_tokens: int
    completion_tokens: int


class Engine(Protocol):
    """Something that continues a chat with the assistant's next turn."""

    def answer(self, messages: Sequence[Message], seed: int) -> Answer:
        """Answer a chat that ends with a user's turn; `seed` decides everything that is drawn at random."""


def fastest_dtype(device: torch.device | None = None) -> str:
    """bfloat16 where the device multiplies it in hardware, else float16 on a GPU and float32 on a CPU."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if has_fast_bf16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"


class LocalEngine:
    """The backbone itself, one chat at a time.

    Args:
        backbone: who answers. max_new_tokens: longest answer.
        temperature: 0 for greedy decoding. top_p: nucleus of sampling (Holtzman et al. 2020), 1 for all tokens.
        chat_template: name of the template that chats are written in; None for the tokenizer's own.

    Raises:
        ConfigError: no template of that name.
        DataError: the backbone's tokenizer has no chat template, and none was named.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        chat_template: str | None = None,
    ) -> None:
        self.backbone = backbone
        self.max_new_tokens = max_new_tokens
        self._encoder = ChatEncoder(backbone.tokenizer, chat_template)
        self._greedy = Decoder(backbone) if temperature == 0 else None
        self._sampler = Sampler(backbone, temperature, top_p) if temperature else None

    def answer(self, messages: Sequence[Message], seed: int) -> Answer:
        """Continue the chat; greedy decoding does not look at `seed`."""
        prompt = self._encoder.prompt(messages)
        if len(prompt) > self.backbone.max_context:
            return Answer("", "context", len(prompt), 0)
        tokens, finish = self._generate(prompt, seed)
        kept = tokens[:-1] if finish == "eos" else tokens
        text = self.backbone.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Answer(str(text), _REASONS[finish], len(prompt), len(tokens))

    def _generate(self, prompt: list[int], seed: int) -> tuple[list[int], Finish]:
        if self._sampler is not None:
            generator = torch.Generator().manual_seed(seed)
            return self._sampler.generate(prompt, self.max_new_tokens, generator)
        assert self._greedy is not None  # one of the two is always there
        out = self._greedy.generate(prompt, self.max_new_tokens)
        return out.tokens, out.finish
