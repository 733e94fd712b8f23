"""A trainer is built from every key."""

import pytest
import torch

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training.load_data import load_data
from medusa_train.training.schedule import few_steps_advice, make_schedule
from medusa_train.training.setup import build_trainer
from tests.slow import slow_down
from tests.training.conftest import train


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
    got = [
        (g["lr"], g["weight_decay"], {p.ndim for p in g["params"]})
        for g in trainer.strategy.optimizer.param_groups
    ]
    assert got == [
        (pytest.approx(3e-3), 0.1, {2}),
        (pytest.approx(3e-3), 0.0, {1}),
        (pytest.approx(1e-3), 0.1, {2}),
        (pytest.approx(1e-3), 0.0, {1}),
    ]
    objective = trainer.objective
    assert (objective.decay, objective.heads_coefficient, objective.schedule) == (0.5, 0.3, "sine")
    assert trainer.strategy.max_grad_norm == 0.3
    assert (trainer.loader.seed, trainer.loader.shuffle) == (7, True)
    assert (trainer.loader.micro_batch_size, trainer.cfg.gradient_accumulation_steps) == (4, 2)


def test_a_constant_schedule_has_no_warmup(make_config, console):
    cfg = make_config(lr_scheduler="constant", warmup_steps=5, learning_rate=1e-3)
    assert build_trainer(
        cfg, load_data(cfg, console), RunProgress(console)
    ).strategy.lr == pytest.approx(1e-3)
    assert "after 0 warmup steps, constant schedule" in " ".join(console.file.getvalue().split())


#: 133 chats with configs/any_m1.yaml: three micro-batches in each of two epochs.
FEW_CHATS = {"max_steps": None, "num_epochs": 2, "gradient_accumulation_steps": 16}


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        (
            {**FEW_CHATS, "warmup_steps": None, "warmup_ratio": 0.03},
            r"warmup_ratio: 0\.03: .*Set gradient_accumulation_steps: 1 and num_epochs: 7, or"
            " warmup_ratio: 0$",
        ),
        ({**FEW_CHATS, "warmup_steps": 9}, "^warmup_steps: 9: .*, or warmup_steps: 0$"),
        ({"max_steps": 1, "warmup_steps": 9}, "Set max_steps: 20, or warmup_steps: 0$"),
    ],
    ids=["ratio", "steps", "max_steps"],
)
def test_a_run_whose_only_step_has_a_rate_of_zero_is_an_error(make_config, keys, advice):
    with pytest.raises(ConfigError, match=advice):
        make_schedule(make_config(**keys), 3)
    for trained in ({"warmup_steps": 0, "warmup_ratio": None}, {"lr_scheduler": "constant"}):
        assert make_schedule(make_config(**{**keys, **trained}), 3).total_steps == 1


def test_a_run_that_would_train_nothing_ends_before_the_model_is_loaded(
    make_config, console, monkeypatch
):
    monkeypatch.setattr("medusa_train.training.setup.load_target_model", None)
    with pytest.raises(ConfigError, match="nothing would be trained"):
        train(make_config(max_steps=1, warmup_steps=2), console)


@pytest.mark.parametrize(
    ("keys", "micro_batches", "changes"),
    [
        ({"num_epochs": 2, "gradient_accumulation_steps": 1}, 9, "num_epochs: 3"),
        (
            {"num_epochs": 2, "gradient_accumulation_steps": 4},
            35,
            "gradient_accumulation_steps: 3",
        ),
        (FEW_CHATS, 3, "gradient_accumulation_steps: 1 and num_epochs: 7"),
    ],
    ids=["epochs", "batch", "both"],
)
def test_few_steps_are_reported_with_what_gives_twenty(make_config, keys, micro_batches, changes):
    cfg = make_config(**{**keys, "max_steps": None})
    schedule = make_schedule(cfg, micro_batches)
    advice = few_steps_advice(cfg, schedule)
    assert advice.startswith(f"note: {schedule.total_steps} steps in all are few")
    assert advice.endswith(f"set {changes}")
    changed = {}
    for change in changes.split(" and "):
        key, value = change.split(": ")
        changed[key] = int(value)
    enough = make_config(**{**keys, "max_steps": None, **changed})
    schedule = make_schedule(enough, micro_batches)
    assert schedule.total_steps >= 20
    assert few_steps_advice(enough, schedule) is None


@pytest.mark.parametrize("max_steps", [None, 2])
def test_few_steps_that_were_asked_for_are_not_reported(make_config, console, max_steps):
    cfg = make_config(max_steps=max_steps, num_epochs=1)
    build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    assert ("are few to train a draft" in console.file.getvalue()) == (max_steps is None)


def test_a_resumed_run_names_another_batch(make_config, console):
    keys = {"max_steps": 4, "gradient_accumulation_steps": 2}
    train(make_config(**keys), console)
    more = {**keys, "max_steps": 5, "resume_from_checkpoint": "auto"}
    train(make_config(**more), console)
    assert "the batch differs" not in console.file.getvalue()
    train(make_config(**{**more, "max_steps": 6, "gradient_accumulation_steps": 1}), console)
    assert (
        "note: the batch differs from that of the checkpoint: its 5 steps were"
        in console.file.getvalue()
    )


def test_the_schedule_and_tf32_arrive(make_config, console, monkeypatch):
    asked = []
    # global: not left changed
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    keys = {"warmup_steps": None, "warmup_ratio": 0.5, "cosine_min_lr_ratio": 0.25}
    keys |= {"learning_rate": 1e-3, "max_steps": 4}
    cfg = make_config(**keys, tf32=True)
    strategy = build_trainer(cfg, load_data(cfg, console), RunProgress(console)).strategy
    assert "after 2 warmup steps, cosine schedule" in " ".join(console.file.getvalue().split())
    for _ in range(4):
        strategy.optimizer.step()
        strategy.scheduler.step()
    assert (strategy.lr, asked) == (pytest.approx(0.25e-3), ["high"])
    keys |= {"max_steps": 100, "warmup_ratio": 0.07}  # as floats, 0.07 * 100 > 7 and 1.1 * 50 > 55
    assert make_schedule(make_config(**keys), 9).warmup_steps == 7
    assert make_schedule(make_config(num_epochs=1.1, max_steps=None), 2 * 50).total_steps == 55


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("setup.load_target_model", "loading the model"),
        ("setup.load_snapshot", "reading the checkpoint"),
        ("setup.build_strategy", "preparing the optimizer"),
        ("trainer.take_snapshot", "checkpoints"),
    ],
)
def test_what_takes_seconds_says_so(place, words, make_config, console, monkeypatch):
    """In a log file, where no bar is shown: each of these was silent."""
    cfg = make_config(max_steps=1)
    if place == "setup.load_snapshot":
        train(cfg, console)
        assert words not in console.file.getvalue()  # a new run has none to read
        cfg = make_config(max_steps=2, resume_from_checkpoint="auto")
    monkeypatch.setattr("medusa_train.progress.SILENT_SECONDS", 0.2)
    slow_down(monkeypatch, f"medusa_train.training.{place}")
    train(cfg, console)
    assert f"{words}: 0 s so far\n" in console.file.getvalue()


@pytest.mark.parametrize(
    ("keys", "name"), [({}, "preparing the optimizer"), ({"deepspeed": {}}, "starting DeepSpeed")]
)
def test_the_time_that_deepspeed_takes_is_named(keys, name, make_config, console, monkeypatch):
    def fail(*arguments):
        raise MedusaError("not built")

    monkeypatch.setattr("medusa_train.training.setup.build_strategy", fail)
    cfg = make_config(**keys)
    progress = RunProgress(console)
    with pytest.raises(MedusaError, match="not built"):
        build_trainer(cfg, load_data(cfg, console), progress)
    assert list(progress.seconds)[-1] == name
