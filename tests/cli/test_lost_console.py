"""The three commands, whose console can no longer be written: the work is done and saved."""

import errno
import importlib
import json
import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from medusa_train.checkpoint.store import CheckpointStore
from medusa_train.config.schema import TrainConfig
from tests.evaluation.tiny_model import write_bench, write_run, write_target_model
from tests.training.conftest import (  # noqa: F401 (fixtures)
    base_keys,
    chats,
    make_config,
    metrics,
    target_model_dir,
)
from tests.training.mishap import Mishap, command, forks, start, wait

pytestmark = forks


def full_disk() -> tuple[int, Callable[[], None]]:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def closed_pipe() -> tuple[int, Callable[[], None]]:
    read, write = os.pipe()
    return write, lambda: os.close(read)


def closed_terminal() -> tuple[int, Callable[[], None]]:
    """As after `disown`: no signal comes, and writing fails."""
    leader, follower = pty.openpty()
    return follower, lambda: os.close(leader)


CONSOLES = {
    full_disk: errno.ENOSPC,
    closed_pipe: errno.EPIPE,
    closed_terminal: errno.EIO,
}


#: One of them runs with the fast tests, the others with `-m slow`.
CASES = [
    pytest.param(console, id=console.__name__, marks=[] if number == 0 else pytest.mark.slow)
    for number, console in enumerate(CONSOLES)
]


def run_without_console(
    program: str,
    arguments: list[str],
    console: Callable[[], tuple[int, Callable[[], None]]],
    place: str,
    where: Path,
) -> None:
    """Run a command in this process, whose console is lost when `place` is called for the second
    time.
    """
    descriptor, lose = console()
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(where)
    Mishap(place, 2, lose).arrange()
    sys.argv = [f"medusa-{program}", *arguments]
    importlib.import_module(f"medusa_train.cli.{program}").app()


@pytest.mark.parametrize("console", CASES)
def test_training_goes_on_and_says_once_why_it_is_silent(
    make_config: Callable[..., TrainConfig],  # noqa: F811
    console: Callable[[], tuple[int, Callable[[], None]]],
    tmp_path: Path,
) -> None:
    cfg = make_config(calibration_tokens=40, save_steps=3)
    place = "medusa_train.training.trainer:Trainer.train_step"
    process = start(
        tmp_path / "log", run_without_console, "train", command(cfg), console, place, tmp_path
    )
    assert wait(process) == 0
    run = tmp_path / "run"
    assert (run / "heads" / "medusa_lm_head.safetensors").is_file()
    assert (run / "tree.json").is_file()
    assert CheckpointStore(run).steps() == [3, 6]
    records = metrics(run)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    told = [record for record in records if record["kind"] == "console"]
    assert [record["failed"] for record in told] == [[f"stderr: {os.strerror(CONSOLES[console])}"]]


@pytest.mark.parametrize("console", CASES)
def test_self_distillation_and_evaluation_go_on(
    console: Callable[[], tuple[int, Callable[[], None]]], tmp_path: Path
) -> None:
    write_run(tmp_path / "runs" / "first", write_target_model(tmp_path / "backbone"))
    write_bench(tmp_path / "small.jsonl")
    words = ["--seed", "small.jsonl", "--model", "backbone", "--output", "out.jsonl"]
    words += ["--limit", "2", "--max-new-tokens", "6", "dtype=float32", "drop_truncated=false"]
    place = "medusa_train.selfdistill.local:HFEngine.next"
    process = start(
        tmp_path / "log", run_without_console, "selfdistill", words, console, place, tmp_path
    )
    assert wait(process) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2

    words = ["--bench", "small.jsonl", "--max-new-tokens", "6", "--limit", "2"]
    words += ["dtype=float32", "warmup=0", "exactness=false"]
    place = "medusa_train.evaluation.timing:SpeedTest._measure"
    process = start(
        tmp_path / "log", run_without_console, "evaluate", words, console, place, tmp_path
    )
    assert wait(process) == 0
    report = tmp_path / "runs" / "first" / "eval" / "small" / "report.json"
    assert json.loads(report.read_text())["meta"]["questions"] == 2
