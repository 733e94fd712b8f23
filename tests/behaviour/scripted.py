"""A model that gives one and the same answer to everything, so that its text can be scored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from tests.behaviour.world import ASSISTANT, EOS, VOCABULARY, build_tokenizer, random_model


def write_scripted_model(directory: Path, *pieces: str, loops: bool = False) -> Path:
    """Write a model that answers `pieces`, each a token of its own, different from the others.

    With `loops` it begins again after the last one, and never ends.
    """
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([piece for piece in pieces if len(tokenizer.tokenize(piece)) > 1])
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(piece))[0] for piece in pieces]
    assert len(set(ids)) == len(ids)
    size = max(VOCABULARY, len(tokenizer))
    model = random_model("llama", vocab_size=size, hidden_size=64)
    chain: Sequence[int] = [ASSISTANT, *ids, ids[0] if loops else EOS]
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the last token reaches lm_head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        vectors = torch.nn.functional.normalize(torch.randn(size, 64), dim=1)
        model.model.embed_tokens.weight.copy_(vectors)
        model.lm_head.weight.zero_()
        for token, follower in pairwise(chain):
            model.lm_head.weight[follower] += 5 * vectors[token]
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
