"""Decoders of transformers that the tree is measured against. Knows no bench, no tree and no report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from medusa_train.errors import BackboneError
from medusa_train.evaluation.records import TimedAnswer
from medusa_train.models.backbone import Backbone

#: Tokens that prompt-lookup decoding copies at most per step, as its authors set it.
LOOKUP_TOKENS = 10

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt_lookup", "assisted"


class GenerateAnswerer:
    """`generate` of transformers: greedy, with its own cache, and with nothing else switched on.

    The backbone's generation config is replaced by a bare one, since a checkpoint may bring a repetition penalty or
    a sampling temperature, and `generate` fills gaps from there: it would no longer be greedy decoding of this model.
    The old one is not put back: the backbone was loaded for this evaluation alone, its own `eos_ids` were read before
    and stand in the bare config too, and nothing else here asks for the rest.

    Args:
        how: further arguments of `generate`, such as an assistant model.
    """

    def __init__(self, backbone: Backbone, **how: Any) -> None:
        self._backbone = backbone
        self._how = how
        backbone.model.generation_config = _bare_config(backbone)

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode up to `max_new_tokens` tokens, the first eos included."""
        started = time.perf_counter()
        prompt = torch.tensor([list(prompt_ids)], device=self._backbone.device)
        with torch.inference_mode():
            made = self._backbone.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, **self._how
            )
        tokens = made[0, len(prompt_ids) :].tolist()
        return TimedAnswer(tuple(tokens), time.perf_counter() - started)


def _bare_config(backbone: Backbone) -> GenerationConfig:
    eos = list(backbone.eos_ids) or None
    pad = backbone.tokenizer.pad_token_id
    if pad is None:
        pad = eos[0] if eos else 0
    return GenerationConfig(do_sample=False, num_beams=1, use_cache=True, eos_token_id=eos, pad_token_id=pad)


def further_baselines(
    backbone: Backbone, assistant_model: str | None, *, prompt_lookup: bool, note: Callable[[str], None]
) -> dict[str, GenerateAnswerer]:
    """Prompt-lookup decoding (unless switched off), and assisted generation where a draft model is named.

    Each decodes a few tokens to begin with: some architectures' caches can't be cut back, and what can't run is left
    out with a line to `note`.

    Raises:
        BackboneError: the draft model can't be loaded, or speaks in other tokens.
    """
    found: dict[str, GenerateAnswerer] = {}
    if prompt_lookup:
        found[PROMPT_LOOKUP] = GenerateAnswerer(backbone, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    if assistant_model is not None:
        found[ASSISTED] = GenerateAnswerer(backbone, assistant_model=_assistant(assistant_model, backbone).model)
    probe = list(range(min(4, backbone.vocab_size)))
    for name, answerer in list(found.items()):
        try:
            answerer.answer(probe, 3)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            note(f"baseline {name}: transformers can't run it with this backbone, left out ({error})")
            del found[name]
    return found


def _assistant(name: str, backbone: Backbone) -> Backbone:
    assistant = Backbone.load(name, dtype=backbone.dtype, device=backbone.device)
    if assistant.tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
        raise BackboneError(
            f"assistant_model {name}: its tokenizer is not the backbone's; take a smaller one of its kind"
        )
    assistant.model.generation_config = _bare_config(assistant)
    return assistant


def describe(name: str, version: str, assistant_model: str | None) -> str:
    """What a baseline of transformers is, for the report."""
    kinds = {
        GENERATE: "generate, greedy, with its own cache",
        PROMPT_LOOKUP: f"prompt-lookup decoding, greedy, up to {LOOKUP_TOKENS} tokens copied per step",
        ASSISTED: f"assisted generation, greedy, with {assistant_model}",
    }
    return f"transformers {version} {kinds[name]}"
