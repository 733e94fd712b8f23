import io
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from medusa_train.checkpoint.run_directory import RUN_FILES, check_only_run_files, only_writer
from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.errors import CheckpointError, ConfigError, DataError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training import train_stage
from medusa_train.training.distributed import DistributedContext
from medusa_train.training.schedule import TrainingSchedule
from medusa_train.training.stages import train_stages
from medusa_train.training.trainer import NonFiniteLossError, Trainer
from medusa_train.training.validation import ValidationResult
from tests.training.conftest import LORA, metrics, train


def losses(run):
    return [
        (r["step"], r["loss"], r["head_top1"], r["lr"])
        for r in metrics(run)
        if r["kind"] == "train"
    ]


def held_out(run):
    return [(r["step"], r["loss"], r["head_top"]) for r in metrics(run) if r["kind"] == "eval"]


def test_a_run_leaves_heads_config_metrics_and_a_tree(
    make_config, console, tmp_path, target_model_dir
):
    assert train(make_config(calibration_tokens=120, max_steps=30), console) == 0
    out = tmp_path / "run"
    tensors = load_file(out / "heads" / "medusa_lm_head.safetensors")
    assert set(tensors) == {
        f"{i}.{n}" for i in range(3) for n in ("0.linear.weight", "0.linear.bias", "1.weight")
    }
    assert tensors["2.1.weight"].shape == (300, 32)
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["base_model"] == str(target_model_dir)
    assert saved["medusa_num_heads"] == 3
    first, last = losses(out)[0], losses(out)[-1]
    assert last[1] < 0.8 * first[1]
    assert [step for step, *_ in losses(out)] == list(range(1, 31))
    step, loss, top = held_out(out)[-1]
    assert step == 30
    assert math.isfinite(loss)
    assert len(top) == 3
    assert all(len(shares) == 10 and shares == sorted(shares) for shares in top)
    assert "medusa_choices" in json.loads((out / "tree.json").read_text())
    assert {path.name for path in out.iterdir()} <= set(RUN_FILES)
    check_only_run_files(out, inner=True)
    with np.load(out / "tree_traces.npz") as arrays:
        assert len(arrays["ranks"]) == arrays["tokens"].sum() > 0
    text = console.file.getvalue()
    assert f"medusa-eval --bench mtbench --limit 16 --model {out}" in text
    assert "greedy continuations" in text


def test_the_accuracy_table_shows_the_first_guess_and_the_first_five():
    shares = [guesses / 10 for guesses in range(1, 11)]  # of the first 1, 2, ..., 10 guesses
    held_out = ValidationResult(1.0, 1.0, [1.0], [shares], [8], [8])
    table = train_stage.heads_table(held_out, None)
    assert table is not None
    assert [list(column.cells) for column in table.columns] == [["1"], ["0.100"], ["0.500"]]


def test_after_twenty_steps_a_run_says_how_long_the_rest_takes(make_config, console):
    assert train(make_config(max_steps=22), console) == 0
    lines = console.file.getvalue().splitlines()
    (place,) = [number for number, line in enumerate(lines) if "left of this run" in line]
    assert re.fullmatch(
        r"about \d+ s left of this run, \d+ s of them for steps; then come validation and the tree",
        lines[place],
    )
    assert lines[place - 1].startswith("step 20 |") or lines[place + 1].startswith("step 21 |")


def test_the_time_left_is_that_of_steps_validation_answers_and_timing() -> None:
    """80 steps of 2 s, a validation as long as 10, 1000 answered tokens at 10 a second, and a tenth
    of these 280 s for timing.
    """
    trainer = SimpleNamespace(
        schedule=TrainingSchedule(total_steps=100, steps_per_epoch=100.0, eval_every=100.0),
        state=SimpleNamespace(step=20, tokens=4000, seconds=40.0),
        strategy=SimpleNamespace(partitioned=False),
        distributed=SimpleNamespace(is_main=True),
    )
    data = SimpleNamespace(
        train=SimpleNamespace(tokens=20_000), validation=SimpleNamespace(tokens=2_000)
    )
    shown = Console(file=io.StringIO(), width=200)
    trainer.progress = RunProgress(shown)
    trainer.cfg = SimpleNamespace(calibration_tokens=1000)
    train_stage._print_time_left(trainer, data, 2.0)
    assert "about 5 min 08 s left of this run, 2 min 40 s of them" in shown.file.getvalue()


def test_the_command_that_resumes_allows_what_the_run_was_allowed(
    make_config, tmp_path, monkeypatch
):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "run"
    trainer = SimpleNamespace(
        cfg=make_config(),
        output_dir=run / "stage_one",
        parent_run_dir=run,
        distributed=SimpleNamespace(size=1),
    )
    command = f"medusa-train {run}/config.yaml resume_from_checkpoint=auto"
    assert train_stage.resume_command(trainer) == command
    trainer.cfg = make_config(trust_remote_code=True)
    trainer.distributed.size = 2
    assert train_stage.resume_command(trainer) == f"{command} trust_remote_code=true --num-gpus 2"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of two machines
    assert train_stage.resume_command(trainer) == f"{command} trust_remote_code=true"


def test_two_processes_do_not_train_in_one_directory(make_config, console, tmp_path):
    with (
        only_writer(tmp_path / "run"),
        pytest.raises(CheckpointError, match="another process is working in"),
    ):
        train_stages(make_config(max_steps=1), console, console)
    assert not (tmp_path / "run").exists()  # nothing was left


def test_without_memory_for_the_tree_the_heads_are_kept(
    make_config, console, tmp_path, monkeypatch
):
    def prefill(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("medusa_train.inference.step.Steps.prefill", prefill)
    assert train(make_config(calibration_tokens=120, max_steps=1), console) == 0
    out = tmp_path / "run"
    assert (out / "heads" / "medusa_lm_head.safetensors").exists()
    assert not (out / "tree.json").exists()
    text = console.file.getvalue()
    assert "no tree was chosen: not enough memory" in text
    assert f"medusa-eval --calibrate --model {out}" in text


def test_without_memory_for_training_the_error_names_keys_that_take_less(
    make_config, console, monkeypatch
):
    def forward_backward(*args):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
        )

    monkeypatch.setattr(
        "medusa_train.training.optimizer.LocalStrategy.forward_backward", forward_backward
    )
    with pytest.raises(
        MedusaError, match=r"not enough memory for this run \(CUDA out of memory\)"
    ) as caught:
        train(make_config(micro_batch_size=4, load_in_4bit=False), console)
    for key in (
        "micro_batch_size: 2 ",
        "optimizer: paged_adamw_8bit",
        "load_in_4bit: true",
        "--inspect",
    ):
        assert key in str(caught.value)
    assert "gradient_checkpointing" not in str(caught.value)


def test_the_other_processes_wait_until_the_tree_is_chosen(make_config, console, tmp_path):
    """NCCL's connections are closed together."""
    chosen = []

    class Observed(DistributedContext):
        def gather(self, value):
            chosen.append((tmp_path / "run" / "tree.json").exists())
            return super().gather(value)

    assert (
        train_stages(make_config(calibration_tokens=120, max_steps=1), console, console, Observed())
        == 0
    )
    assert chosen[-1]


def test_resumed_from_an_older_checkpoint_drops_what_came_after(make_config, console, tmp_path):
    cfg = make_config(save_steps=2, save_total_limit=9)
    train(cfg, console)
    before = losses(tmp_path / "run")
    train(
        cfg.model_copy(
            update={"resume_from_checkpoint": str(tmp_path / "run" / "checkpoints" / "step-2")}
        ),
        console,
    )
    assert losses(tmp_path / "run") == before
    assert CheckpointStore(tmp_path / "run").steps() == [2, 4, 6]
    assert console.file.getvalue().count("deleting the checkpoints") == 1
    assert "note: deleting the checkpoints of later steps: step-4, step-6\n" in (
        console.file.getvalue()
    )


def test_a_checkpoint_with_more_steps_than_the_run_is_named(make_config, console):
    train(make_config(max_steps=2), console)
    again = {"resume_from_checkpoint": "auto"}
    train(make_config(max_steps=2, **again), console)
    assert "more steps than" not in console.file.getvalue()
    train(make_config(max_steps=1, **again), console)
    assert (
        "note: the checkpoint has more steps than the 1 of this run: nothing is trained, and the"
        " heads are those of step 2" in console.file.getvalue()
    )


def test_accumulation_is_the_same_as_a_larger_batch(make_config, console, tmp_path):
    """Valid targets are counted over all micro-batches before dividing; equal up to float32's order
    of summation.
    """
    for name, rows in {"wide": 8, "parts": 2}.items():
        # all forty chats in every step, so that both runs see the same ones
        keys = {
            "micro_batch_size": rows,
            "gradient_accumulation_steps": 40 // rows,
            "val_set_size": 0,
            "max_steps": 3,
        }
        train(make_config(output_dir=str(tmp_path / name), **keys), console)
    wide, parts = losses(tmp_path / "wide"), losses(tmp_path / "parts")
    assert [loss for _, loss, *_ in parts] == pytest.approx(
        [loss for _, loss, *_ in wide], rel=1e-5
    )


def test_a_loss_that_is_not_finite_names_step_records_and_checkpoint(
    make_config, console, tmp_path, monkeypatch
):
    real = Trainer.loss_and_gradients

    def loss_and_gradients(self, *args, **kwargs):
        if self.state.step == 3:
            self.draft.lm_heads[0].weight.data[5] = float("nan")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "loss_and_gradients", loss_and_gradients)
    with pytest.raises(NonFiniteLossError) as caught:
        train(make_config(save_steps=2), console)
    message = str(caught.value)
    assert "step 4" in message
    assert "chats.jsonl:" in message
    assert str(tmp_path / "run" / "checkpoints" / "step-2") in message
    assert CheckpointStore(tmp_path / "run").steps() == [2]


def test_early_stopping_publishes_the_best_heads_and_again_when_it_is_finished_again(
    make_config, console, tmp_path
):
    run = tmp_path / "run"
    cfg = make_config(
        learning_rate=0.5, eval_steps=1, early_stopping_patience=2, max_steps=40, save_total_limit=1
    )
    assert train(cfg, console) == 0
    best, last = best_step(run), losses(run)[-1][0]
    assert best == last - 2 < 38
    assert CheckpointStore(run).steps() == [last]
    text = " ".join(console.file.getvalue().split())
    for words in ("stopped early", f"using the weights of step {best}", f"as of step {best}"):
        assert words in text
    (objective,) = (
        record["objective"]
        for record in metrics(run)
        if (record["kind"], record["step"]) == ("eval", best)
    )
    assert f"held-out loss {objective:.4f}, as of step {best}" in text
    assert_heads_are_of(run, best)
    shutil.rmtree(run / "heads")
    train(cfg.model_copy(update={"resume_from_checkpoint": "latest"}), console)
    assert_heads_are_of(run, best)


def test_a_normal_end_publishes_the_last_heads_and_keeps_the_weights_of_the_best(
    make_config, console, tmp_path
):
    keys = {"learning_rate": 0.5, "warmup_steps": 1, "eval_steps": 1, "save_total_limit": 1}
    train(make_config(**keys), console)
    best = best_step(tmp_path / "run")
    assert best < 6
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"best-{best}", "step-6"]
    assert not (checkpoints / f"best-{best}" / "engine.safetensors").exists()
    assert_heads_are_of(tmp_path / "run", 6)


def test_the_weights_of_the_best_evaluation_cannot_be_resumed_from(make_config, console, tmp_path):
    train(make_config(eval_steps=2), console)
    best = next((tmp_path / "run" / "checkpoints").glob("best-*"))
    with pytest.raises(
        CheckpointError, match=r"holds weights only.*resume from a checkpoint step-N \(.* step-6\)"
    ):
        train(make_config(resume_from_checkpoint=str(best)), console)


def best_step(run):
    return min((r["objective"], r["step"]) for r in metrics(run) if r["kind"] == "eval")[1]


def assert_heads_are_of(run, step):
    store = CheckpointStore(run)
    masters = store.load(store.best(step) or store.at(step))["draft"]
    saved = load_file(run / "heads" / "medusa_lm_head.safetensors")
    for i in range(3):
        assert torch.equal(saved[f"{i}.1.weight"], masters[f"lm_heads.{i}.weight"])


@pytest.mark.parametrize("name", ["heads", "adapter", "model"])
def test_results_without_a_checkpoint_are_not_deleted_by_a_resume(
    make_config, console, tmp_path, name
):
    result = tmp_path / "run" / name / "weights"
    result.parent.mkdir(parents=True)
    result.write_text("mine")
    for left in (None, "step-7", ".tmp-step-7"):  # no checkpoint, and two that were never finished
        if left:
            (tmp_path / "run" / "checkpoints" / left).mkdir(parents=True)
        with pytest.raises(
            CheckpointError, match=f"no checkpoint to resume from: .* holds {name}/"
        ) as caught:
            train(make_config(resume_from_checkpoint="auto"), console)
        assert "overwrite_output_dir=true" in str(caught.value)
        assert result.read_text() == "mine"


def test_an_earlier_run_is_refused_overwritten_or_resumed(make_config, console, tmp_path):
    cfg = make_config(max_steps=2)
    train(cfg, console)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already holds a run") as caught:
        train(cfg, console)
    for choice in ("output_dir=", "resume_from_checkpoint=auto", "overwrite_output_dir=true"):
        assert choice in str(caught.value)
    assert (
        train(cfg.model_copy(update={"overwrite_output_dir": True, "max_steps": 1}), console) == 0
    )
    assert [step for step, *_ in losses(tmp_path / "run")] == [1]
    assert CheckpointStore(tmp_path / "run").steps() == [1]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_failing_start_leaves_the_earlier_run_alone(make_config, console, tmp_path):
    train(make_config(max_steps=1), console)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    broken = make_config(datasets=[{"path": str(empty)}], overwrite_output_dir=True)
    with pytest.raises(DataError):
        train(broken, console)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_other_heads_cannot_resume(make_config, console):
    train(make_config(max_steps=1), console)
    saved = Path(make_config().output_dir) / "checkpoints" / "step-1"
    for keys, changed in (
        ({"medusa_num_heads": 2}, "  medusa_num_heads: was 3, now 2\n"),
        ({"draft": "hydra", "learning_rate": 1e-3}, '  draft: was "medusa", now "hydra"\n'),
    ):
        with pytest.raises(CheckpointError) as caught:
            train(make_config(**keys, resume_from_checkpoint="auto"), console)
        assert (
            str(caught.value)
            == f"{saved}: does not fit this run, whose settings differ:\n{changed}To resume, set"
            " them back; to train with the new ones, set output_dir to a new directory and"
            " remove resume_from_checkpoint."
        )
    (saved.parent.parent / "config.yaml").unlink()  # nothing to compare with
    with pytest.raises(CheckpointError, match="keep the base_model, draft, heads"):
        train(make_config(medusa_num_heads=2, resume_from_checkpoint="auto"), console)


def test_medusa_logging_adds_top_k_to_the_log(make_config, console, tmp_path):
    train(make_config(medusa_logging=True, max_steps=1), console)
    record = next(r for r in metrics(tmp_path / "run") if r["kind"] == "train")
    assert [len(shares) for shares in record["head_top"]] == [10, 10, 10]


def test_a_finished_run_is_finished_again_without_training(make_config, console, tmp_path):
    """As after Ctrl-C while the tree was being made."""
    train(make_config(), console)
    (tmp_path / "run" / "config.yaml").unlink()
    before = losses(tmp_path / "run")
    assert train(make_config(resume_from_checkpoint="auto", calibration_tokens=80), console) == 0
    assert losses(tmp_path / "run") == before
    assert "held-out text" in console.file.getvalue()
    tree = tmp_path / "run" / "tree.json"
    tree.write_text(text := tree.read_text() + "\n")  # as if chosen again
    for _ in range(2):
        assert (
            train(make_config(resume_from_checkpoint="auto", calibration_tokens=80), console) == 0
        )
        assert tree.read_text() == text
    assert "tree.json is kept" in " ".join(console.file.getvalue().split())
    heads = tmp_path / "run" / "heads" / "medusa_lm_head.safetensors"
    # of other heads, of earlier ones
    for change in (lambda: heads.write_bytes(b""), lambda: os.utime(tree, (0, 0))):
        tree.write_text(text)
        change()
        assert (
            train(make_config(resume_from_checkpoint="auto", calibration_tokens=80), console) == 0
        )
        assert tree.read_text() != text


def test_every_part_of_a_run_may_lie_on_another_disk(make_config, console, tmp_path):
    parts = ("checkpoints", "heads", "adapter", "eval", "export")
    for part in parts:
        (tmp_path / "disk" / part).mkdir(parents=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / part).symlink_to(tmp_path / "disk" / part)
    assert train(make_config(**LORA, save_steps=3), console) == 0
    step = str(tmp_path / "run" / "checkpoints" / "step-3")
    assert train(make_config(**LORA, save_steps=3, resume_from_checkpoint=step), console) == 0
    assert train(make_config(**LORA, resume_from_checkpoint="auto"), console) == 0
    assert CheckpointStore(tmp_path / "run").steps() == [3, 6]
    assert all((tmp_path / "run" / part).is_symlink() for part in parts)
    assert (tmp_path / "disk" / "heads" / "medusa_lm_head.safetensors").is_file()
    assert (tmp_path / "disk" / "adapter" / "adapter_model.safetensors").is_file()
