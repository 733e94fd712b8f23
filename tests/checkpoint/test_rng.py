"""Random generators draw the same numbers again after their state went through a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from medusa_train.checkpoint.rng import rng_state, seed_all, set_rng_state
from medusa_train.checkpoint.store import CheckpointStore


def draw() -> list[float]:
    return [
        *torch.rand(3).tolist(),
        torch.randn(()).item(),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
    ]


def test_all_generators_go_on_where_they_were(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    draw()  # leaves Python's and numpy's spare Gaussian behind: state beyond the key
    store = CheckpointStore(tmp_path)
    path = store.save(1, {"rng": rng_state()})
    wanted = draw()
    assert draw() != wanted
    set_rng_state(store.load(path)["rng"])
    assert draw() == wanted


def test_one_seed_decides_all_of_them() -> None:
    seed_all(2**32 + 5)
    first = draw()
    draw()
    seed_all(2**32 + 5)
    assert draw() == first
    seed_all(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
