"""lm_head restricted to a reduced vocabulary, and the rows of its tokens."""

import torch

from medusa_train.models.lm_head import LMHead, LowRank

KEPT = torch.tensor([40, 3, 9, 21, 60, 5, 33, 0, 17, 52, 11, 7, 28, 45, 2, 14])  # in no order


def test_a_restricted_lm_head_keeps_every_part_of_its_rows() -> None:
    branch = LowRank(torch.randn(2, 8), torch.randn(61, 2), 0.5, lambda h: h)
    full = LMHead(torch.randn(61, 8), torch.randn(61), 3.0, 0.5, branch)
    hidden = torch.randn(4, 5, 8)
    reduced = full.restrict_to(KEPT)
    torch.testing.assert_close(reduced.logits(hidden), full.logits(hidden)[..., KEPT])
    tokens = torch.tensor([[40, 1, 2], [-100, 60, 61]])
    assert reduced.indices_of(tokens).tolist() == [[0, -1, 14], [-1, 4, -1]]
    assert full.indices_of(tokens) is full.tokens_of(tokens) is tokens
    assert reduced.tokens_of(torch.tensor([[0, 14], [4, 4]])).tolist() == [[40, 2], [60, 60]]
    twice = reduced.restrict_to(torch.tensor([4, 0]))
    assert twice.indices_of(torch.tensor([60, 40, 4, 0])).tolist() == [0, 1, -1, -1]
    assert twice.tokens_of(torch.tensor([0, 1])).tolist() == [60, 40]


def test_a_restricted_lm_head_keeps_the_bias_of_its_tokens() -> None:
    full = LMHead(torch.randn(61, 8), torch.randn(61), 3.0, 0.5, token_bias=torch.randn(61, 2))
    states = torch.randn(4, 5, 8 + 2)
    torch.testing.assert_close(
        full.restrict_to(KEPT).logits(states), full.logits(states)[..., KEPT]
    )
    assert full.token_bias is not None
    raw = states[..., :8] @ full.weight.T + full.bias + states[..., 8:] @ full.token_bias.T
    torch.testing.assert_close(full.raw_logits(states), raw)
