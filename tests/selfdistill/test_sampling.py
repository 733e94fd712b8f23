from __future__ import annotations

import torch

from medusa_train.selfdistill.sampling import draw


def counts(logits: torch.Tensor, temperature: float, top_p: float, times: int = 4000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(logits, temperature, top_p, generator) for _ in range(times)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / times


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    for temperature in (0.5, 1.0):
        wanted = torch.softmax(logits / temperature, -1)
        # 4000 draws: standard error at most 0.008
        assert torch.allclose(counts(logits, temperature, 1.0), wanted, atol=0.03)


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    share = counts(logits, 1.0, 0.7)
    assert share[0] == share[3] == 0
    assert abs(float(share[1]) - 0.5 / 0.8) < 0.03
    assert counts(logits, 1.0, 1e-9, times=50)[1] == 1


def test_a_token_of_no_mass_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0])
    share = counts(logits, 1.0, 1.0, times=500)
    assert share[0] == share[2] == 0


def test_the_same_generator_gives_the_same_tokens() -> None:
    logits = torch.randn(50)
    one, two = (torch.Generator().manual_seed(5) for _ in range(2))
    assert [draw(logits, 1.0, 0.9, one) for _ in range(20)] == [draw(logits, 1.0, 0.9, two) for _ in range(20)]
