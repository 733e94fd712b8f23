"""`medusa-train` in several processes: what the launcher does with them, and real runs."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
import yaml
from rich.console import Console
from typer.testing import CliRunner

from medusa_train.cli import launch as launching
from medusa_train.cli.train import app
from medusa_train.cli.worker import train_distributed
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import MedusaError
from medusa_train.training.process_info import ProcessInfo, free_port
from tests.training.conftest import (  # noqa: F401 (fixtures)
    LORA,
    chats,
    figures,
    metrics,
    target_model_dir,
)
from tests.training.mishap import Mishap, forks, run_command, wait
from tests.training.mishap import start as fork

pytestmark = pytest.mark.timeout(1800)  # half a minute each on idle cores


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEYS = ["base_model=data/tiny", "datasets=[{path: data/seeds/tiny.jsonl}]"]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Run `medusa-train --num-gpus 2`, whose processes are those of tests/cli/worker.py."""
    monkeypatch.chdir(PROJECT_ROOT)
    monkeypatch.setattr(launching, "MODULE", "tests.cli.worker")
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))

    def run(*words, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        output_dir = f"output_dir={tmp_path / 'run'}"
        return CliRunner().invoke(app, [*KEYS, output_dir, "--num-gpus", "2", *words])

    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield run
    for number, handler in before.items():  # a command ignores them until its process ends
        signal.signal(number, handler)


def notes(tmp_path, kind):
    """Return what the processes noted of a kind, ordered by rank."""
    return [path.read_text() for path in sorted((tmp_path / "notes").glob(f"{kind}-*"))]


def test_arguments_reach_the_processes_as_they_were_given(launch, tmp_path):
    odd = 'chat_template_kwargs={"x":"$HOME $$ %n `id` \'é\' 😀 ${local_rank}"}'
    words = [odd, "--overwrite"]
    result = launch(*words, ENDING_0="0", ENDING_1="0", local_rank="7")
    assert result.exit_code == 0, result.output
    first, second = (json.loads(text) for text in notes(tmp_path, "words"))
    assert first == second == [*KEYS, f"output_dir={tmp_path / 'run'}", odd, "--overwrite"]


@pytest.mark.parametrize("name", ["runs/😀", "runs/a\x7f'\"x", "runs/a: {b", "null"])
def test_options_reach_the_processes_as_they_were_given(name, tmp_path, monkeypatch):
    words = []
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda config, program: lambda *given: words.extend(given),
    )
    monkeypatch.chdir(tmp_path)
    keys = [f"base_model={PROJECT_ROOT / 'data/tiny'}"]
    keys += [f"datasets=[{{path: {PROJECT_ROOT / 'data/seeds/tiny.jsonl'}}}]"]
    given = [*keys, "--output-dir", name, "--overwrite", "--num-gpus", "2"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert words == ["-m", launching.MODULE, *keys, f"--output-dir={name}", "--overwrite"]


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 2), (3, 1), (143, 143)])
def test_the_exit_code_is_that_of_the_processes(code, expected, launch, tmp_path):
    result = launch(ENDING_0=str(code), ENDING_1=str(code))
    assert result.exit_code == expected
    assert "error" not in result.output  # they print their own


def test_processes_start_once_and_have_time_to_save(launch, monkeypatch):
    started = []
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda config, program: lambda *words: started.append(config),
    )
    assert launch().exit_code == 0
    (config,) = started
    assert (config.nproc_per_node, config.max_restarts) == (2, 0)
    assert getattr(config, "shutdown_timeout", 600) == 600  # older versions of torch have none


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_process_is_named_with_the_command_that_resumes(victim, saved, launch, tmp_path):
    words = []
    if saved:
        (tmp_path / "run" / "checkpoints" / "step-3").mkdir(parents=True)
        words += ["--resume", "trust_remote_code=true"]
    result = launch(*words, **{f"ENDING_{victim}": "SIGKILL", f"ENDING_{1 - victim}": "1"})
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert f"the process of rank {victim} was ended by SIGKILL (signal 9)" in said
    assert "memory was full" in said
    # the configuration of a run cannot allow code of the model's repository
    allowed = "resume_from_checkpoint=auto trust_remote_code=true"
    resumes = f"{tmp_path}/run/config.yaml {allowed} --num-gpus 2"
    assert (resumes in said) is saved
    assert ("No checkpoint was saved" in said) is not saved


def test_a_killed_process_ends_the_others(launch, tmp_path):
    result = launch(ENDING_1="SIGSEGV")
    said = " ".join(result.output.split())
    assert "the process of rank 1 was ended by SIGSEGV (signal 11)." in said
    assert notes(tmp_path, "saved") == ["SIGTERM"]


@pytest.mark.parametrize(
    ("signals", "code"),
    [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 143), ("SIGTERM SIGTERM", 143)],
)
def test_signals_reach_all_processes_which_save(signals, code, launch, tmp_path):
    result = launch(PARENT_GETS=signals)
    assert result.exit_code == code
    assert notes(tmp_path, "saved") == [signals.split()[0]] * 2
    assert "Traceback" not in result.output


def test_a_closed_terminal_is_ignored_under_nohup(launch, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch(PARENT_GETS="SIGHUP SIGTERM").exit_code == 143
    finally:
        signal.signal(signal.SIGHUP, before)
    assert notes(tmp_path, "saved") == ["SIGTERM", "SIGTERM"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_process_saves_once_its_launcher_is_killed(tmp_path):
    program = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'tests.cli.worker'])"
    variables = {"NOTES": str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}
    variables |= {"TORCHELASTIC_RUN_ID": "1", "PYTHONPATH": str(PROJECT_ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", program], env=os.environ | variables)
    wait_for(tmp_path / "words-0")
    launcher.kill()
    launcher.wait()
    wait_for(tmp_path / "saved-0")
    assert (tmp_path / "saved-0").read_text() == "SIGTERM"


def wait_for(path: Path) -> None:
    """Return once the file is there."""
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} is not there after a minute")


def test_more_processes_than_gpus_are_refused(launch, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = launch()
    assert result.exit_code == 2
    assert "--num-gpus: 2, but 1 GPUs are visible" in result.output


NO_SHARED_MEMORY = """NCCL error in: ProcessGroupNCCL.cpp:3763, unhandled system error, NCCL version 2.28.8
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-4kQ2vb (size 9637888), error: No space left on device (28)"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (dist.DistBackendError(NO_SHARED_MEMORY), (NO_SHARED_MEMORY, NO_SHARED_MEMORY)),
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"
            ),
            ("another", ""),
        ),
        (
            dist.DistBackendError(
                "NCCL error: recv from 10.0.0.2 failed : Connection reset by peer"
            ),
            ("another", ""),
        ),
    ],
)
def test_errors_of_the_back_ends(error, reported, rank, monkeypatch, capsys, tmp_path):
    """Every process prints them, except where they only say that another process is gone."""
    monkeypatch.setattr(
        "medusa_train.training.distributed.init_distributed", Mock(side_effect=error)
    )
    cfg = TrainConfig(
        base_model="none", datasets=[{"path": "none", "type": "sharegpt"}], output_dir=str(tmp_path)
    )
    quiet = Console(quiet=True)
    assert train_distributed(ProcessInfo(rank, 2, rank, "127.0.0.1", 1), cfg, quiet, quiet) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert " ".join(reported[rank].split()) in printed
    assert ("process" in printed) is bool(reported[rank])


@pytest.mark.parametrize("words", [(), ("--inspect",)], ids=["train", "inspect"])
def test_no_processes_are_refused(words, tmp_path):
    keys = [
        "base_model=data/tiny",
        "datasets=[{path: data/seeds/tiny.jsonl}]",
        f"output_dir={tmp_path}",
    ]
    result = CliRunner().invoke(app, [*keys, "--num-gpus", "0", *words])
    assert result.exit_code == 2
    assert "Invalid value for '--num-gpus'" in result.output


@pytest.fixture
def config_file(target_model_dir, chats, tmp_path):  # noqa: F811
    keys = {
        "base_model": str(target_model_dir),
        "datasets": [{"path": str(chats), "type": "sharegpt"}],
        "output_dir": str(tmp_path / "run"),
        "recipe": "medusa1",
        "medusa_num_heads": 2,
        "micro_batch_size": 4,
        "max_steps": 3,
        "logging_steps": 1,
        "bf16": False,
        "val_set_size": 0.2,
        "calibration_tokens": 40,
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def start(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "medusa_train.cli.train", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=PROJECT_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lose_a_file() -> None:
    raise MedusaError("absent.jsonl: no such file")


def wait_for_steps(run: Path, count: int = 3) -> None:
    """Return once so many steps are logged."""
    record = run / "metrics.jsonl"
    for _ in range(3000):
        if record.exists() and record.read_text().count('"train"') >= count:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{run}: fewer than {count} steps in five minutes")


@pytest.mark.slow
@forks
def test_one_process_that_fails_ends_all_and_says_which(config_file, tmp_path):
    port = str(free_port())
    mishaps = [None, Mishap("medusa_train.training.setup:_load_model", 1, lose_a_file)]
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    places = [
        {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2", "MASTER_PORT": port} for r in ("0", "1")
    ]
    started = [
        fork(log, run_command, [str(config_file)], mishap, **place)
        for log, mishap, place in zip(logs, mishaps, places, strict=True)
    ]
    assert [wait(process) for process in started] == [1, 1]
    said, other = (log.read_text() for log in logs)
    assert "error: process 1 of 2:" in other
    assert "absent.jsonl" in other
    assert "Traceback" not in said + other
    assert "error" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_several_exits_without_python_s_cleanup(rank, config_file, monkeypatch):
    """Which gloo's threads abort where they still hold tensors."""
    info, exits = ProcessInfo(rank, 2, rank, "127.0.0.1", 1), Mock(side_effect=SystemExit)
    monkeypatch.setattr("medusa_train.cli.worker.os._exit", exits)
    monkeypatch.setattr("medusa_train.cli.train.process_info_from_env", lambda: info)
    monkeypatch.setattr("medusa_train.cli.worker.train_distributed", Mock(return_value=0))
    CliRunner().invoke(app, [str(config_file)])
    exits.assert_called_once_with(0)


@pytest.mark.slow
@forks
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("zephyr", "has other values than process 0 of: chat_template"),
        ("", "cannot read its configuration"),
    ],
)
def test_machines_with_other_values_are_refused(name, problem, config_file, tmp_path):
    """An environment variable that the configuration names differs on the second."""
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    shared = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    started = [
        fork(log, run_command, [str(config_file), "chat_template=$NAME"], **place, **shared)
        for log, place in zip(
            logs, ({"RANK": "0", "NAME": "chatml"}, {"RANK": "1", "NAME": name}), strict=True
        )
    ]
    assert [wait(process) for process in started] == [2, 2]
    said = logs[0].read_text()
    assert said.count("process 1 on ") == 1
    assert problem in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_by_one_command(config_file, tmp_path):
    shared = set(Path("/dev/shm").glob("deepspeed_*"))
    run = start(config_file, "--num-gpus", 2, "--output-dir", tmp_path / "other")
    out, said = run.communicate(timeout=900)
    assert run.returncode == 0, said
    assert said.count("2 Medusa heads x 1 layer on") == 1
    assert said.count("step 3 |") == 1
    assert out.count("head accuracy") == 1
    assert len([r for r in metrics(tmp_path / "other") if r["kind"] == "train"]) == 3
    assert (tmp_path / "other" / "heads" / "medusa_lm_head.safetensors").exists()
    assert (tmp_path / "other" / "tree.json").exists()
    assert set(Path("/dev/shm").glob("deepspeed_*")) == shared


@pytest.mark.slow
def test_two_processes_train_on_where_nothing_can_be_printed(config_file, tmp_path):
    command = [sys.executable, "-m", "medusa_train.cli.train", str(config_file), "--num-gpus", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            command, cwd=PROJECT_ROOT, env=environment, stdout=full, stderr=full, timeout=900
        )
    assert run.returncode == 0
    assert (tmp_path / "run" / "heads" / "medusa_lm_head.safetensors").exists()
    records = metrics(tmp_path / "run")
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3]
    assert [record["failed"] for record in records if record["kind"] == "console"] == [
        ["stderr: No space left on device"]
    ]


@pytest.mark.slow
def test_sigterm_to_the_command_saves_in_all_processes(config_file, tmp_path):
    run = start(
        config_file, "--num-gpus", 2, "max_steps=100000", "num_epochs=1", "save_steps=100000"
    )
    wait_for_steps(tmp_path / "run")
    run.send_signal(signal.SIGTERM)
    time.sleep(0.2)  # as by a supervisor that signals the process and its group
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=900)
    assert run.returncode == 143, said
    assert "saved. To resume:" in said
    assert "--num-gpus 2" in said
    assert (max(Path(tmp_path / "run" / "checkpoints").glob("step-*")) / "manifest.json").exists()


def worker(run: subprocess.Popen[str], rank: int) -> int:
    """Return the process id of a rank."""
    import psutil

    for process in psutil.Process(run.pid).children():
        if process.environ().get("RANK") == str(rank):
            return process.pid
    raise ProcessLookupError(f"rank {rank}")


def run_pair(directory: Path, arguments: list[str]) -> str:
    """Run the command in two processes, as a launcher does, without the seconds that importing torch
    takes; return what rank 0 printed.
    """
    shared = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    logs = [directory / "log-0", directory / "log-1"]
    started = [
        fork(log, run_command, arguments, RANK=rank, LOCAL_RANK=rank, **shared)
        for log, rank in zip(logs, ("0", "1"), strict=True)
    ]
    assert [wait(process) for process in started] == [0, 0], logs[0].read_text()
    return logs[0].read_text()


@pytest.mark.slow
@forks
def test_each_of_two_processes_is_killed_and_the_run_ends_as_if_none_was(config_file, tmp_path):
    """Rank 0 and rank 1 by SIGKILL, as the out-of-memory killer does, then rank 1 by SIGTERM."""
    keys = yaml.safe_load(config_file.read_text()) | LORA
    config_file.write_text(yaml.safe_dump(keys))
    often = ["max_steps=36", "save_steps=4", "eval_steps=15", "save_total_limit=2"]
    whole = tmp_path / "whole"
    run_pair(tmp_path, [str(config_file), *often, f"output_dir={whole}"])

    out = tmp_path / "killed"
    resume = ["medusa-train", str(out / "config.yaml"), "resume_from_checkpoint=auto"]
    resume += ["--num-gpus", "2"]
    arguments = [config_file, *often, "--output-dir", out, "--num-gpus", 2]
    for rank, number, steps, code, words in (
        (0, signal.SIGKILL, 6, 1, "the process of rank 0 was ended by SIGKILL (signal 9)"),
        (1, signal.SIGKILL, 14, 1, "the process of rank 1 was ended by SIGKILL (signal 9)"),
        (1, signal.SIGTERM, 22, 143, "saved. To resume:"),
    ):
        run = start(*arguments)
        wait_for_steps(out, steps)
        os.kill(worker(run, rank), number)
        _, said = run.communicate(timeout=900)
        assert run.returncode == code, said
        assert "Traceback" not in said
        said = " ".join(said.split())
        assert words in said
        assert ("the machine's memory was full" in said) == (number == signal.SIGKILL)
        assert shlex.join(resume) in said
        arguments = resume[1:]
    run_pair(tmp_path, resume[1:3])
    assert figures(out) == figures(whole)
    files = {path.relative_to(whole) for path in whole.rglob("*.safetensors")}
    assert {"medusa_lm_head.safetensors", "adapter_model.safetensors"} <= {
        path.name for path in files
    }
    assert files == {path.relative_to(out) for path in out.rglob("*.safetensors")}
    for path in files:
        assert (out / path).read_bytes() == (whole / path).read_bytes(), path
