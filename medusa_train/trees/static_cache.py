"""A pass whose keys and values go to given columns of a cache: what torch.compile and CUDA graphs need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCache(Cache):
    """The storage of all layers as transformers' cache for one pass that writes to given slots.

    Args:
        storage: per layer [2, rows, kv_heads, capacity, head_dim].
        slots: positions at which new keys and values are written, long [q], or [B, q] for the first B rows.
        key_length: number of positions that attention reads.
    """

    def __init__(self, storage: Sequence[Tensor], slots: Tensor, key_length: int) -> None:
        super().__init__(layers=[_SlotLayer(layer, slots, key_length) for layer in storage])


class _SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`.

    Keys and values are written at once: if memory is written twice, torch.compile copies all of it instead.
    """

    is_sliding = False

    def __init__(self, storage: Tensor, slots: Tensor, key_length: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._storage = storage
        self._slots = slots
        self._key_length = key_length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing; the memory is allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        storage = self._storage
        states = torch.stack([key_states, value_states])
        if self._slots.dim() == 1:
            storage.index_copy_(3, self._slots, states)
        else:
            rows = torch.arange(len(key_states), device=storage.device)[:, None]
            storage[:, rows, :, self._slots] = states.permute(1, 3, 0, 2, 4)
            storage = storage.narrow(1, 0, len(key_states))
        # sliced here: strides of a slice made by the caller would become constants, different for each capacity
        keys, values = storage.narrow(3, 0, self._key_length)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._key_length, 0

    def get_seq_length(self) -> int:
        return 0  # only used to derive positions and masks, which are given

    def get_max_length(self) -> int:
        return self._key_length


def slot_cache(storage: Tensor, slots: Tensor, key_length: int) -> SlotCache:
    """Return a cache that writes to `slots`, long [B, q], of the first B rows of a storage [layers, 2, rows, ...]."""
    return SlotCache(storage.unbind(), slots[0] if storage.shape[2] == 1 else slots, key_length)
