"""Plain sampled decoding of one sequence. Knows no text, no tree and no conversation.

Speculation is of no use here: an answer is drawn token by token from the backbone's own distribution.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from medusa_train.models.backbone import Backbone

Finish = Literal["eos", "length", "context"]


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw one token from softmax(logits / temperature), cut to its nucleus.

    The nucleus is the smallest set of most probable tokens whose probability reaches `top_p` (Holtzman et al.
    2020, section 3.1). The draw is made on the CPU in float64, so that it depends on the logits and `generator`
    alone.

    Args:
        logits: [V]. temperature: above 0. top_p: above 0, at most 1. generator: of the CPU.
    """
    probabilities = torch.softmax(logits.double().cpu() / temperature, dim=-1)
    ordered, tokens = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    if top_p < 1:
        ordered = ordered.masked_fill(before >= top_p, 0.0)
    u = torch.rand((), generator=generator, dtype=torch.float64) * ordered.sum()
    # The first token whose cumulative probability exceeds u; the clamp guards against rounding at the far end.
    index = int(torch.searchsorted(ordered.cumsum(-1), u, right=True))
    last = int((ordered > 0).sum()) - 1
    return int(tokens[min(index, last)])


class Sampler:
    """Sampled decoding with the backbone's cache: prefill, then one token a pass."""

    def __init__(self, backbone: Backbone, temperature: float, top_p: float) -> None:
        self.backbone = backbone
        self.temperature = temperature
        self.top_p = top_p

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int, generator: torch.Generator) -> tuple[list[int], Finish]:
        """Continue `prompt` (at most the model's context long) until eos, `max_new_tokens` or the context's end.

        Returns:
            The tokens, a closing eos included, and why they end.
        """
        backbone = self.backbone
        # The last token is not read, so it may lie one past the context.
        room = min(max_new_tokens, backbone.max_context - len(prompt) + 1)
        cache = backbone.new_cache(len(prompt) + room)
        tokens: list[int] = []
        read = prompt
        while True:
            feats = backbone.run(torch.tensor([read], device=backbone.device), cache=cache)
            cache.commit(len(read))
            logits = backbone.logits(feats.hidden[0, -1])
            tokens.append(draw(logits, self.temperature, self.top_p, generator))
            if tokens[-1] in backbone.eos_ids:
                return tokens, "eos"
            if len(tokens) >= room:
                return tokens, "length" if len(tokens) >= max_new_tokens else "context"
            read = tokens[-1:]
