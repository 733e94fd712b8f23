"""Which training process was killed, and what a worker does without its launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from medusa_train.cli import launch as launching
from medusa_train.cli.workers import LAUNCHER, describe_ending

# in place of DeepSpeed's launcher: two workers, of which one is killed; the other then fails
LAUNCHER_STAND_IN = """
import os, subprocess, sys, time
victim = int(sys.argv[1])
sleep = [sys.executable, "-c", "import time; time.sleep(60)", "medusa_train.cli.train"]
workers = [subprocess.Popen(sleep, env={**os.environ, "RANK": str(rank)}) for rank in range(2)]
time.sleep(3)
workers[victim].kill()
if sys.argv[2] == "at once":
    workers[victim].wait()
time.sleep(0.5)
workers[1 - victim].terminate()
for worker in workers:
    worker.wait()
sys.exit(247)
"""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_process_is_named_with_the_command_that_resumes(
    victim, saved, monkeypatch, capsys, tmp_path
):
    command = [sys.executable, "-c", LAUNCHER_STAND_IN, str(victim), "later"]
    monkeypatch.setattr(launching, "launcher_command", lambda *_: command)
    if saved:
        (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    assert launching.launch([], 2, None, None, tmp_path) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"the process of rank {victim} was ended by SIGKILL (signal 9)" in said
    assert "memory was full" in said
    resumes = f"{tmp_path}/config.yaml resume_from_checkpoint=auto --num-gpus 2"
    assert (resumes in said) is saved
    assert ("No checkpoint was saved" in said) is not saved


def test_a_killed_process_is_named_though_it_was_collected_before_a_look(
    monkeypatch, capsys, tmp_path
):
    command = [sys.executable, "-c", LAUNCHER_STAND_IN, "1", "at once"]
    monkeypatch.setattr(launching, "launcher_command", lambda *_: command)
    assert launching.launch([], 2, None, None, tmp_path) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the process of rank 1 was ended by SIGKILL (signal 9)" in said


def test_an_ending_without_a_known_cause_is_described():
    assert describe_ending(None, 11) == "a training process was ended by SIGSEGV (signal 11)"
    assert describe_ending(1, 100) == "the process of rank 1 was ended by signal 100"


WORKER = """
import signal, sys, time
from medusa_train.cli.workers import stop_without_launcher
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
stop_without_launcher()
print("ready", flush=True)
time.sleep(30)
"""


def test_a_worker_stops_once_its_launcher_is_killed():
    launcher = subprocess.Popen(["sleep", "60"])
    environment = {**os.environ, LAUNCHER: str(launcher.pid)}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        time.sleep(1.5)
        assert worker.poll() is None  # not while the launcher is there
        launcher.send_signal(signal.SIGKILL)
        assert worker.wait(timeout=10) == 42
    finally:
        worker.kill()
        launcher.kill()
        launcher.wait()
