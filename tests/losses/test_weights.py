"""D-PACE's weights of depths against plain loops."""

from __future__ import annotations

import pytest
import torch

from medusa_train.losses.weights import dpace_weights


def test_dpace_weights_in_numbers() -> None:
    """s = (0.9, 0.6, 0.75): P = (0.9, 0.54, 0.405)."""
    q = torch.tensor([[0.8], [0.2], [0.5]], dtype=torch.float64)
    found = dpace_weights(q, torch.ones(3, 1, dtype=torch.bool))
    assert found[:, 0].tolist() == pytest.approx([1.845, 0.945, 0.405])
    # without the depth in the middle: P = (0.9, -, 0.675)
    found = dpace_weights(q, torch.tensor([[True], [False], [True]]))
    assert found[[0, 2], 0].tolist() == pytest.approx([1.575, 0.675])


def test_one_depth() -> None:
    assert dpace_weights(torch.tensor([[0.4]]), torch.tensor([[True]])).item() == pytest.approx(0.7)
