"""Run Python programs that a model wrote in sandboxes without network, with limits on time, memory
and files.

There are two sandboxes. *bubblewrap*, where it is installed: a program sees Python and the system's
libraries, no devices, no other file or process, and no user of this machine. *Namespaces* of our own
otherwise: the network, other processes and writing files are cut off, but a program can read every
file that the user can read, and reach services that listen on a Unix socket file; not as root.

Both keep a program from harming the machine, and from passing by `exit()` or a forged report. A
program that looks for its judge in its own process (frames, memory) can forge a pass. Use a virtual
machine for programs that may be malicious.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from medusa_train.evaluation.code_sandbox_script import (
    FAILED,
    FILE_BYTES,
    NOBODY,
    PASSED,
    REFUSED,
    TIMED_OUT,
    Job,
)

#: The script that judges a program; see there.
CHILD = Path(__file__).with_name("code_sandbox_script.py")
#: Seconds beyond a program's own in which its process has to start, and to report.
MARGIN = 20.0
#: Where bubblewrap shows the script, and the only directory that can be written.
INSIDE_CHILD, INSIDE_DIRECTORY = "/code_sandbox_script.py", "/tmp"
#: What Python needs of a system, where it exists.
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix", "/gnu")
#: Memory of the processes around a program, and of the files that it writes.
OVERHEAD_MEGABYTES = 128
INSTALL = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"


class Outcome(NamedTuple):
    """How a program ended."""

    # PASSED, FAILED, TIMED_OUT, or REFUSED: not run, since it cannot be isolated here
    status: str
    detail: str  # the exception, or what is missing

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == PASSED


@dataclass(frozen=True)
class Sandbox:
    """How programs are isolated on this machine.

    Attributes:
        bubblewrap: the tool's path; None: the script isolates itself.
        refusal: why no program is run here; None where they are.
    """

    bubblewrap: str | None
    refusal: str | None = None


def run_program(program: str, seconds: float = 10.0, megabytes: int = 1024) -> Outcome:
    """Run a Python program in its own isolated process with limited time and memory; its output is
    discarded.
    """
    sandbox = find_sandbox()
    if sandbox.refusal is not None:
        return Outcome(REFUSED, sandbox.refusal)
    return _run_in(sandbox, program, seconds, megabytes)


@cache
def find_sandbox() -> Sandbox:
    """Return the best sandbox of this machine: bubblewrap if it works, else namespaces of our own,
    but not as root.
    """
    if sys.platform != "linux":
        refusal = f"processes can be isolated on Linux only, not on {sys.platform}"
        return Sandbox(None, refusal)
    tool = shutil.which("bwrap")
    problem = "bubblewrap is not installed"
    if tool is not None:
        tried = _run_in(Sandbox(tool), "", 10.0, 256)
        if tried.passed:
            return Sandbox(tool)
        problem = f"bubblewrap ({tool}) does not work here: {tried.detail}"
    if os.geteuid() == 0:
        refusal = (
            f"{problem}, and without it no code is run as root; {INSTALL}, or use another user"
        )
        return Sandbox(None, refusal)
    tried = _run_in(Sandbox(None), "", 10.0, 256)
    if tried.status == REFUSED:
        return Sandbox(None, f"{tried.detail}; {problem}: {INSTALL}")
    return Sandbox(None)


def _run_in(sandbox: Sandbox, program: str, seconds: float, megabytes: int) -> Outcome:
    """Run a program in a sandbox, without asking whether the sandbox is fit for it."""
    job = Job(program, seconds, megabytes, secrets.token_hex(16), sandbox.bubblewrap is not None)
    with (
        tempfile.TemporaryDirectory(prefix="medusa-code-") as directory,
        _memory_limit(megabytes + OVERHEAD_MEGABYTES) as limit,
    ):
        command = [*limit, *_command(sandbox)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=_environment(),
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(json.dumps(job).encode(), seconds + MARGIN)
        except subprocess.TimeoutExpired:
            return Outcome(
                TIMED_OUT, f"its process did not report within {seconds + MARGIN:g} seconds"
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.communicate()
    return _outcome(job, output, errors, process.returncode)


def _outcome(job: Job, output: bytes, errors: bytes, code: int) -> Outcome:
    """Read a report; only one with the job's secret is a pass."""
    try:
        status, detail, proof = json.loads(output)
    except (ValueError, TypeError):
        reason = errors.decode("utf-8", "replace").strip().split("\n")[-1]
        return Outcome(FAILED, f"its process did not report: {reason or f'exit status {code}'}")
    if status == PASSED and proof != job.secret:
        return Outcome(FAILED, "the program forged its report")
    return Outcome(str(status), str(detail))


def _command(sandbox: Sandbox) -> list[str]:
    """Return the command that runs the script in a sandbox."""
    if sandbox.bubblewrap is None:
        return [sys.executable, "-I", "-S", str(CHILD)]
    # a virtual environment's python is a link to this one, which finds its library by its own place
    python = os.path.realpath(sys.executable)
    library = os.path.realpath(sys.base_prefix)
    command = [sandbox.bubblewrap, "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try"]
    if os.geteuid() == 0:
        # enough for the script to become nobody before it runs the program, and to stop it
        command += ["--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            command += ["--cap-add", capability]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for path in SYSTEM_DIRECTORIES:
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    command += _readable(library)
    if not Path(python).is_relative_to(library):
        command += _readable(python)
    command += ["--ro-bind", str(CHILD), INSIDE_CHILD]
    command += ["--perms", "0755", "--dir", "/dev"]
    for device in ("/dev/null", "/dev/urandom"):  # neither holds anything
        command += ["--dev-bind", device, device]
    command += ["--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", INSIDE_DIRECTORY]
    command += ["--remount-ro", "/", "--chdir", INSIDE_DIRECTORY]
    return [*command, "--", python, "-I", "-S", INSIDE_CHILD]


def _readable(path: str) -> list[str]:
    """Return the options that show `path` to everybody, although it may lie in root's home."""
    if any(Path(path).is_relative_to(directory) for directory in SYSTEM_DIRECTORIES):
        return []
    options = []
    for parent in reversed(Path(path).parents):
        if parent != Path("/"):
            options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, "--ro-bind", path, path]


def _environment() -> dict[str, str]:
    """Return what systemd-run needs to find the user's session; programs see nothing of it."""
    if _systemd_run() is None:
        return {}
    names = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    return {name: os.environ[name] for name in names if name in os.environ}


# A memory limit for all processes of a program together


@contextmanager
def _memory_limit(megabytes: int) -> Iterator[list[str]]:
    """Yield the beginning of a command that puts the rest of it into a control group with a memory
    limit; empty where none can be had.
    """
    systemd_run = _systemd_run()
    if systemd_run is not None:
        yield [*systemd_run, "-p", f"MemoryMax={megabytes}M", "-p", "MemorySwapMax=0", "--"]
        return
    group = _new_memory_group(megabytes << 20)
    if group is None:
        yield []
        return
    try:
        yield ["/bin/sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group / "cgroup.procs")]
    finally:
        _remove_group(group)


@cache
def _systemd_run() -> tuple[str, ...] | None:
    """Return the command that starts another one in a control group of its own; None without
    systemd, or without a session of the user.
    """
    tool = shutil.which("systemd-run")
    if tool is None:
        return None
    command: tuple[str, ...] = (tool, "--scope", "--quiet", "--collect")
    if os.geteuid() != 0:
        command = (*command, "--user")
    try:
        tried = subprocess.run(
            [*command, "-p", "MemoryMax=64M", "--", "true"],
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return command if tried.returncode == 0 else None


def _new_memory_group(limit: int) -> Path | None:
    """Create a control group below this process's own, for at most `limit` bytes; None where that
    is not permitted.
    """
    parent = _own_memory_group()
    if parent is None:
        return None
    group = parent / f"medusa-code-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError:
        return None
    for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and of version 1
        with suppress(OSError):
            if (group / name).exists():
                (group / name).write_text(str(limit))
                return group
    _remove_group(group)
    return None


def _own_memory_group() -> Path | None:
    """Return the directory of the control group that counts this process's memory."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            if not controllers and Path("/sys/fs/cgroup/cgroup.controllers").exists():
                return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


def _remove_group(group: Path) -> None:
    for _ in range(100):  # the kernel may still be ending its last process
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.01)
        else:
            return
