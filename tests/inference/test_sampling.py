"""The sampling distribution equals that of transformers, and draws follow it."""

import itertools

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from medusa_train.errors import ConfigError
from medusa_train.inference.sampling import (
    FEW_CANDIDATES,
    NUCLEUS_CANDIDATES,
    Sampling,
    draw,
    keep_nucleus,
    keep_nucleus_by_sorting,
    uniforms,
)

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
    assert torch.equal(Sampling(temperature, top_k, top_p).warp(logits), expected)
    assert torch.equal(
        Sampling(temperature, top_k, top_p).warp(logits.view(4, 5, 50)).view(20, 50), expected
    )


def test_what_reaches_top_p_exactly_is_enough() -> None:
    logits = torch.zeros(1, 4)  # a quarter each: two of them make a half
    ours = Sampling(1.0, 0, 0.5).warp(logits)
    assert int(ours.isfinite().sum()) == 2
    assert torch.equal(ours, TopPLogitsWarper(0.5)(IDS, logits))


@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("grid", [None, 0.5], ids=["distinct", "ties"])
def test_the_nucleus_among_the_largest_logits_is_that_of_a_full_sort(
    top_p: float, grid: float | None
) -> None:
    """Rows from flat, which are sorted, to peaked; on a grid most cuts go through a group of equal
    logits.
    """
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.1, 6, 40)[:, None]
    logits = (
        torch.randn(40, 3 * NUCLEUS_CANDIDATES, generator=generator, dtype=torch.float64) * spread
    )
    if grid is not None:
        logits = (logits / grid).round() * grid
    expected = keep_nucleus_by_sorting(logits, top_p)
    assert torch.equal(Sampling(top_p=top_p).warp(logits), expected)
    assert torch.equal(keep_nucleus(logits, top_p, 8), expected)  # too few for most rows
    # in float32 the two sum in another order, which may move the edge by a token of that rounding's
    # size
    differ = Sampling(top_p=top_p).warp(logits.float()).isfinite() != expected.isfinite()
    assert (logits.softmax(-1) * differ).sum(-1).max() < 1e-4
    assert differ.sum() < 20


def test_top_k_and_top_p_together_with_ties() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-6, 6, (200, 300), generator=generator).float()
    best = TopKLogitsWarper(5)(IDS, logits)
    # ties: the five largest are not the whole support
    assert int(best.isfinite().sum(-1).max()) > 5
    assert torch.equal(Sampling(1.0, 5, 0.7).warp(logits), keep_nucleus_by_sorting(best, 0.7))


def test_only_rows_that_need_it_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(3, 2 * NUCLEUS_CANDIDATES)
    logits[0, :8] = 30.0  # eight tokens hold all probability, in groups of equal logits
    logits[1, 5] = 30.0
    rows: list[int] = []

    def sorting(logits: torch.Tensor, top_p: float) -> torch.Tensor:
        rows.append(len(logits))
        return keep_nucleus_by_sorting(logits, top_p)

    monkeypatch.setattr("medusa_train.inference.sampling.keep_nucleus_by_sorting", sorting)
    assert Sampling(top_p=0.9).warp(logits).isfinite().sum(-1).tolist()[:2] == [8, 1]
    assert rows == [1]
    # more than are looked at first, few enough to need no sorting
    logits[2, : 2 * FEW_CANDIDATES] = 30.0
    assert Sampling(top_p=0.9).warp(logits).isfinite().sum(-1).tolist() == [8, 1, 231]
    assert rows == [1]
    Sampling(top_k=50, top_p=0.9).warp(logits[:2])
    assert rows == [1]


def test_draws_by_inversion_are_literal() -> None:
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log()
    u = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits.expand(6, -1), u).tolist() == [0, 0, 2, 2, 3, 3]
    # tokens without mass at either end are never drawn
    edges = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf])
    assert draw(
        edges.expand(3, -1), torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    ).tolist() == [1, 2, 2]


def test_a_token_of_tiny_probability_can_be_drawn() -> None:
    """Its share is below the spacing of float32 numbers near 1, and so is that of many tokens of a
    large vocabulary.
    """
    logits = torch.tensor([0.7, 1e-9, 0.3]).log()
    shares = logits.softmax(-1).double()
    u = (shares[0] + shares[1] * torch.tensor([-0.5, 0.5, 1.5], dtype=torch.float64)) / shares.sum()
    assert draw(logits.expand(3, -1), u).tolist() == [0, 1, 2]


def test_a_row_draws_no_numbers_for_padding() -> None:
    """Its generator goes on as if it were alone."""
    together, alone = ([torch.Generator().manual_seed(seed) for seed in (1, 2)] for _ in range(2))
    for counts in ([2, 5], [4, 1]):
        numbers = uniforms(together, counts, torch.device("cpu"))
        assert numbers.shape == (2, max(counts))
        for row, count in enumerate(counts):
            assert torch.equal(
                numbers[row, :count], torch.rand(count, generator=alone[row], dtype=torch.float64)
            )


def test_values_out_of_range_are_named_all_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"temperature.*got 0(.|\n)*top_k.*got -1(.|\n)*top_p.*got 1.5"
    ):
        Sampling(0, -1, 1.5)
