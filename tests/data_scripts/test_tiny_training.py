"""A training run of the tiny backbone: its schedule, what it teaches, and how it goes on after a stop."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipe import Recipe
from tiny_samples import TINY, chats
from training import Run


def test_the_lookahead_teaches_the_model_and_is_not_part_of_it() -> None:
    def after_a_step(weight: float) -> Run:
        run = Run(replace(TINY, lookahead_weight=weight, lookahead_from=0.0), Path("absent"), torch.device("cpu"))
        for number in range(3):  # the model's output projections start at zero
            run.update([chats(4, number)])
        return run

    with_it, without = after_a_step(1.0), after_a_step(0.0)
    assert any(block.weight.abs().sum() > 0 for block in with_it.lookahead.blocks)
    assert not any(block.weight.any() for block in without.lookahead.blocks)
    assert not torch.equal(with_it.model.lm_head.weight, without.model.lm_head.weight)
    assert not any("lookahead" in name for name in with_it.model.state_dict())


def test_the_lookahead_begins_where_the_recipe_says() -> None:
    run = Run(replace(TINY, lookahead_from=0.5), Path("absent"), torch.device("cpu"))
    learnt = []
    for number in range(4):
        run.update([chats(4, number)])
        learnt.append(any(block.weight.any() for block in run.lookahead.blocks))
    assert learnt == [False, False, False, True]  # of six steps


def test_the_lookahead_is_a_mean_over_the_tokens_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(times: int) -> list[torch.Tensor]:
        recipe = replace(TINY, lookahead_weight=1.0, lookahead_from=0.0, embedding_dropout=0.0)
        run = Run(recipe, Path("absent"), torch.device("cpu"))
        monkeypatch.setattr(run, "apply", lambda rate: None)
        run.update([chats(4) * times])
        return [block.weight.grad for block in run.lookahead.blocks if block.weight.grad is not None]

    once, twice = gradients(1), gradients(2)
    assert any(gradient.any() for gradient in once)
    torch.testing.assert_close(twice, once, rtol=0.05, atol=1e-4)  # products in bfloat16


def test_a_run_goes_on_exactly_where_it_stopped(tmp_path: Path) -> None:
    class Stop(Exception):
        """Stands for a power cut."""

    def train(checkpoint: Path, stop_at: int | None) -> Run:
        run = Run(TINY, checkpoint, torch.device("cpu"))
        saved: list[int] = []

        def on_checkpoint(model: object) -> None:
            saved.append(run.step)
            if run.step == stop_at:
                raise Stop

        try:
            run.train(
                lambda number: chats(12, number),
                lambda number: chats(12, 50 + number),
                {"some": chats(3)},
                print,
                3,
                on_checkpoint,
            )
        except Stop:
            assert saved == [3]
        return run

    whole = train(tmp_path / "whole.safetensors", None)
    assert train(tmp_path / "part.safetensors", 3).step == 3
    resumed = train(tmp_path / "part.safetensors", None)
    assert resumed.step == 6
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_the_rate_warms_up_stays_and_ends_at_zero_after_polishing() -> None:
    recipe = Recipe(steps=1000, warmup=10, flat=0.4, polish_rate=0.2, polish_rounds=50)
    assert [recipe.rate(step) for step in (0, 9, 400)] == [0.1, 1.0, 1.0]
    assert recipe.rate(700) == pytest.approx(0.6)
    assert recipe.rate(999) == pytest.approx(0.2, abs=2e-3)
    assert recipe.rate(1000) == pytest.approx(0.2)
    assert recipe.rate(1025) == pytest.approx(0.2)
    assert recipe.rate(1049) == pytest.approx(0.2 / 25)
