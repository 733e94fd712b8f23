"""What the tiny backbone makes of a batch: hidden states, next-token losses, the loss on held-out chats.

Knows nothing of recipes, optimizers or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from batches import micro_batches, to_tensors
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from vocabulary import Encoded


def hidden_states(model: LlamaForCausalLM, ids: Tensor, dropout: float = 0.0) -> Tensor:
    """The last hidden states [B, T-1, d] that predict ids[:, 1:]; `dropout` acts on the embeddings."""
    embedded = model.model.embed_tokens(ids[:, :-1])
    if dropout:
        embedded = F.dropout(embedded, dropout)
    return model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state


def token_losses(model: LlamaForCausalLM, hidden: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy [B, T-1] in nats of each next token, float32; `hidden` is [B, T-1, d]."""
    logits = model.lm_head(hidden).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, chats: Sequence[Encoded], tokens: int) -> dict[str, float]:
    """Mean loss in nats per token over all tokens (`all`) and over the assistant's, eos included (`assistant`).

    The forward pass runs under bf16 autocast, the loss in float32; the sums are float64.
    """
    device = next(model.parameters()).device
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(chats, tokens, None):
        ids, kinds = to_tensors(batch, device)
        with torch.autocast(device.type, torch.bfloat16):
            losses = token_losses(model, hidden_states(model, ids), ids).double().cpu()
        for slot, chosen in enumerate((kinds[:, 1:].cpu() > 0, kinds[:, 1:].cpu() == 2)):
            sums[slot] += losses[chosen].sum()
            counts[slot] += chosen.sum()
    model.train()
    mean = sums / counts
    return {"all": float(mean[0]), "assistant": float(mean[1])}
