"""A trainer is built from every key."""

from __future__ import annotations

import pytest

from medusa_train.progress import RunProgress
from medusa_train.training.load_data import load_data
from medusa_train.training.setup import build_trainer


def test_every_key_of_the_optimisation_arrives(make_config, console):
    cfg = make_config(
        recipe="medusa2",
        medusa_num_unfreeze_layers=1,
        learning_rate=1e-3,
        medusa_lr_multiplier=3.0,
        weight_decay=0.1,
        medusa_decay_coefficient=0.5,
        medusa_heads_coefficient=0.3,
        medusa_scheduler="sine",
        max_grad_norm=0.3,
        lr_scheduler="constant",
        seed=7,
    )
    trainer = build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    groups = [
        (g["lr"], g["weight_decay"], {p.ndim for p in g["params"]}) for g in trainer.strategy.optimizer.param_groups
    ]
    assert groups == [
        (pytest.approx(3e-3), 0.1, {2}),
        (pytest.approx(3e-3), 0.0, {1}),
        (pytest.approx(1e-3), 0.1, {2}),
        (pytest.approx(1e-3), 0.0, {1}),
    ]
    objective = trainer.objective
    assert (objective.decay, objective.heads_coefficient, objective.schedule) == (0.5, 0.3, "sine")
    assert trainer.strategy.max_grad_norm == 0.3
    assert (trainer.loader.seed, trainer.loader.shuffle) == (7, True)
    assert (trainer.loader.micro_batch_size, trainer.accumulation) == (4, 2)
