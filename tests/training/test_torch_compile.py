"""Training over compiled layers of a frozen target model: the losses and gradients of training without."""

import shutil
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from medusa_train.data.batch import Batch
from medusa_train.models import compiled
from medusa_train.progress import RunProgress
from medusa_train.training import target_model_recipe
from medusa_train.training.load_data import load_data
from medusa_train.training.setup import build_trainer
from tests.training.conftest import metrics, train

#: What is trained; Kangaroo reads the states after the first layer as well.
CASES: dict[str, dict[str, Any]] = {
    "medusa": {},
    "soft targets": {"medusa_soft_targets": 0.5},
    "packed": {"sample_packing": True, "sequence_len": 64, "micro_batch_size": 2},
    "4 bits": {"load_in_4bit": True},
    "kangaroo": {"draft": "kangaroo", "kangaroo": {"num_heads": 2, "exit_layer": 1}},
}


def count_passes(monkeypatch: pytest.MonkeyPatch, entered: list[bool]) -> None:
    """Let every compiled pass append to a list."""
    compile_layers = compiled.compile_layers

    def counted(layers: Any) -> Any:
        active = compile_layers(layers)
        return lambda: entered.append(True) or active()

    monkeypatch.setattr(target_model_recipe, "compile_layers", counted)


def loss_and_gradients(cfg, console) -> tuple[float, dict[str, torch.Tensor], Batch]:
    """The loss of the first micro-batch of a run, and its gradients by name."""
    trainer = build_trainer(cfg, load_data(cfg, console), RunProgress(console))
    batch = next(iter(trainer.loader))
    trainer.draft.train()
    output = trainer.loss_and_gradients(
        batch, trainer.objective.target_counts(batch), grad_scale=1.0
    )
    gradients = {name: parameter.grad for name, parameter in trainer.draft.named_parameters()}
    return float(output.loss), gradients, batch


@pytest.mark.usefixtures("traced_layers")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without(case: str, make_config, console, tmp_path, monkeypatch) -> None:
    """Over a run with validation, after which the tree is fitted by layers that are not compiled."""
    if "load_in_4bit" in CASES[case]:
        pytest.importorskip("bitsandbytes")
    entered: list[bool] = []
    count_passes(monkeypatch, entered)
    keys = {**CASES[case], "calibration_tokens": 40, "max_steps": 4}
    assert train(make_config(**keys, output_dir=str(tmp_path / "plain")), console) == 0
    assert not entered
    assert "torch_compile" not in console.file.getvalue()
    assert (
        train(
            make_config(**keys, torch_compile=True, output_dir=str(tmp_path / "compiled")), console
        )
        == 0
    )
    assert (
        "torch_compile: the target model's layers are compiled in the first steps"
        in console.file.getvalue()
    )
    assert len(entered) >= 8  # two micro-batches in each step, and the validation set
    assert (tmp_path / "compiled" / "tree.json").is_file()
    for kind, name in (("train", "loss"), ("train", "grad_norm"), ("eval", "loss")):
        plain, compiled = (
            [x[name] for x in metrics(tmp_path / r) if x["kind"] == kind]
            for r in ("plain", "compiled")
        )
        assert plain
        assert compiled == pytest.approx(plain, rel=1e-4)


@pytest.mark.usefixtures("traced_layers")
def test_stored_states_are_read_without_it(make_config, console, tmp_path, monkeypatch) -> None:
    """Whatever computed them, which is said."""
    entered: list[bool] = []
    count_passes(monkeypatch, entered)
    prepared = str(tmp_path / "prepared")
    cached = {"cache_hidden_states": True, "dataset_prepared_path": prepared, "max_steps": 1}
    plain = make_config(**cached, output_dir=str(tmp_path / "plain"))
    assert train(plain, console) == 0
    compiling = make_config(**cached, torch_compile=True, output_dir=str(tmp_path / "compiled"))
    assert train(compiling, console) == 0
    assert not entered
    shown = " ".join(console.file.getvalue().split())
    assert "states that are stored are read as they are" in shown
    assert "compiled in the first steps" not in shown


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)
@pytest.mark.parametrize("case", ["medusa", "packed", "kangaroo"])
def test_loss_and_gradients_are_equal_up_to_rounding(case: str, make_config, console) -> None:
    torch.compiler.reset()
    loss, gradients, batch = loss_and_gradients(make_config(**CASES[case]), console)
    overwrite = {"overwrite_output_dir": True, "torch_compile": True}
    compiled_loss, compiled, same = loss_and_gradients(
        make_config(**CASES[case], **overwrite), console
    )
    assert torch.equal(same.tokens, batch.tokens)
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert set(compiled) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_target_model_that_learns_is_refused(make_config) -> None:
    make_config(torch_compile=True)
    make_config(recipe="medusa2")
    with pytest.raises(ValidationError, match="only passes of a frozen target model are compiled"):
        make_config(torch_compile=True, adapter="lora")
