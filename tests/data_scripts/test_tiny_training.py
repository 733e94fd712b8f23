"""Tests of data/tiny: losses, schedule, unlikelihood fine-tuning, and a whole build in miniature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import build
import chats
import corpus
import pytest
import torch
import unlikelihood
from safetensors import safe_open
from training import LookaheadHeads, Recipe, TrainingRun, build_model, hidden_states, token_losses
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_train.config.paths import PROJECT_ROOT

CPU = torch.device("cpu")
SMALL = Recipe(
    steps=6, hidden=32, head_dim=16, layers=2, intermediate=48, vocabulary=64, micro_batch=64, warmup=2, brief_steps=2
)


def random_chats(count: int, seed: int = 0) -> list[chats.EncodedChat]:
    """Chats of 5 to 20 tokens."""
    rng = Random(seed)
    sizes = [rng.randint(5, 20) for _ in range(count)]
    return [
        chats.EncodedChat([rng.randrange(3, 64) for _ in range(size)], [i > 3 for i in range(size)]) for size in sizes
    ]


def small_run(**changes: object) -> TrainingRun:
    return TrainingRun(replace(SMALL, **changes), CPU)


def test_recipe_has_the_shipped_model_s_shapes() -> None:
    with safe_open(PROJECT_ROOT / "data" / "tiny" / "model.safetensors", "pt") as file:
        shipped = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(value.shape) for name, value in build_model(Recipe()).state_dict().items()} == shipped


def test_padding_does_not_change_losses() -> None:
    run = small_run()
    torch.nn.init.normal_(run.model.model.layers[0].mlp.down_proj.weight, std=0.5)
    pair = [chats.EncodedChat(list(range(3, 11)), [True] * 8), chats.EncodedChat(list(range(20, 23)), [True] * 3)]
    ids, kinds = chats.to_tensors(pair, CPU)
    padded = token_losses(run.model, hidden_states(run.model, ids), ids)
    short, _ = chats.to_tensors(pair[1:], CPU)
    alone = token_losses(run.model, hidden_states(run.model, short), short)
    assert kinds[1].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    torch.testing.assert_close(padded[1, :2], alone[0])


def test_lookahead_loss_is_the_weighted_loss_of_later_tokens() -> None:
    torch.manual_seed(0)
    heads = LookaheadHeads(8)
    for block in heads.blocks:
        torch.nn.init.normal_(block.weight)
    lm_head = torch.nn.Linear(8, 32, bias=False)
    hidden, ids, weights = torch.randn(2, 9, 8), torch.randint(32, (2, 10)), torch.rand(2, 9)
    expected = dict.fromkeys(range(1, 5), 0.0)
    for k in expected:
        for row in range(2):
            for t in range(9 - k):
                h = hidden[row, t]
                log_p = lm_head(h + torch.nn.functional.silu(heads.blocks[k - 1](h))).log_softmax(-1)
                expected[k] -= 0.8**k * float(log_p[ids[row, t + 1 + k]].detach()) * float(weights[row, t + k])

    def loss(seed: int) -> float:
        return float(heads.loss(hidden, lm_head, ids, weights, Random(seed)).detach())

    assert loss(5) == pytest.approx(sum(expected[k] for k in Random(5).sample(range(1, 5), 2)) * 2, rel=1e-4)
    assert sum(map(loss, range(300))) / 300 == pytest.approx(sum(expected.values()), rel=0.05)


def test_unlikelihood_lowers_uncertain_tokens_and_spares_certain_ones() -> None:
    logits = torch.tensor([[[1.0, 0.0, -1.0], [9.0, 0.0, -1.0], [1.0, 0.0, -1.0], [1.0, 0.0, 2.0]]], requires_grad=True)
    ids, weights = torch.tensor([[2, 0, 0, 1, 2]]), torch.tensor([[1.0, -1.0, -1.0, 2.0, 0.0]])
    losses = unlikelihood.signed_losses(logits, ids, weights)
    p = logits.detach().softmax(-1)[0]
    uncertainty = (1 - p[:2, 0]) ** 2 + 1e-4
    share = uncertainty / uncertainty.sum()
    assert share[0] > 0.99  # the second token is certain
    log_not_p = torch.log1p(-p[:2, 0].clamp(max=1 - 1e-4))
    likely = -2 * torch.log(p[2, 1])
    torch.testing.assert_close(losses[0], torch.stack([*(-share * log_not_p), likely, torch.tensor(0.0)]))
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0] > 0 > logits.grad[0, 2, 1]
    assert not logits.grad[0, 3].any()


def test_build_in_miniature(module: str, tmp_path: Path) -> None:
    problems = [corpus.Problem(f"Ada has {n} boxes. How many are that?", f"The answer is {n}.") for n in range(80)]
    recipe = replace(SMALL, steps=4, vocabulary=400, micro_batch=512, unlikelihood_rounds=1, unlikelihood_requests=4)
    build.build([*corpus.functions_in(module), *problems], recipe, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert not model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id == chats.EOS_ID
