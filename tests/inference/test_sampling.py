"""The sampling distribution equals that of transformers, and draws follow it."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_train.errors import ConfigError
from medusa_train.inference.sampling import Sampling, draw, uniforms

IDS = torch.zeros(1, 1, dtype=torch.long)  # warpers take them and do not look


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    list(itertools.product([0.3, 1.0, 1.7], [0, 1, 3, 50, 99], [1.0, 0.9, 0.4, 1e-6])),
)
def test_warping_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 50) * 3
    expected = TemperatureLogitsWarper(temperature)(IDS, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(IDS, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(IDS, expected)
    ours = Sampling(temperature, top_k, top_p).warp(logits)
    assert torch.equal(ours, expected)
    assert torch.equal(Sampling(temperature, top_k, top_p).warp(logits.view(4, 5, 50)).view(20, 50), expected)


def test_what_reaches_top_p_exactly_is_enough() -> None:
    logits = torch.zeros(1, 4)  # a quarter each: two of them make a half
    ours = Sampling(1.0, 0, 0.5).warp(logits)
    assert int(ours.isfinite().sum()) == 2
    assert torch.equal(ours, TopPLogitsWarper(0.5)(IDS, logits))


def test_draws_by_inversion_are_literal() -> None:
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log()
    u = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits.expand(6, -1), u).tolist() == [0, 0, 2, 2, 3, 3]
    # tokens without mass at either end are never drawn
    edges = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf])
    assert draw(edges.expand(3, -1), torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 2, 2]


def test_a_row_draws_from_its_own_generator_alone() -> None:
    device = torch.device("cpu")

    def rows(*seeds: int) -> torch.Tensor:
        return uniforms([torch.Generator().manual_seed(seed) for seed in seeds], 3, device)

    assert torch.equal(rows(1, 2, 3)[1], rows(2)[0])
    assert not torch.equal(rows(1, 2)[0], rows(1, 2)[1])


def test_values_out_of_range_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError, match=r"temperature.*got 0(.|\n)*top_k.*got -1(.|\n)*top_p.*got 1.5"):
        Sampling(0, -1, 1.5)
