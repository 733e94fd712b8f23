"""What a run goes on from is decided once: every state that a directory can be in has one plan."""

import pytest

from medusa_train.checkpoint.run_directory import write_config
from medusa_train.checkpoint.store import MANIFEST
from medusa_train.config.load import stage_one_config
from medusa_train.errors import CheckpointError
from medusa_train.training.distributed import SINGLE_PROCESS
from medusa_train.training.resume import (
    NEW_STAGE,
    ResumePlan,
    forget_incomparable_best,
    plan_resume,
)
from medusa_train.training.snapshot import TrainState
from tests.training.conftest import LORA

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


def test_a_run_that_does_not_resume_replaces_what_is_there(plan, tmp_path):
    add_checkpoint(tmp_path / "run", 3)
    assert plan() == ResumePlan(replaces=True)


def test_without_any_checkpoint_it_says_so_and_starts(plan, tmp_path):
    found = plan(resume_from_checkpoint="auto")
    assert found.start == NEW_STAGE
    assert not found.stage_one_is_finished
    assert not found.replaces
    assert f"no checkpoint in {tmp_path / 'run'}/stage_one/checkpoints, starting" in found.note


def test_stage_one_goes_on_from_its_newest_checkpoint(plan, tmp_path):
    add_checkpoint(tmp_path / "run/stage_one", 2)
    newest = add_checkpoint(tmp_path / "run/stage_one", 10)
    add_checkpoint(tmp_path / "run/stage_one", 12, complete=False)
    found = plan(resume_from_checkpoint="auto")
    assert found.start.checkpoint == newest
    assert not found.stage_one_is_finished


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
    assert found.start.checkpoint == newest
    assert found.stage_one_is_finished


def test_an_incomplete_checkpoint_of_stage_two_is_none(plan, tmp_path):
    newest = add_checkpoint(tmp_path / "run/stage_one", 2)
    add_checkpoint(tmp_path / "run", 1, complete=False)
    assert plan(resume_from_checkpoint="auto").start.checkpoint == newest


def test_a_checkpoint_of_stage_one_cannot_be_named(plan, tmp_path):
    named = add_checkpoint(tmp_path / "run/stage_one", 2)
    with pytest.raises(CheckpointError, match="is a checkpoint of stage one"):
        plan(resume_from_checkpoint=str(named))


def test_a_named_checkpoint_comes_before_a_newer_one(plan, tmp_path):
    named = add_checkpoint(tmp_path / "run", 1)
    add_checkpoint(tmp_path / "run", 5)
    assert plan(resume_from_checkpoint=str(named)).start.checkpoint == named


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
    def best(self, step):
        return None if step == 3 else f"best-{step}"


@pytest.mark.parametrize(
    ("validation", "step", "patience", "kept"),
    [
        ("same", 2, 1, True),
        ("other", 2, 1, False),
        ("other", 2, None, False),
        (None, 2, 1, True),  # of an earlier version
        ("same", 3, 1, False),  # its weights were left in another directory
        ("same", 3, None, True),
    ],
)
def test_the_best_evaluation_is_kept_where_later_ones_compare(validation, step, patience, kept):
    state = TrainState(best_loss=1.0, best_step=step, evals_since_best=4, validation=validation)
    forget_incomparable_best(state, "same", Store(), patience, SINGLE_PROCESS)
    assert (state.best_loss, state.evals_since_best) == ((1.0, 4) if kept else (None, 0))
    assert state.validation == "same"
