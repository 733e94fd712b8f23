"""The real command, killed, terminated or out of disk at awkward moments: nothing is lost, and
nothing changes.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from tests.training.conftest import LORA, figures, metrics
from tests.training.mishap import (
    Mishap,
    command,
    fill_the_disk,
    forks,
    medusa_train,
    terminate,
    terminate_twice,
)

pytestmark = forks

#: Dropout and the teacher on; log lines over several steps, evaluations between checkpoints.
KEYS = {
    **LORA,
    "max_steps": 12,
    "logging_steps": 2,
    "eval_steps": 3,
    "save_steps": 4,
    "save_total_limit": 2,
}
TRAINER = "medusa_train.training.trainer:"
RESUME = "resume_from_checkpoint=auto"


def weights(run: Path) -> dict[str, bytes]:
    """Every file of tensors that the run left behind: heads, adapter, and in the last checkpoint
    all the rest.
    """
    last = CheckpointStore(run).latest()
    assert last is not None
    found = {
        path.name: path.read_bytes()
        for path in (*run.glob("[ha]*/*.safetensors"), *last.glob("*.safetensors"))
    }
    assert {"medusa_lm_head.safetensors", "adapter_model.safetensors", "engine.safetensors"} <= set(
        found
    )
    return found


def assert_same(run: Path, whole: Path) -> None:
    """To the bit, and no line twice."""
    records = figures(run)
    places = [(record["kind"], record["step"]) for record in records]
    assert len(places) == len(set(places))
    assert records == figures(whole)
    assert weights(run) == weights(whole)
    assert not [path for path in run.rglob("*") if path.name.startswith((".tmp", ".old"))]


@pytest.fixture(scope="module")
def whole(base_keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was never stopped."""
    cfg = TrainConfig(
        **{**base_keys, **KEYS, "output_dir": str(tmp_path_factory.mktemp("whole") / "whole")}
    )
    code, text = medusa_train(command(cfg))
    assert code == 0, text
    return Path(cfg.output_dir)


@pytest.fixture
def cfg(make_config: Any) -> TrainConfig:
    return make_config(**KEYS)


def test_a_run_that_is_killed_again_and_again_equals_one_that_was_not(
    cfg: TrainConfig, whole: Path, tmp_path: Path
) -> None:
    """Counts start at zero in each process, which resumes from the last checkpoint."""
    run = tmp_path / "run"
    kills = [
        # before the first checkpoint: in the second micro-batch of step 2
        (Mishap("medusa_train.training.optimizer:LocalStrategy.forward_backward", 4), []),
        # step 3 was the best evaluation, its weights are saved; the checkpoint of step 4 is half
        # written
        (Mishap("medusa_train.checkpoint.store:write_tensors", 6), []),
        # between the files of step 4 and their new name
        (Mishap("medusa_train.checkpoint.store:CheckpointStore._publish", 2), []),
        # checkpoint 4 has its name, wherever training is by now; the plan of the resume looks twice
        (Mishap("medusa_train.checkpoint.store:CheckpointStore.steps", 3), [4]),
        # in the middle of the evaluation of step 6, its training line is written
        (Mishap("medusa_train.training.validation:linear_loss", 1), [4]),
        # the evaluation of step 6 is logged, its weights not begun
        (Mishap("medusa_train.checkpoint.store:split_tensors", 1), [4]),
        # half of checkpoint 8 is written
        (Mishap("medusa_train.checkpoint.store:write_tensors", 5), [4]),
        # half of checkpoint 12 is written: 8 is whole
        (Mishap("medusa_train.checkpoint.store:write_tensors", 12), [4, 8]),
        # checkpoint 12 has its name, those beyond the limit are still there; the plan of the resume
        # looks once, and so does what names later checkpoints
        (Mishap("medusa_train.checkpoint.store:CheckpointStore.steps", 3), [4, 8, 12]),
        # all steps done, the adapter written, the heads not
        (Mishap("medusa_train.training.train_stage:save_draft", 1), [4, 8, 12]),
    ]
    for mishap, left in kills:
        code, text = medusa_train(command(cfg, RESUME), mishap)
        assert code == -signal.SIGKILL, f"{mishap}: {text}"
        assert CheckpointStore(run).steps() == left, mishap
    code, text = medusa_train(command(cfg, RESUME))
    assert code == 0, text
    assert_same(run, whole)


def test_a_full_disk_leaves_the_checkpoints_before_it_usable(
    cfg: TrainConfig, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for mishap, step, kept, lost in (
        (
            Mishap(TRAINER + "CheckpointStore.save", 2, fill_the_disk),
            8,
            [4],
            f"to {run / 'checkpoints'}: ",
        ),
        (
            Mishap("medusa_train.training.train_stage:save_draft", 1, fill_the_disk),
            12,
            [8, 12],
            f"to {run / 'heads'}: ",
        ),
    ):
        code, text = medusa_train(command(cfg, RESUME), mishap)
        assert code == 1, text
        assert "Traceback" not in text
        message = text[text.index("error: ") :]
        assert f"could not write the checkpoint of step {step} " in message or step == 12
        assert lost in message
        assert "KiB needed" in message
        assert " free)" in message
        assert message.endswith(
            f"After fixing this, resume with:\n  medusa-train {run / 'config.yaml'} {RESUME}\n"
        )
        assert CheckpointStore(run).steps() == kept
    code, text = medusa_train([str(run / "config.yaml"), RESUME])
    assert code == 0, text
    assert_same(run, whole)


def test_sigterm_in_every_phase_tells_how_to_resume(
    cfg: TrainConfig, whole: Path, tmp_path: Path
) -> None:
    """Before training it only ends, with 143 and no trace; later with everything saved, although a
    second signal follows.
    """
    run = tmp_path / "run"
    for place, call, saved, words in (
        ("medusa_train.training.load_data:load_datasets", 1, [], "error: terminated\n"),
        ("medusa_train.training.validation:linear_loss", 1, [3], "stopped after step 3, saved"),
        # the evaluation of step 3 is made up for, and SIGTERM comes while it is saved
        (TRAINER + "CheckpointStore.save", 1, [3], "stopped after step 3, saved"),
        (TRAINER + "Trainer.loss_and_gradients", 1, [3, 4], "stopped after step 4, saved"),
        (TRAINER + "CheckpointStore.save", 2, [8, 12], "stopped after step 12, saved"),
        (
            "medusa_train.training.train_stage:save_draft",
            1,
            [8, 12],
            "stopped: the checkpoint is saved",
        ),
        (
            "medusa_train.training.train_stage:heads_table",
            1,
            [8, 12],
            f"{run / 'heads'} is saved, tree.json is not",
        ),
    ):
        code, text = medusa_train(command(cfg, RESUME), Mishap(place, call, terminate_twice))
        assert code == 128 + signal.SIGTERM, text
        assert "Traceback" not in text
        assert words in text, text
        assert (f"medusa-train {run / 'config.yaml'} {RESUME}" in text) == bool(saved)
        assert CheckpointStore(run).steps() == saved, place
    assert medusa_train(command(cfg, RESUME))[0] == 0
    assert_same(run, whole)


def test_an_evaluation_that_was_logged_and_not_saved_is_logged_once(
    cfg: TrainConfig, whole: Path, tmp_path: Path
) -> None:
    """Stopped in the evaluation of step 3, and killed after it was made up for and before that was
    saved.
    """
    evaluation = Mishap("medusa_train.training.validation:linear_loss", 1, terminate)
    stopped, _ = medusa_train(command(cfg, RESUME), evaluation)
    killed, _ = medusa_train(
        command(cfg, RESUME), Mishap("medusa_train.checkpoint.store:split_tensors")
    )
    assert (stopped, killed) == (128 + signal.SIGTERM, -signal.SIGKILL)
    evaluated = [record for record in metrics(tmp_path / "run") if record["kind"] == "eval"]
    assert [record["step"] for record in evaluated] == [3]
    assert medusa_train(command(cfg, RESUME))[0] == 0
    assert_same(tmp_path / "run", whole)
