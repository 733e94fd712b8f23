"""A batch with everything that masks a target."""

import pytest
import torch

from medusa_train.data.batch import IGNORE_INDEX
from medusa_train.losses import chunked_logits
from medusa_train.models.target_states import HiddenStates
from tests.losses.toy import B, Rows, T, V, features


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax over a few rows at a time: the vocabularies here would fit into one block otherwise."""
    monkeypatch.setitem(chunked_logits._BLOCK_BYTES, "cpu", 4 * 3 * 29)


@pytest.fixture
def batch() -> Rows:
    """Prompts masked here and there, row 1 holds two documents, row 2 is half padding."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[torch.rand(B, T, generator=generator) < 0.3] = IGNORE_INDEX
    segments = torch.zeros(B, T, dtype=torch.long)
    segments[1, 5:] = 1
    labels[2, 6:] = IGNORE_INDEX
    segments[2, 6:] = -1
    return Rows(labels, segments)


@pytest.fixture
def hidden_states() -> HiddenStates:
    return features(3)
