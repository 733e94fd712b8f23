"""What a run goes on from is decided once: every state that a directory can be in has one plan."""

import pytest

from medusa_train.checkpoint.run_directory import write_config
from medusa_train.checkpoint.store import MANIFEST
from medusa_train.config.load import stage_one_config
from medusa_train.errors import CheckpointError
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.resume import (
    NEW_STAGE,
    forget_incomparable_best,
    plan_resume,
)
from medusa_train.training.snapshot import TrainState
from tests.training.conftest import LORA, metrics, train

FIRST = {"recipe": "medusa1", "max_steps": 4}


def add_checkpoint(run, step, complete=True):
    path = run / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    if complete:
        (path / MANIFEST).write_text("{}")
    return path


@pytest.fixture
def plan(make_config):
    """Plan a run in two stages."""

    def make(**keys):
        cfg = make_config(**{**LORA, "stage_one": FIRST, **keys})
        return plan_resume(cfg, stage_one_config(cfg))

    return make


def test_a_run_that_does_not_resume_is_new(plan, tmp_path):
    add_checkpoint(tmp_path / "run", 3)
    assert plan() == NEW_STAGE


def test_without_any_checkpoint_it_says_so_and_starts(plan, tmp_path):
    found = plan(resume_from_checkpoint="auto")
    assert found.checkpoint is None
    assert not found.stage_one_is_finished
    assert f"no checkpoint in {tmp_path / 'run'}/stage_one/checkpoints, starting" in found.note


def test_stage_one_goes_on_from_its_newest_checkpoint(plan, tmp_path):
    add_checkpoint(tmp_path / "run/stage_one", 2)
    newest = add_checkpoint(tmp_path / "run/stage_one", 10)
    add_checkpoint(tmp_path / "run/stage_one", 12, complete=False)
    found = plan(resume_from_checkpoint="auto")
    assert found.checkpoint == newest
    assert not found.stage_one_is_finished


def test_a_stopped_stage_one_is_compared_with_its_own_settings(make_config, tmp_path):
    keys = {**LORA, "resume_from_checkpoint": "auto"}
    cfg = make_config(**keys, stage_one=FIRST)
    first = stage_one_config(cfg)
    add_checkpoint(first.run_dir, 2)
    write_config(first, first.run_dir)
    assert plan_resume(cfg, first).changed == ()
    other = make_config(**keys, stage_one={**FIRST, "optimizer": "adamw_8bit"})
    (changed,) = plan_resume(other, stage_one_config(other)).changed
    assert changed == 'optimizer: was "adamw_torch", now "adamw_8bit"'


@pytest.mark.parametrize("content", [None, "", "medusa_num_heads: 5\nda"])
def test_a_run_whose_config_cannot_be_read_is_named(make_config, tmp_path, content):
    """Its settings, LoRA's factor among them, may have been others."""
    run = tmp_path / "run"
    checkpoint = add_checkpoint(run, 2)
    cfg = make_config(resume_from_checkpoint="auto")
    if content is not None:
        (run / "config.yaml").write_text(content)
    assert plan_resume(cfg, None).note == (
        f"note: {run / 'config.yaml'} is missing or cannot be read: whether settings changed since"
        f" {checkpoint} is not known"
    )
    write_config(cfg, run)
    assert plan_resume(cfg, None).note is None


def test_a_checkpoint_of_stage_two_comes_first(plan, tmp_path):
    add_checkpoint(tmp_path / "run/stage_one", 2)
    newest = add_checkpoint(tmp_path / "run", 1)
    found = plan(resume_from_checkpoint="auto")
    assert found.checkpoint == newest
    assert found.stage_one_is_finished


def test_an_incomplete_checkpoint_of_stage_two_is_none(plan, tmp_path):
    newest = add_checkpoint(tmp_path / "run/stage_one", 2)
    add_checkpoint(tmp_path / "run", 1, complete=False)
    assert plan(resume_from_checkpoint="auto").checkpoint == newest


def test_a_checkpoint_of_stage_one_cannot_be_named(plan, tmp_path):
    named = add_checkpoint(tmp_path / "run/stage_one", 2)
    with pytest.raises(CheckpointError, match="is a checkpoint of stage one"):
        plan(resume_from_checkpoint=str(named))


def test_a_named_checkpoint_comes_before_a_newer_one(plan, tmp_path):
    named = add_checkpoint(tmp_path / "run", 1)
    add_checkpoint(tmp_path / "run", 5)
    assert plan(resume_from_checkpoint=str(named)).checkpoint == named


def test_results_without_a_checkpoint_are_not_overwritten(make_config, tmp_path):
    (tmp_path / "run/heads").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="holds heads/ but no complete checkpoint"):
        plan_resume(make_config(resume_from_checkpoint="auto"), None)


def test_stage_one_is_not_deleted_by_a_resume_without_it(make_config, tmp_path):
    """As by stage_one=null, or by the file of another recipe."""
    kept = add_checkpoint(tmp_path / "run/stage_one", 2)
    with pytest.raises(CheckpointError, match="but the configuration has no stage_one"):
        plan_resume(make_config(resume_from_checkpoint="auto"), None)
    assert kept.is_dir()


class Store:
    root = "run/checkpoints"

    def best(self, step):
        return None if step == 3 else f"best-{step}"


def resumed_state(console, *, step=2, validation="same", objective=None, patience=1):
    """A state with a best evaluation, after a resume with the data "same" and a decay of 0.8."""
    state = TrainState(
        best_loss=1.0,
        best_step=step,
        evals_since_best=4,
        evaluated=6,
        validation=validation,
        objective=objective,
    )
    now = {"decay coefficient": 0.8}
    forget_incomparable_best(state, "same", now, Store(), patience, SINGLE_PROCESS, console)
    assert (state.validation, state.objective) == ("same", now)
    return state


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"validation": None},  # of an earlier version
        {"objective": {"decay coefficient": 0.8}},
        {"step": 3, "patience": None},
    ],
    ids=["same", "unknown", "same objective", "no early stopping"],
)
def test_the_best_evaluation_is_kept_where_later_ones_compare(console, keys):
    state = resumed_state(console, **keys)
    assert (state.best_loss, state.evals_since_best) == (1.0, 4)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"validation": "other"}, "the validation data changed"),
        ({"validation": "other", "patience": None}, "the validation data changed"),
        ({"objective": {"decay coefficient": 1.0}}, "decay coefficient was 1.0, now 0.8"),
        ({"objective": {"gone": 1}}, "gone was 1, now None"),
        ({"step": 3}, "its weights are not in run/checkpoints"),
    ],
    ids=["data", "data, no early stopping", "objective", "term", "weights"],
)
def test_the_best_evaluation_is_forgotten_with_its_reason(console, keys, reason):
    state = resumed_state(console, **keys)
    # its weights are not what a run ends with, even if no later evaluation is finite
    assert (state.best_loss, state.best_step, state.evals_since_best) == (None, 0, 0)
    best = f"lowest 1.0000 at step {keys.get('step', 2)}"
    assert f"note: the best evaluation so far ({best}) is forgotten" in console.file.getvalue()
    assert console.file.getvalue().endswith(f": {reason}\n")


def test_nothing_is_printed_where_there_was_no_evaluation(console):
    state = TrainState(validation="other")
    forget_incomparable_best(state, "same", {}, Store(), 1, SINGLE_PROCESS, console)
    assert console.file.getvalue() == ""


HEADS_ONLY = {"learning_rate": 1e-9, "early_stopping_patience": 2}
JOINT = {**HEADS_ONLY, **LORA, "medusa_self_distillation": False, "learning_rate": 1e-9}


@pytest.mark.parametrize(
    ("keys", "changed", "reason"),
    [
        (HEADS_ONLY, {"medusa_decay_coefficient": 1.0}, "decay coefficient was 0.8, now 1.0"),
        (HEADS_ONLY, {"medusa_soft_targets": 0.5}, "soft targets was 0.0, now 0.5"),
        (JOINT, {"medusa_heads_coefficient": 0.9}, "heads coefficient was 0.2, now 0.9"),
        (JOINT, {"medusa_distillation_regularization": 0.5}, "regularization was 0.0, now 0.5"),
        (JOINT, {"medusa_self_distillation": True}, "LM loss was ce, now kl"),
    ],
    ids=["decay", "soft targets", "lambda0", "rho", "LM loss"],
)
def test_evaluations_of_another_objective_are_no_reason_to_stop_early(
    make_config, console, tmp_path, keys, changed, reason
):
    keys = {**keys, "save_steps": 1, "eval_steps": 1}
    assert train(make_config(**keys, max_steps=2), console) == 0
    assert reason not in console.file.getvalue()
    again = make_config(**{**keys, **changed}, max_steps=4, resume_from_checkpoint="auto")
    assert train(again, console) == 0
    assert reason in console.file.getvalue()
    best = [record["best"] for record in metrics(tmp_path / "run") if record["kind"] == "eval"]
    assert (best[0], best[2]) == (True, True)


def test_evaluations_of_a_target_model_in_other_bits_are_no_reason_to_stop_early(
    make_config, console
):
    pytest.importorskip("bitsandbytes")
    keys = {**HEADS_ONLY, "save_steps": 1, "eval_steps": 1}
    train(make_config(**keys, max_steps=1), console)
    changed = {"load_in_4bit": True, "resume_from_checkpoint": "auto"}
    train(make_config(**keys, **changed, max_steps=2), console)
    assert "quantization was None, now nf4" in console.file.getvalue()


@pytest.mark.parametrize("changed", [{"medusa_scheduler": "sine"}, {"weight_decay": 0.1}], ids=str)
def test_what_validation_does_not_measure_leaves_the_best_evaluation(make_config, console, changed):
    keys = {**JOINT, "save_steps": 1, "eval_steps": 1}
    train(make_config(**keys, max_steps=2), console)
    again = make_config(**{**keys, **changed}, max_steps=3, resume_from_checkpoint="auto")
    train(again, console)
    assert "resuming after step 2" in console.file.getvalue()
    assert "is forgotten" not in console.file.getvalue()
