from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa_train.inference.generate import Decoder
from medusa_train.inference.sampling import Sampling
from medusa_train.models.backbone import Backbone
from medusa_train.selfdistill.exactness import _surely_best, _surely_cut, _surely_drawn, is_certain
from tests.evaluation.tiny_model import write_backbone

ERROR = torch.full((1, 1), 1e-3, dtype=torch.float64)


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_the_best_token_is_certain_unless_the_second_is_near() -> None:
    token = torch.tensor([1])
    assert _surely_best(logits(1.0, 2.0, 1.9), token, ERROR)
    assert not _surely_best(logits(1.0, 2.0, 1.9985), token, ERROR)
    assert not _surely_best(logits(3.0, 2.0, 1.0), token, ERROR)  # not even the best


@pytest.mark.parametrize(
    ("u", "token", "certain"),
    [
        (0.1, 0, True),
        (0.0, 0, True),  # the lower end of the first token is no border
        (0.2499, 0, False),
        (0.2501, 1, False),
        (0.5, 1, True),
        (0.7499, 1, False),
        (0.9999, 2, True),  # nor is the upper end of the last one
        (0.5, 2, False),  # drawn by another number
    ],
)
def test_a_drawn_token_is_certain_unless_the_number_is_near_its_border(u: float, token: int, certain: bool) -> None:
    given = torch.log(torch.tensor([[0.25, 0.5, 0.25, 0.0]], dtype=torch.float64))
    sampling = Sampling(temperature=1.0)
    number = torch.tensor([u], dtype=torch.float64)
    assert bool(_surely_drawn(given, torch.tensor([token]), number, sampling, ERROR)) is certain


def test_a_cut_is_certain_unless_a_token_stands_on_its_edge() -> None:
    def sure(sampling: Sampling, *values: float) -> bool:
        given = logits(*values)
        return bool(_surely_cut(given, sampling, ERROR / sampling.temperature))

    assert sure(Sampling(top_k=2), 3.0, 2.0, 1.0)
    assert not sure(Sampling(top_k=2), 3.0, 2.0, 1.9995)
    assert not sure(Sampling(1e-4, top_k=1), 3.0, 2.9995, 1.0)  # however far apart the temperature puts the two
    halves = torch.log(torch.tensor([0.5, 0.3, 0.2])).tolist()
    assert sure(Sampling(top_p=0.6), *halves)
    assert not sure(Sampling(top_p=0.5001), *halves)
    near = torch.log(torch.tensor([0.5, 0.25001, 0.24999])).tolist()
    assert not sure(Sampling(top_p=0.6), *near)  # which of the two stays hangs on rounding


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, top_k=6), Sampling(0.7, top_p=0.8)])
def test_what_is_certain_stays_when_logits_move(sampling: Sampling) -> None:
    random = torch.Generator().manual_seed(0)
    given = 4 * torch.randn(4000, 12, generator=random, dtype=torch.float64)
    u = torch.rand(4000, generator=random, dtype=torch.float64)
    error = torch.full((4000, 1), 0.05, dtype=torch.float64)

    def drawn(moved: torch.Tensor) -> torch.Tensor:
        return (sampling.warp(moved).softmax(-1).cumsum(-1) <= u[:, None]).sum(-1)

    tokens = drawn(given)
    sure = _surely_drawn(given, tokens, u, sampling, error)
    assert 0.5 < sure.double().mean() < 0.95
    ways = [0.05 * (torch.rand(given.shape, generator=random, dtype=torch.float64).round() * 2 - 1) for _ in range(20)]
    # the worst: all tokens up to the drawn one, or up to the one before it, against all others
    behind = torch.arange(12) - tokens[:, None]
    ways += [sign * torch.where(behind < edge, 0.05, -0.05).double() for edge in (0, 1) for sign in (-1, 1)]
    changed = torch.stack([drawn(given + way) != tokens for way in ways]).any(0)
    assert not (changed & sure).any()
    assert (changed & ~sure).sum() > 100


@pytest.mark.parametrize("sampling", [None, Sampling(0.8), Sampling(0.8, top_k=20, top_p=0.9)])
def test_whole_answers(tmp_path: Path, sampling: Sampling | None) -> None:
    backbone = Backbone.load(str(write_backbone(tmp_path / "backbone")), dtype=torch.float64)
    prompt = [1, 9, 8, 7]

    def generator() -> torch.Generator | None:
        return torch.Generator().manual_seed(3) if sampling else None

    tokens = Decoder(backbone).generate(prompt, 40, (), sampling, generator()).tokens
    assert is_certain(backbone, prompt, tokens, sampling, generator())
    assert not is_certain(backbone, prompt, [*tokens[:20], (tokens[20] + 1) % 300, *tokens[21:]], sampling, generator())
    with torch.no_grad():
        backbone.head.weight.zero_()  # all tokens tie
    if sampling is None:
        assert not is_certain(backbone, prompt, [0] * 5)
