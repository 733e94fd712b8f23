"""Launch `medusa-train` in several processes with DeepSpeed's launcher, and run it in each of them."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from medusa_train.checkpoint.run_directory import CONFIG, check_output_dir
from medusa_train.cli.common import (
    error_console,
    print_error,
    report_failed_streams,
    split_arguments,
)
from medusa_train.cli.workers import (
    LAUNCHER,
    MODULE,
    WorkerWatch,
    describe_ending,
    stop_without_launcher,
    training_processes,
)
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training.preflight import check_files
from medusa_train.training.process_info import LAUNCH_OPTIONS, ProcessInfo, free_port
from medusa_train.training.signals import StopSignals, leave_terminal, stop_signals

#: Exit codes of medusa-train; any other code of the launcher means failure.
_EXIT_CODES = (0, 1, 2, 130, 143)
#: The only word of workers on other machines, which holds all arguments.
ENCODED = "--encoded-arguments="
#: How long a process that cannot train waits for the others, to tell them.
_TELL_TIMEOUT = timedelta(minutes=1)
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def launch(
    arguments: Sequence[str],
    num_gpus: int | None,
    hostfile: Path | None,
    master_port: int | None = None,
    output_dir: Path | None = None,
) -> int:
    """Run `medusa-train ARGUMENTS` in several processes, wait for them and return the exit code.

    The processes run in a new session: Ctrl-C only reaches this process, which forwards it (and
    SIGTERM) to each training process, by ssh to those of other machines, so that they save a
    checkpoint together. A hostfile that lists this machine alone needs no ssh: its processes are
    started as by `--num-gpus`.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MedusaError("training in several processes requires DeepSpeed: pip install deepspeed")
    with RunProgress(error_console()).phase("importing torch", ticking=True):
        import torch

    # 1. The machines; a hostfile that lists this one alone is none.
    options = []  # for the command that resumes
    if num_gpus is not None:
        options += ["--num-gpus", str(num_gpus)]
    machines: dict[str, int] = {}
    if hostfile is not None:
        options += ["--hostfile", str(hostfile)]
        machines = read_hostfile(hostfile, num_gpus)
    if len(machines) == 1:
        host = next(iter(machines))
        if is_this_machine(host):
            num_gpus = num_gpus or machines[host]
            hostfile = None
            machines = {}
    # 2. The command and its environment.
    cuda = torch.cuda.is_available()
    environment = {"DS_ACCELERATOR": "cuda" if cuda else "cpu", **os.environ}
    visible = None
    if cuda and hostfile is None:
        visible = environment.pop(_VISIBLE, None)
    command = launcher_command(arguments, num_gpus, hostfile, visible, master_port)
    if hostfile is not None:
        address = check_machines(list(machines))
        command.insert(command.index("--no_local_rank"), f"--master_addr={address}")
    environment[LAUNCHER] = str(os.getpid())
    # 3. Run it and wait.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    watch = WorkerWatch(process.pid)
    watch.start()
    with _forward_signals(process, list(machines), run_of(command)) as received:
        code = process.wait()
    watch.stop()
    # 4. The exit code.
    if received:
        if code in (0, 1, 2):
            return code
        return 130 if signal.SIGINT in received else 143
    return _report_ending(watch, code, output_dir, options)


def launcher_command(
    arguments: Sequence[str],
    num_gpus: int | None,
    hostfile: Path | None,
    visible: str | None = None,
    master_port: int | None = None,
) -> list[str]:
    """Return the command line of DeepSpeed's launcher for `launch`; raises ConfigError as `launch`
    does.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES, which the launcher ignores when it is given a number
            of GPUs.
        master_port: where rank 0 listens; None for a free port of this machine.
    """
    if master_port is not None and not 0 < master_port < 65536:
        raise ConfigError(f"--master-port: must be 1 to 65535, got {master_port}")
    if num_gpus is not None and num_gpus < 1:
        raise ConfigError(f"--num-gpus: must be at least one, got {num_gpus}")
    if hostfile is not None:
        read_hostfile(hostfile, num_gpus)
    options = []
    if num_gpus is not None:
        if visible:
            options.append(f"--include=localhost:{_first_visible(visible, num_gpus)}")
        else:
            options.append(f"--num_gpus={num_gpus}")
    if master_port is None:
        # a free port lets several runs share a machine; DeepSpeed's default is 29500
        master_port = free_port()
    options.append(f"--master_port={master_port}")
    if hostfile is None:
        options.append("--hostfile=/dev/null")  # DeepSpeed's default is /job/hostfile
    else:
        # a single machine is reached by ssh as well: else the launcher would start it here
        options += [f"--hostfile={hostfile}", "--force_multi"]
        arguments = [f"{ENCODED}{encode_arguments(arguments, hostfile, num_gpus)}"]
    options += ["--no_local_rank", "--log_level=critical"]
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        *options,
        "--module",
        MODULE,
        *arguments,
    ]


def encode_arguments(arguments: Sequence[str], hostfile: Path, num_gpus: int | None) -> str:
    """Write what the workers on other machines need as one word without quotes, spaces or `$`: the
    shells between here and another machine read each word again.

    It holds the user's words, not a file of resolved values: no directory is known to be shared
    before the run starts, and a file would lose where each value was set. What a worker makes of
    the words is compared with the others (`check_same_config`).
    """
    options = ["--hostfile", str(hostfile)]
    if num_gpus is not None:
        options += ["--num-gpus", str(num_gpus)]
    text = json.dumps({"arguments": list(arguments), "options": options})
    # first a random word, by which the processes of this run are found on their machines
    return f"{secrets.token_hex(8)}.{base64.urlsafe_b64encode(text.encode()).decode()}"


def decode_arguments(word: str) -> list[str]:
    """Read what `encode_arguments` wrote, and note the options for the command that resumes."""
    values = json.loads(base64.urlsafe_b64decode(word.partition(".")[2]))
    os.environ[LAUNCH_OPTIONS] = shlex.join(values["options"])
    return [str(argument) for argument in values["arguments"]]


def worker_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a process that a launcher started."""
    if len(arguments) == 1 and arguments[0].startswith(ENCODED):
        return decode_arguments(arguments[0].removeprefix(ENCODED))
    return list(arguments)


def read_hostfile(path: Path, num_gpus: int | None = None) -> dict[str, int]:
    """Return the number of GPUs by machine, in the order of the lines; raises ConfigError."""
    if not path.is_file():
        raise ConfigError(
            f"--hostfile: {path}: no such file; expected one machine per line, `HOST slots=GPUS`"
        )
    machines: dict[str, int] = {}
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        where = f"--hostfile: {path}:{number}"
        match = re.fullmatch(r"([\w.-]+)\s+slots=([0-9]+)", line)
        if match is None:
            raise ConfigError(f"{where}: expected `HOST slots=GPUS`, got {line!r}")
        host = match[1]
        slots = int(match[2])
        if host in machines:
            raise ConfigError(f"{where}: {host} is listed twice; write one line with all its GPUs")
        if slots < (num_gpus or 1):
            raise ConfigError(
                f"{where}: {host} has slots={slots}, but {num_gpus or 1} or more are needed"
                " (--num-gpus counts the GPUs of each machine)"
            )
        machines[host] = slots
    if not machines:
        raise ConfigError(f"--hostfile: {path}: lists no machine; expected lines `HOST slots=GPUS`")
    return machines


def is_this_machine(host: str) -> bool:
    """Return whether a name of the hostfile is an address of this machine; False for a name that
    only ssh knows.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        # only an own address can be listened on
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def check_machines(hosts: Sequence[str]) -> str:
    """Return the address of the first machine, after checking that all are reached by ssh.

    Raises:
        MedusaError: ssh or pdsh is not installed, or a machine does not answer.
    """
    for program in ("ssh", "pdsh"):
        if shutil.which(program) is None:
            raise MedusaError(
                f"--hostfile: {program} is not installed on this machine (apt-get install pdsh"
                " openssh-client); without it, start medusa-train with srun or torchrun on each"
                " machine"
            )
    started = [
        subprocess.Popen(
            ["ssh", *_SSH_OPTIONS, host, "hostname -I"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    answers = [process.communicate() for process in started]
    for host, process, (_, problem) in zip(hosts, started, answers, strict=True):
        if process.returncode:
            raise MedusaError(
                f"--hostfile: `ssh {host} hostname -I` failed ({problem.strip() or 'no message'});"
                " each machine must be reached by ssh without a password"
            )
    addresses = answers[0][0].split()
    if not addresses:
        raise MedusaError(f"--hostfile: `ssh {hosts[0]} hostname -I` printed no address")
    return addresses[0]


def _first_visible(visible: str, count: int) -> str:
    """Return the first `count` GPUs of CUDA_VISIBLE_DEVICES."""
    devices = [device.strip() for device in visible.split(",")]
    if count > len(devices):
        raise ConfigError(f"--num-gpus: {count}, but {_VISIBLE}={visible} names {len(devices)}")
    if not all(device.isdecimal() for device in devices):
        raise ConfigError(
            f"{_VISIBLE}={visible}: DeepSpeed's launcher takes only indices of GPUs. Set indices"
            " (nvidia-smi -L lists them), or start the processes with torchrun --nproc-per-node"
            f" {count} -m {MODULE}"
        )
    return ",".join(devices[:count])


def run_of(command: Sequence[str]) -> str:
    """Return the random word in the command line of each worker on another machine; empty where
    there is none.
    """
    last = command[-1]
    if not last.startswith(ENCODED):
        return ""
    word, _, _ = last.removeprefix(ENCODED).partition(".")
    return word


@contextlib.contextmanager
def _forward_signals(
    process: subprocess.Popen[bytes], hosts: Sequence[str], run: str
) -> Iterator[list[int]]:
    """Forward Ctrl-C, SIGTERM and SIGHUP to the training processes, which tell a repetition from a
    request of its own; the launcher would kill them instead.

    Args:
        hosts: the other machines. run: see `run_of`.
    """
    received: list[int] = []
    signals = StopSignals()

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        repeats = signals.repeats(number)
        if number == signal.SIGHUP:
            leave_terminal()
        if hosts:
            _signal_by_ssh(hosts, run)
            if len(received) > 1 and not repeats:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a machine does not answer
            return
        training = training_processes(process.pid)
        for pid in training:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        # not started yet, or ended: the launcher ends what there is
        if not training and not repeats:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # at Ctrl-C it would print a stack trace

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_by_ssh(hosts: Sequence[str], run: str) -> None:
    """Send SIGTERM to the training processes of `run` on other machines; where none has started, to
    what starts them. DeepSpeed's launcher would end those of all runs.
    """
    # [.] in place of a dot: the shell that runs pkill does not match the pattern itself
    words = f"medusa_train[.]cli[.]train {ENCODED}{run}"
    command = f"pkill -TERM -f -- '-m {words}' || pkill -TERM -f -- '{words}'"
    for host in hosts:
        subprocess.Popen(
            ["ssh", *_SSH_OPTIONS, host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _report_ending(
    watch: WorkerWatch, code: int, output_dir: Path | None, options: Sequence[str]
) -> int:
    """Say which training process was killed, and how to resume; return the exit code."""
    # 1. What ended.
    number = watch.signal or _signal_in(code)
    alive: list[int] = []
    if code == 0:
        alive = watch.alive()
    if alive:
        message = f"DeepSpeed's launcher was ended; ranks {alive} save a checkpoint and stop"
    elif number is not None:
        message = describe_ending(watch.rank, number)
    elif code in _EXIT_CODES:
        return code
    else:
        return 1
    # 2. How to go on.
    if output_dir is not None:
        saved = [*output_dir.glob("checkpoints/step-*"), *output_dir.glob("stage_one/**/step-*")]
        if saved:
            config = str(output_dir / CONFIG)
            command = ["medusa-train", config, "resume_from_checkpoint=auto", *options]
            message += f". To resume: {shlex.join(command)}"
        else:
            message += ". No checkpoint was saved yet: start the run again"
    print_error(message)
    return 1


def _signal_in(code: int) -> int | None:
    """Return the signal that killed a process, by the launcher's exit code; None if none did.

    The code is 256 - signal, or a shell's 128 + signal.
    """
    if code in _EXIT_CODES or code <= 128:
        return None
    if code > 192:
        return 256 - code
    return code - 128


def check_and_launch(
    arguments: Sequence[str],
    flags: Mapping[str, object],
    num_gpus: int | None,
    hostfile: Path | None,
    master_port: int | None = None,
) -> int:
    """Check the configuration, then run the command in several processes; return the exit code."""
    path, overrides = split_arguments(arguments)
    cfg = load_config(TrainConfig, path, overrides, flags=flags)
    check_output_dir(cfg)
    processes = num_gpus or 1
    if hostfile is not None:
        processes = sum(num_gpus or slots for slots in read_hostfile(hostfile, num_gpus).values())
    check_files(cfg, processes)
    words = [*arguments, *_words_of_flags(flags)]
    return launch(words, num_gpus, hostfile, master_port, Path(cfg.output_dir))


def _words_of_flags(flags: Mapping[str, object]) -> list[str]:
    """Write values of options as the words that set them: a worker reads them as they were given."""
    words = []
    for name, value in flags.items():
        option = TrainConfig.option_of(name).split()[0]
        if value is True:
            words.append(option)
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def run_worker(process: ProcessInfo, arguments: Sequence[str], flags: Mapping[str, object]) -> int:
    """Train as a process of rank 1 or above: without output, except for errors of this process
    alone.
    """
    path, overrides = split_arguments(arguments)
    try:
        cfg = load_config(TrainConfig, path, overrides, flags=flags)
    except ConfigError as error:
        if process.local_rank == 0:  # the configuration may be different on this machine
            print_error(f"process {process.rank} of {process.size}: {error}")
        _report_bad_config(process)
        return error.exit_code
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    quiet = Console(quiet=True)
    return train_distributed(process, cfg, quiet, quiet)


def _report_bad_config(process: ProcessInfo) -> None:
    """Join the other processes to tell them that this one cannot train: across machines, no
    launcher would end them. Where rank 0 cannot read the configuration either, it does not join.
    """
    from medusa_train.training.distributed import check_same_config, init_distributed

    with contextlib.suppress(MedusaError):
        check_same_config(init_distributed(process, _TELL_TIMEOUT), None)


def train_distributed(
    process: ProcessInfo, cfg: TrainConfig, console: Console, results: Console
) -> int:
    """Join the process group and train; return the exit code.

    If one process fails, it reports the error and the others exit as well.
    """
    progress = RunProgress(console)
    with progress.phase("importing torch and transformers", ticking=True):
        from medusa_train.training.distributed import (
            PeerError,
            check_same_config,
            init_distributed,
            is_communication_error,
            is_lost_peer,
        )
        from medusa_train.training.stages import train_stages

    try:
        stop_without_launcher()
        with progress.phase(f"waiting for {process.size} processes", ticking=True):
            world = init_distributed(process)
        check_same_config(world, cfg.model_dump(mode="json"))
        code = train_stages(cfg, console, results, world)
        world.destroy()
        if code:
            exit_now(code)
        return code
    except PeerError as error:
        return error.exit_code
    except MedusaError as error:
        if process.rank == 0:
            raise
        print_error(f"process {process.rank} of {process.size}: {error}")
        return error.exit_code
    except Exception as error:
        if is_lost_peer(error):
            if process.rank == 0:
                print_error("another process exited, so training cannot continue")
        elif is_communication_error(error):
            print_error(f"process {process.rank} of {process.size}: {error}")
        else:
            raise
        return 1


def exit_now(code: int) -> NoReturn:
    """Exit without Python's cleanup, after a run has written everything.

    Threads of gloo may still hold tensors, which DeepSpeed's reference to the process group
    outlives; dropping one while Python shuts down aborts the process (pytorch issue 190489). And
    the launcher kills processes that are still cleaning up when the first one has exited after an
    interruption, and reports a failure.
    """
    report_failed_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
