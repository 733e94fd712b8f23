"""The state of every random generator that a process draws from: torch, CUDA, Python, numpy. Knows no files."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed every generator whose state is kept, so that two runs of one configuration are the same."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # it takes no more bits
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All generators' states, as tensors, tuples and numbers that `pack` can save."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of the GPU that is in use
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Take back what `rng_state` gave; a GPU's is left out where there is none."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
