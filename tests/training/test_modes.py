"""Dropout: on in the passes that learn, off in those of the teacher, of validation and of decoding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import choose_precision
from medusa_train.training.target_model_recipe import TargetModelRecipe, build_target_model_recipe
from medusa_train.training.trainer import Trainer
from tests.training.conftest import LORA, train

HYDRA = {"draft": "hydra", "hydra": {"num_heads": 2, "dropout": 0.5}}

#: What a module ran in: part of the trainer, with gradients or without, training mode or not.
Pass = tuple[str, bool, bool]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Pass]]:
    """The passes of all modules of the target model and of the draft, from the first step on."""
    found: set[Pass] = set()
    trainers: list[Trainer] = []
    run = Trainer.run

    def noted_run(self: Trainer, *args: Any) -> Any:
        trainers.append(self)
        return run(self, *args)

    def note(module: nn.Module, args: Any) -> None:
        if not trainers:
            return
        parts = {"backbone": trainers[-1].recipe.target_model.model, "draft": trainers[-1].draft}
        for name, part in parts.items():
            if any(module is own for own in part.modules()):
                found.add((name, torch.is_grad_enabled(), module.training))

    monkeypatch.setattr(Trainer, "run", noted_run)
    handle = register_module_forward_pre_hook(note)
    yield found
    handle.remove()


LEARNING = {("backbone", True, True), ("draft", True, True)}
FIXED = {("backbone", False, False), ("draft", False, False)}


@pytest.mark.parametrize(
    "keys",
    [LORA, {"recipe": "medusa2"}, {"recipe": "medusa2", "medusa_num_unfreeze_layers": 1}],
    ids=["LoRA", "all layers", "the last layer"],
)
def test_joint_training_has_dropout_in_its_own_passes_alone(
    make_config, console, passes, keys
) -> None:
    cfg = make_config(**keys, max_steps=3, eval_steps=1, calibration_tokens=80)
    assert train(cfg, console) == 0
    assert passes == LEARNING | FIXED


def test_an_adapter_that_is_trained_on_has_dropout(make_config, console, tmp_path, passes) -> None:
    """It is loaded as for decoding."""
    train(make_config(**LORA, max_steps=1, output_dir=str(tmp_path / "one")), console)
    passes.clear()
    cfg = make_config(**LORA, lora_model_dir=str(tmp_path / "one"), max_steps=1, val_set_size=0)
    assert train(cfg, console) == 0
    assert passes == LEARNING | {("backbone", False, False)}  # of the teacher


def test_heads_that_are_trained_on_have_dropout(make_config, console, tmp_path, passes) -> None:
    """They are loaded as for decoding."""
    train(make_config(**HYDRA, max_steps=1, output_dir=str(tmp_path / "one")), console)
    passes.clear()
    cfg = make_config(**HYDRA, lora_model_dir=str(tmp_path / "one"), max_steps=1, val_set_size=0)
    assert train(cfg, console) == 0
    assert {found for found in passes if found[0] == "draft"} == {("draft", True, True)}


def test_a_frozen_target_model_never_has_dropout(make_config, console, passes) -> None:
    cfg = make_config(**HYDRA, max_steps=3, eval_steps=1, calibration_tokens=80)
    assert train(cfg, console) == 0
    assert {found for found in passes if found[0] == "draft"} == {
        ("draft", True, True),
        ("draft", False, False),
    }
    assert not any(training for name, _, training in passes if name == "backbone")


def recipe_of(cfg: Any, target_model_dir: Any) -> TargetModelRecipe:
    target_model = load_target_model(str(target_model_dir))
    return build_target_model_recipe(
        cfg, target_model, choose_precision(False, torch.device("cpu"))
    )


def test_train_mode_is_the_target_model_s_where_it_is_trained(
    make_config, target_model_dir
) -> None:
    """Two passes differ by the dropout of LoRA, and only in train mode."""
    recipe = recipe_of(make_config(**{**LORA, "lora_dropout": 0.5}), target_model_dir)
    with torch.no_grad():
        for parameter in recipe.parameters.values():  # B is 0 at first
            parameter.normal_()

    def states() -> torch.Tensor:
        return recipe.target_model.run(torch.arange(5)[None]).final.detach()

    recipe.train(False)
    without = states()
    assert torch.equal(without, states())
    recipe.train()
    assert not torch.equal(states(), states())
    recipe.train(False)
    assert torch.equal(without, states())


def test_train_mode_leaves_a_frozen_target_model_as_it_is(make_config, target_model_dir) -> None:
    recipe = recipe_of(make_config(recipe="medusa1"), target_model_dir)
    recipe.train()
    assert not any(module.training for module in recipe.target_model.model.modules())
