"""`medusa-train` in several processes: the launcher's command line, and real runs through it."""

import os
import shlex
import shutil
import signal
import socket
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

from medusa_train.cli.launch import (
    check_machines,
    decode_arguments,
    launch,
    launcher_command,
    read_hostfile,
    train_distributed,
)
from medusa_train.cli.train import app
from medusa_train.cli.workers import training_processes
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.process_info import LAUNCH_OPTIONS, ProcessInfo
from tests.training.conftest import (  # noqa: F401 (fixtures)
    LORA,
    backbone_dir,
    chats,
    figures,
    metrics,
)
from tests.training.mishap import Mishap, forks, run_command, wait
from tests.training.mishap import start as fork

pytestmark = pytest.mark.timeout(1800)  # half a minute each on idle cores
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="DeepSpeed on CPUs needs a C++ compiler"
)


def test_the_command_line_of_the_launcher(tmp_path):
    command = launcher_command(["a.yaml", "seed=1"], 4, None)
    assert command[1:3] == ["-m", "deepspeed.launcher.runner"]
    assert "--num_gpus=4" in command
    assert command[-4:] == ["--module", "medusa_train.cli.train", "a.yaml", "seed=1"]
    # each run has a port of its own
    assert launcher_command([], 2, None) != launcher_command([], 2, None)
    hosts = tmp_path / "hosts"
    with pytest.raises(ConfigError, match="no such file"):
        launcher_command([], None, hosts)
    hosts.write_text("one slots=8\ntwo slots=8\n")
    command = launcher_command([], None, hosts)
    assert f"--hostfile={hosts}" in command
    assert not any(part.startswith("--num_gpus") for part in command)
    # the launcher takes the first GPUs of the machine where it is given their number
    command = launcher_command([], 2, None, visible="4,5, 6,7")
    assert "--include=localhost:4,5" in command
    assert not any(part.startswith("--num_gpus") for part in command)
    with pytest.raises(
        ConfigError, match="--num-gpus: 5, but CUDA_VISIBLE_DEVICES=4,5,6,7 names 4"
    ):
        launcher_command([], 5, None, visible="4,5,6,7")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 1"):
        launcher_command([], 1, None, visible="GPU-0b1a")


STAND_IN_SSH = """#!/bin/sh
for last; do previous=$host; host=$last; done
test "$previous" = gone && { echo "no route" >&2; exit 255; }
echo "10.0.0.$previous 10.0.1.1"
"""


def stand_in(directory, name, text="#!/bin/sh\n"):
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


def test_overrides_reach_other_machines_with_their_quotes(tmp_path, monkeypatch):
    """Two shells read them on the way: of pdsh and of ssh."""
    monkeypatch.setenv(LAUNCH_OPTIONS, "")
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=8\ntwo slots=8\n")
    not_utf8 = os.fsdecode(b"output_dir=\xff")
    words = ["a b.yaml", 'chat_template_kwargs={"x":"a"}', "x=$HOME `id` 'é' %n 😀\n", "", not_utf8]
    command = launcher_command(words, None, hosts)
    shells = subprocess.check_output(["sh", "-c", f"sh -c 'echo {command[-1]}'"], text=True).strip()
    assert decode_arguments(shells.partition("=")[2]) == words
    # for the line that says how to resume
    assert os.environ[LAUNCH_OPTIONS] == f"--hostfile {hosts}"


@pytest.mark.parametrize("name", ["runs/😀", "runs/a\x7f'\"x", "runs/a: {b", "null"])
def test_options_reach_the_workers_as_they_were_given(name, tmp_path, monkeypatch):
    words = []
    monkeypatch.setattr(
        "medusa_train.cli.launch.launch", lambda given, *_: words.extend(given) or 0
    )
    keys = ["base_model=data/tiny", "datasets=[{path: data/seeds/tiny.jsonl}]"]
    monkeypatch.chdir(tmp_path)
    given = [*keys, "--output-dir", name, "--overwrite", "--num-gpus", "2"]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert words == [*keys, f"--output-dir={name}", "--overwrite"]


def test_a_hostfile_with_another_machine_alone_starts_nothing_here(tmp_path, monkeypatch):
    """DeepSpeed's launcher would; with this machine alone there is nothing to reach by ssh."""
    commands = []
    monkeypatch.setattr(
        "medusa_train.cli.launch.subprocess.Popen", lambda command, **_: commands.append(command)
    )
    monkeypatch.setattr("medusa_train.cli.launch.check_machines", lambda hosts: "10.0.0.1")
    hosts = tmp_path / "hosts"
    for name in ("gpu7.invalid", "localhost", socket.gethostname()):
        hosts.write_text(f"{name} slots=3\n")
        with pytest.raises(AttributeError):  # nothing was started to wait for
            launch(["a.yaml"], None, hosts)
    there, here, by_name = commands
    assert f"--hostfile={hosts}" in there
    assert "--force_multi" in there
    for command in (here, by_name):
        assert "--hostfile=/dev/null" in command
        assert "--num_gpus=3" in command
        assert command[-1] == "a.yaml"


def test_a_worker_reads_the_encoded_arguments(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=8\n")
    words = [
        "base_model=data/tiny",
        "datasets=[{path: data/seeds/tiny.jsonl}]",
        'chat_template_kwargs={"x":"a"}',
    ]
    word = launcher_command([*words, "--print-config"], None, hosts)[-1]
    said = subprocess.check_output(
        [sys.executable, "-m", "medusa_train.cli.train", word], text=True
    )
    assert "x: a" in " ".join(said.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one slots=8\ntwo 8\n", r"hosts:2: expected `HOST slots=GPUS`, got 'two 8'"),
        ("one slots=8 max=9\n", r"hosts:1: expected"),
        ("one slots=8\none slots=4\n", r"hosts:2: one is listed twice"),
        ("one slots=1\n", r"hosts:1: one has slots=1, but 2"),
        ("# none\n\n", "lists no machine"),
    ],
)
def test_a_bad_hostfile_is_named_by_its_line(text, message, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(hosts, 2)


def test_machines_are_checked_before_the_launcher_starts(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{programs}")
    with pytest.raises(MedusaError, match="ssh is not installed"):
        check_machines(["1"])
    stand_in(programs, "ssh", STAND_IN_SSH)
    with pytest.raises(MedusaError, match="pdsh is not installed"):
        check_machines(["1"])
    stand_in(programs, "pdsh")
    assert check_machines(["1"]) == "10.0.0.1"
    assert check_machines(["1", "2"]) == "10.0.0.1"
    with pytest.raises(MedusaError, match=r"ssh gone hostname -I. failed \(no route\)"):
        check_machines(["1", "gone"])


def test_the_port_is_free_or_named(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=8  # the first\ntwo slots=8\n")
    assert "--master_port=4000" in launcher_command([], None, hosts, master_port=4000)
    assert not any(part == "--master_port=29500" for part in launcher_command([], None, hosts))
    with pytest.raises(ConfigError, match="--master-port: must be 1 to 65535"):
        launcher_command([], None, hosts, master_port=70000)


def test_the_launcher_does_not_see_the_variable_it_would_drop(monkeypatch):
    """Nor prints that it ignores it."""
    started = {}

    class Launcher:
        pid = 0

        def __init__(self, command, env, **options):
            started.update(command=command, env=env)

        def wait(self):
            return 0

    monkeypatch.setattr("medusa_train.cli.launch.subprocess.Popen", Launcher)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert launch([], 2, None) == 0
    assert "--include=localhost:4,5" in started["command"]
    assert "CUDA_VISIBLE_DEVICES" not in started["env"]


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


def test_no_processes_are_refused(tmp_path):
    keys = [
        "base_model=data/tiny",
        "datasets=[{path: data/seeds/tiny.jsonl}]",
        f"output_dir={tmp_path}",
    ]
    result = CliRunner().invoke(app, [*keys, "--num-gpus", "0"])
    assert result.exit_code == 2
    assert "--num-gpus: must be at least one" in result.output


@pytest.fixture
def config_file(backbone_dir, chats, tmp_path):  # noqa: F811
    keys = {
        "base_model": str(backbone_dir),
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mishaps = [None, Mishap("medusa_train.training.load_data:check_run", 1, lose_a_file)]
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
    monkeypatch.setattr("medusa_train.cli.launch.os._exit", exits)
    monkeypatch.setattr("medusa_train.cli.train.process_info_from_env", lambda: info)
    for module in ("launch", "train"):
        monkeypatch.setattr(f"medusa_train.cli.{module}.train_distributed", Mock(return_value=0))
    CliRunner().invoke(app, [str(config_file)])
    exits.assert_called_once_with(0)


#: Runs the command of another machine here, as sshd does: one text, read by a shell that knows
#: nothing of the caller.
SSH_HERE = """#!/bin/sh
while true; do
  case "$1" in -o|-l|-p) shift 2;; -*) shift;; *) break;; esac
done
echo "$@" >> "$SSH_LOG"
shift
test "$*" = "hostname -I" && { echo "127.0.0.1 10.0.1.1"; exit; }
exec env -i HOME="$HOME" PATH="$PATH" OMP_NUM_THREADS=1 sh -c "$*"
"""

#: Calls ssh for each machine, as `pdsh -S -f N -w HOSTS COMMAND` does.
PDSH_BY_SSH = """#!/bin/sh
hosts=$(echo "$5" | tr , ' ')
shift 5
number=0
started=
for host in $hosts; do
  ssh -2 -a -x -l someone "$host" "$(echo "$*" | sed "s/%n/$number/g")" &
  started="$started $!"
  number=$((number + 1))
done
worst=0
for process in $started; do
  wait "$process"
  code=$?
  test "$code" -gt "$worst" && worst=$code
done
exit "$worst"
"""


@pytest.fixture
def two_machines(tmp_path):
    """A hostfile of two machines that are this one, and the environment that reaches them."""
    programs = tmp_path / "bin"
    stand_in(programs, "ssh", SSH_HERE)
    stand_in(programs, "pdsh", PDSH_BY_SSH)
    hosts = tmp_path / "hosts"
    hosts.write_text("one.invalid slots=1\ntwo.invalid slots=1\n")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return hosts, {"PATH": path, "SSH_LOG": str(tmp_path / "ssh.log")}


@pytest.mark.slow
@needs_compiler
def test_two_machines_of_a_hostfile_train_by_the_words_that_were_given(
    config_file, tmp_path, two_machines
):
    hosts, environ = two_machines
    quoted = 'chat_template_kwargs={"x":"a b $HOME"}'
    out = tmp_path / "two machines 'é'"
    run = start(config_file, "--hostfile", hosts, quoted, "--output-dir", out, **environ)
    _, said = run.communicate(timeout=900)
    assert run.returncode == 0, said
    assert "processes: 2, DeepSpeed" in said
    # each process was compared with the others
    kept = yaml.safe_load((out / "config.yaml").read_text())
    assert kept["chat_template_kwargs"] == {"x": "a b $HOME"}
    assert kept["output_dir"] == str(out)
    assert (out / "heads" / "medusa_lm_head.safetensors").exists()
    reached = [line.split()[0] for line in (tmp_path / "ssh.log").read_text().splitlines()]
    assert set(reached) == {"one.invalid", "two.invalid"}
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(shutil.which("pkill") is None, reason="signals other machines by pkill")
def test_another_machine_trains_and_saves_at_a_signal_to_the_command(
    config_file, tmp_path, two_machines
):
    hosts, environ = two_machines
    hosts.write_text("one.invalid slots=2\n")
    long = ["max_steps=100000", "num_epochs=1", "save_steps=100000"]
    run = start(config_file, "--hostfile", hosts, *long, **environ)
    wait_for_steps(tmp_path / "run")
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=900)
    assert run.returncode == 130, said
    assert "processes: 2, DeepSpeed" in said
    assert "deepspeed.launcher.launch" in (tmp_path / "ssh.log").read_text()
    assert "saved. To resume:" in said
    assert f"resume_from_checkpoint=auto --hostfile {hosts}" in said
    assert (max(Path(tmp_path / "run" / "checkpoints").glob("step-*")) / "manifest.json").exists()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("zephyr", "has other values than process 0 of: chat_template"),
        ("", "cannot read its configuration"),
    ],
)
def test_machines_with_other_values_are_refused(name, problem, config_file, tmp_path, two_machines):
    """An environment variable that the configuration names differs on the second."""
    hosts, environ = two_machines
    other = f"name=chatml\ntest $1 = two.invalid && name={name}\nshift\n"
    text = SSH_HERE.replace("shift\ntest", f"{other}test").replace("env -i", "env -i NAME=$name")
    stand_in(tmp_path / "bin", "ssh", text)
    run = start(config_file, "--hostfile", hosts, "chat_template=$NAME", NAME="chatml", **environ)
    _, said = run.communicate(timeout=200)
    assert run.returncode == 2, said
    assert said.count("process 1 on ") == 1
    assert problem in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_compiler
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
@needs_compiler
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
@needs_compiler
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

    found = {psutil.Process(pid).environ().get("RANK"): pid for pid in training_processes(run.pid)}
    return found[str(rank)]


@pytest.mark.slow
@needs_compiler
def test_each_of_two_processes_is_killed_and_the_run_ends_as_if_none_was(config_file, tmp_path):
    """Rank 0 and rank 1 by SIGKILL, as the out-of-memory killer does, then rank 1 by SIGTERM."""
    keys = yaml.safe_load(config_file.read_text()) | LORA
    config_file.write_text(yaml.safe_dump(keys))
    often = ["max_steps=60", "save_steps=6", "eval_steps=25", "save_total_limit=2"]
    whole = tmp_path / "whole"
    uninterrupted = start(config_file, *often, "--output-dir", whole, "--num-gpus", 2)
    _, said = uninterrupted.communicate(timeout=900)
    assert uninterrupted.returncode == 0, said

    out = tmp_path / "killed"
    resume = ["medusa-train", str(out / "config.yaml"), "resume_from_checkpoint=auto"]
    resume += ["--num-gpus", "2"]
    arguments = [config_file, *often, "--output-dir", out, "--num-gpus", 2]
    for rank, number, steps, code, words in (
        (0, signal.SIGKILL, 8, 1, "the process of rank 0 was ended by SIGKILL (signal 9)"),
        (1, signal.SIGKILL, 18, 1, "the process of rank 1 was ended by SIGKILL (signal 9)"),
        (1, signal.SIGTERM, 28, 143, "saved. To resume:"),
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
    run = start(*arguments)
    _, said = run.communicate(timeout=900)
    assert run.returncode == 0, said
    assert figures(out) == figures(whole)
    files = {path.relative_to(whole) for path in whole.rglob("*.safetensors")}
    assert {"medusa_lm_head.safetensors", "adapter_model.safetensors"} <= {
        path.name for path in files
    }
    assert files == {path.relative_to(out) for path in out.rglob("*.safetensors")}
    for path in files:
        assert (out / path).read_bytes() == (whole / path).read_bytes(), path
