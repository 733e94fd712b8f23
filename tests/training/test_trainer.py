"""Steps whose loss or gradient is not finite: skipped while that is allowed, then the end. And
evaluations that are not finite.
"""

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.data.batch import IGNORE_INDEX, Batch
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.medusa import MedusaDraft
from medusa_train.models.loading import load_target_model
from medusa_train.models.precision import choose_precision
from medusa_train.training.optimizer import LocalStrategy
from medusa_train.training.target_model_recipe import build_target_model_recipe
from medusa_train.training.trainer import NonFiniteLossError, Trainer
from medusa_train.training.validation import ValidationResult
from tests.training.conftest import figures, metrics, stop_after, train


def spoil(monkeypatch: pytest.MonkeyPatch, *steps: int, what: str = "loss") -> None:
    """Make the loss, or the gradient alone, of these steps NaN, in their first micro-batch."""
    spoiled: set[int] = set()
    loss_and_gradients, forward_backward = (
        Trainer.loss_and_gradients,
        LocalStrategy.forward_backward,
    )

    def first_of(step: int) -> bool:
        due = step in steps and step not in spoiled
        spoiled.update({step} if due else ())
        return due

    def poison(strategy: LocalStrategy) -> None:
        assert strategy.parameters[0].grad is not None
        strategy.parameters[0].grad.view(-1)[0] = torch.nan

    def bad_loss(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        output = loss_and_gradients(self, *args, **kwargs)
        if not first_of(self.state.step + 1):
            return output
        poison(self.strategy)
        return dataclasses.replace(output, loss=output.loss * torch.nan)

    def bad_gradient(self: LocalStrategy, *args: Any) -> Any:
        output = forward_backward(self, *args)
        if first_of(self.scheduler.last_epoch + 1):
            poison(self)
        return output

    if what == "loss":
        monkeypatch.setattr(Trainer, "loss_and_gradients", bad_loss)
    else:
        monkeypatch.setattr(LocalStrategy, "forward_backward", bad_gradient)


def spoil_evaluations(monkeypatch: pytest.MonkeyPatch, value: float, *numbers: int) -> None:
    """Make the result of these evaluations `value`."""
    evaluate = Trainer.evaluate
    done: list[ValidationResult] = []

    def bad_result(self: Trainer, *args: Any) -> ValidationResult | None:
        result = evaluate(self, *args)
        assert result is not None
        done.append(result)
        if len(done) not in numbers:
            return result
        return dataclasses.replace(result, loss=value, objective=value, head_loss=[value] * 3)

    monkeypatch.setattr(Trainer, "evaluate", bad_result)


def of_kind(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if record["kind"] == kind]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_skipped_step_changes_nothing_and_is_counted(
    make_config, console, tmp_path, monkeypatch, what
):
    """Learning rate and data of the steps around it are those of a run in which nothing went wrong."""
    train(make_config(output_dir=str(tmp_path / "plain")), console)
    spoil(monkeypatch, 3, what=what)
    assert train(make_config(max_nonfinite_steps=1, save_steps=1, save_total_limit=9), console) == 0
    run = tmp_path / "run"
    plain, found = of_kind(tmp_path / "plain", "train"), of_kind(run, "train")
    assert [record["step"] for record in found] == [1, 2, 4, 5, 6]
    assert [r["lr"] for r in found] == [r["lr"] for r in plain if r["step"] != 3]
    assert [r["tokens"] for r in found] == [r["tokens"] for r in plain if r["step"] != 3]
    assert [r["loss"] for r in found[:2]] == [r["loss"] for r in plain[:2]]
    assert [r.get("skipped_steps") for r in found] == [None, None, 1, 1, 1]
    store = CheckpointStore(run)
    before, after = (store.load(store.at(step)) for step in (2, 3))
    assert all(torch.equal(before["draft"][name], after["draft"][name]) for name in before["draft"])
    assert (after["run"]["skipped"], after["engine"]["scheduler"]["last_epoch"]) == (1, 3)
    (skipped,) = of_kind(run, "skipped")
    assert (skipped["step"], skipped["skipped_steps"], skipped["max_nonfinite_steps"]) == (3, 1, 1)
    # of a loss the micro-batch to blame, of a gradient all of the step
    half = len(skipped["records"]) <= 4
    assert half == (what == "loss")
    assert all(
        record.startswith(str(make_config().datasets[0].path)) for record in skipped["records"]
    )
    line = next(
        x
        for x in console.file.getvalue().splitlines()
        if x.startswith("step 3 skipped (1 of at most")
    )
    assert all(record in line for record in skipped["records"])
    assert ("its gradient is not finite" in line) == (what == "gradient")


def test_one_too_many_ends_the_run_with_its_checkpoint(make_config, console, tmp_path, monkeypatch):
    """All over the run, not in a row."""
    spoil(monkeypatch, 2, 4, 6)
    with pytest.raises(NonFiniteLossError) as caught:
        train(make_config(max_nonfinite_steps=2, save_steps=2), console)
    message = str(caught.value)
    assert message.startswith("step 6: the loss is nan (max_")
    assert "2 were skipped before" in message
    assert f"last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-4'}" in message
    assert CheckpointStore(tmp_path / "run").steps() == [2, 4]


def test_the_count_outlives_a_stop(make_config, console, tmp_path, monkeypatch):
    keys = {"max_nonfinite_steps": 2, "logging_steps": 2, "lr_scheduler": "linear"}
    with monkeypatch.context() as patch:
        spoil(patch, 2, 5)
        train(make_config(output_dir=str(tmp_path / "whole"), **keys), console)
    with monkeypatch.context() as patch:
        spoil(patch, 2)
        stop_after(patch, 3, signal.SIGTERM)
        assert train(make_config(**keys), console) == 143
    with monkeypatch.context() as patch:
        spoil(patch, 5)
        assert train(make_config(**keys, resume_from_checkpoint="auto"), console) == 0
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert [record["skipped_steps"] for record in of_kind(tmp_path / "run", "skipped")] == [1, 2]
    with monkeypatch.context() as patch:
        spoil(patch, 7)
        with pytest.raises(NonFiniteLossError, match="2 were skipped before"):
            train(make_config(**keys, max_steps=8, resume_from_checkpoint="auto"), console)


def test_a_window_of_skipped_steps_has_no_line(make_config, console, tmp_path, monkeypatch):
    spoil(monkeypatch, 1, 3, 4)
    assert train(make_config(max_nonfinite_steps=3, logging_steps=2), console) == 0
    assert [record["step"] for record in of_kind(tmp_path / "run", "train")] == [2, 6]
    assert "6 steps, 3 of them skipped" in console.file.getvalue()


def refuse_constant(constant: str) -> None:
    raise AssertionError(constant)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_evaluation_that_is_not_finite_counts_for_patience_and_is_printed(
    make_config, console, tmp_path, monkeypatch, value
):
    spoil_evaluations(monkeypatch, value, 2, 3)
    cfg = make_config(early_stopping_patience=2, eval_steps=1, save_steps=9)
    assert train(cfg, console) == 0
    printed = console.file.getvalue().splitlines()
    warnings = [line for line in printed if line.startswith("warning: the held-out loss at step")]
    for line, step, count in zip(warnings, (2, 3), (1, 2), strict=True):
        assert f"at step {step} is {value}" in line
        assert f"({count} of early_stopping_patience 2)" in line
    assert any(
        "stopped early" in line and "using the weights of step 1" in line for line in printed
    )
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert [(record["objective"] is None, record["best"]) for record in evaluations] == [
        (False, True),
        (True, False),
        (True, False),
    ]


def test_an_evaluation_that_is_not_finite_is_printed_without_early_stopping(
    make_config, console, monkeypatch
):
    spoil_evaluations(monkeypatch, math.nan, 1)
    assert train(make_config(max_steps=2, eval_steps=1), console) == 0
    printed = console.file.getvalue()
    assert "warning: the held-out loss at step 1 is nan: this evaluation counts as one" in printed
    assert "early_stopping_patience" not in printed


def test_a_batch_without_targets_reaches_every_parameter(make_config, target_model_dir):
    """ZeRO waits for the gradient of each parameter from each process: none may be missing where
    nothing counts.
    """
    cfg = make_config(
        recipe="medusa2", adapter="lora", lora_target_linear=True, medusa_self_distillation=True
    )
    target_model = load_target_model(str(target_model_dir))
    draft = MedusaDraft.from_target_model(target_model, 3, dtype=torch.float32)
    recipe = build_target_model_recipe(
        cfg, target_model, choose_precision(False, torch.device("cpu"))
    )
    objective = Objective(draft, 0.8, lm="kl", heads_coefficient=0.5)
    shape = (2, 6)
    batch = Batch(
        torch.randint(0, 300, shape),
        torch.full(shape, IGNORE_INDEX),
        torch.arange(6).expand(shape),
        torch.zeros(shape, dtype=torch.long),
        [],
    )
    hidden_states = recipe.hidden_states(batch)
    teacher = recipe.teacher(batch, hidden_states)
    out = objective.loss_and_gradients(
        hidden_states,
        batch,
        torch.tensor([5, 5, 5, 5]),  # of other processes
        lm_head=recipe.target_model.lm_head(),
        teacher=teacher,
    )
    assert float(out.loss.detach()) == 0.0
    out.loss.backward()
    for name, parameter in [*draft.named_parameters(), *recipe.parameters.items()]:
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) == 0.0, name
