"""Batches of chats, and the losses that the tiny backbone is trained on."""

from pathlib import Path
from random import Random

import pytest
import torch
from batches import micro_batches, to_tensors
from lookahead import AHEAD, DECAY, DRAWN, Lookahead
from losses import held_out_losses, hidden_states, token_losses
from tiny_samples import TINY, chats
from training import Run
from vocabulary import Encoded


def test_padding_changes_no_loss() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    torch.nn.init.normal_(run.model.model.layers[0].mlp.down_proj.weight, std=0.5)
    pair = [Encoded(list(range(3, 11)), [True] * 8), Encoded(list(range(20, 23)), [True] * 3)]
    ids, kinds = to_tensors(pair, torch.device("cpu"))
    together = token_losses(run.model, hidden_states(run.model, ids), ids)
    short, _ = to_tensors(pair[1:], torch.device("cpu"))
    alone = token_losses(run.model, hidden_states(run.model, short), short)
    assert kinds[1].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    torch.testing.assert_close(together[1, :2], alone[0])


def test_micro_batches_hold_every_chat_once_within_the_limit() -> None:
    made = chats(50)
    batches = micro_batches(made, 64, Random(0))
    assert sorted(id(chat) for batch in batches for chat in batch) == sorted(map(id, made))
    assert all(len(batch) * max(len(chat.ids) for chat in batch) <= 64 for batch in batches)


def test_the_held_out_loss_counts_each_token_once() -> None:
    run = Run(TINY, Path("absent"), torch.device("cpu"))
    made = chats(9)
    rows = [torch.tensor([chat.ids]) for chat in made]
    expected = sum(float(token_losses(run.model, hidden_states(run.model, row), row).detach().sum()) for row in rows)
    measured = held_out_losses(run.model, made, 64)["all"] * sum(len(chat.ids) - 1 for chat in made)
    assert measured == pytest.approx(expected, rel=5e-3)  # bf16 autocast against float32


def test_the_lookahead_is_the_weighted_loss_of_tokens_further_on() -> None:
    torch.manual_seed(0)
    blocks = Lookahead(8)
    for block in blocks.blocks:
        torch.nn.init.normal_(block.weight)
    unembed = torch.nn.Linear(8, 32, bias=False)
    hidden, ids, weights = torch.randn(2, 9, 8), torch.randint(32, (2, 10)), torch.rand(2, 9)
    expected = {}
    for ahead in range(1, AHEAD + 1):
        expected[ahead] = 0.0
        for row in range(2):
            for t in range(9 - ahead):
                h = hidden[row, t]
                log_p = unembed(h + torch.nn.functional.silu(blocks.blocks[ahead - 1](h))).log_softmax(-1)
                loss = -float(log_p[ids[row, t + 1 + ahead]].detach())
                expected[ahead] += DECAY**ahead * loss * float(weights[row, t + ahead])
    drawn = Random(5).sample(range(1, AHEAD + 1), DRAWN)
    found = blocks.losses(hidden, unembed, ids, weights, Random(5)).detach()
    assert float(found) == pytest.approx(sum(expected[k] for k in drawn) * AHEAD / DRAWN, rel=1e-4)
    many = [float(blocks.losses(hidden, unembed, ids, weights, Random(seed)).detach()) for seed in range(300)]
    assert sum(many) / len(many) == pytest.approx(sum(expected.values()), rel=0.05)
