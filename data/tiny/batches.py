"""Chats as padded tensors, in batches of similar length, epoch after epoch. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from recipe import Recipe
from torch import Tensor
from vocabulary import PAD_ID, Encoded

Epoch = Callable[[int], Sequence[Encoded]]  # from an epoch's number to its chats


def micro_batches(chats: Sequence[Encoded], tokens: int, rng: Random | None) -> list[list[Encoded]]:
    """Chats of similar length together, at most `tokens` padded tokens each; shuffled where `rng` is given."""
    noise = {id(chat): rng.random() * 0.1 if rng else 0.0 for chat in chats}
    order = sorted(chats, key=lambda chat: len(chat.ids) * (1 + noise[id(chat)]))
    batches: list[list[Encoded]] = []
    longest = 0
    for chat in order:
        longest = max(longest, len(chat.ids))
        if not batches or longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
            longest = len(chat.ids)
        batches[-1].append(chat)
    if rng:
        rng.shuffle(batches)
    return batches


def to_tensors(chats: Sequence[Encoded], device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids [B, T], kinds [B, T]): kind 0 = padding, 1 = not written by the assistant, 2 = assistant.

    Rows are padded on the right, so a causal model needs no attention mask.
    """
    width = max(len(chat.ids) for chat in chats)
    ids = torch.full((len(chats), width), PAD_ID)
    kinds = torch.zeros((len(chats), width), dtype=torch.int8)
    for row, chat in enumerate(chats):
        ids[row, : len(chat.ids)] = torch.tensor(chat.ids)
        kinds[row, : len(chat.ids)] = 1 + torch.tensor(chat.assistant, dtype=torch.int8)
    return ids.to(device), kinds.to(device)


def stream(epoch: Epoch, recipe: Recipe) -> Iterator[tuple[int, list[Encoded]]]:
    """(epoch number, micro-batch) for ever; the same for the same seed, wherever training starts."""
    number = 0
    while True:
        rng = Random(f"batches {recipe.seed} {number}")
        for batch in micro_batches(epoch(number), recipe.micro_batch, rng):
            yield number, batch
        number += 1
