"""The engine that runs the backbone in this process. Knows no seeds and no files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from medusa_train.errors import DataError
from medusa_train.inference.generate import Decoder
from medusa_train.models.backbone import Backbone
from medusa_train.models.precision import has_fast_bf16
from medusa_train.selfdistill.engines import Answer, Request
from medusa_train.selfdistill.sampling import Finish, Sampler
from medusa_train.selfdistill.speakers import Speakers


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
        self._speakers = Speakers(backbone.tokenizer, chat_template)
        self._greedy = Decoder(backbone) if temperature == 0 else None
        self._sampler = Sampler(backbone, temperature, top_p) if temperature else None
        self._waiting: deque[tuple[int, Request]] = deque()

    @property
    def capacity(self) -> int:
        """One: answers come in the order of the requests."""
        return 1

    def submit(self, ticket: int, request: Request) -> None:
        """Keep a request until `next` answers it."""
        self._waiting.append((ticket, request))

    def next(self) -> tuple[int, Answer]:
        """Answer the oldest request."""
        ticket, request = self._waiting.popleft()
        return ticket, self.answer(request)

    def figures(self) -> Mapping[str, str]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to close."""

    def answer(self, request: Request) -> Answer:
        """Continue the chat; greedy decoding does not look at the seed."""
        try:
            prompt = self._speakers.prompt(request)
        except DataError:
            return Answer("", "refused", 0, 0)  # a chat that the template does not take must not end the run
        if len(prompt) > self.backbone.max_context:
            return Answer("", "context", len(prompt), 0)
        tokens, finish = self._generate(prompt, request.seed)
        return self._speakers.answer(request, len(prompt), tokens, finish)

    def _generate(self, prompt: list[int], seed: int) -> tuple[list[int], Finish]:
        if self._sampler is not None:
            generator = torch.Generator().manual_seed(seed)
            return self._sampler.generate(prompt, self.max_new_tokens, generator)
        assert self._greedy is not None  # one of the two is always there
        out = self._greedy.generate(prompt, self.max_new_tokens)
        return out.tokens, out.finish
