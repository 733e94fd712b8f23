"""Run Python programs that a model wrote in bubblewrap: without network, other files, devices or
processes, and with limits on time and memory.

A program sees Python, the system's libraries and 16 MB of temporary files, and runs as user nobody.
It can neither harm the machine nor pass by calling `exit()` or writing a false report. But a
program that searches its own process (frames, memory) for the runner's secret can fake a pass. Use
a virtual machine for programs that may be malicious.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

PASSED, FAILED, TIMED_OUT, REFUSED = "passed", "failed", "timed out", "refused"

INSTALL = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)"
#: Additional seconds for starting a program's process.
MARGIN = 20.0
NOBODY = "65534"  # user id and group id of a program
FILE_BYTES = 16 << 20  # limit for one file, and for the temporary directory
OPEN_FILES = 64
DETAIL_CHARACTERS = 200
#: Directories of the system that Python needs, as far as they exist.
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix", "/gnu")

#: Runs a program from stdin and reports to stdout. It writes the secret only if the program runs to
#: its end, including its test. A program that calls `exit()` or `os._exit()` does not get there.
RUNNER = f"""
import json, os, sys
program, secret = json.load(sys.stdin)
report = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for standard in (0, 1, 2):
    os.dup2(null, standard)
names = {{}}  # not "__main__": an answer may end in a call that this guards
try:
    exec(compile(program, "<program>", "exec"), names)
except BaseException as error:  # SystemExit and KeyboardInterrupt as well
    names.clear()
    text = type(error).__name__ + (f": {{error}}" if str(error) else "")
    os.write(report, text[:{DETAIL_CHARACTERS}].encode("utf-8", "replace"))
    os._exit(1)
os.write(report, secret.encode())
os._exit(0)
"""


class ProgramResult(NamedTuple):
    """How a program ended."""

    # PASSED, FAILED, TIMED_OUT, or REFUSED: not run, because this machine cannot isolate it
    status: str
    detail: str  # the exception, or why the program could not be run

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == PASSED


@cache
def sandbox_unsupported_reason() -> str | None:
    """Return why this machine cannot isolate programs; None if it can."""
    tool = shutil.which("bwrap")
    if tool is None:
        return f"bubblewrap is not installed; {INSTALL}"
    outcome = _run("", 10.0, 256)
    if outcome.passed:
        return None
    return f"bubblewrap ({tool}) does not work here: {outcome.detail}"


def run_program(program: str, seconds: float = 10.0, megabytes: int = 1024) -> ProgramResult:
    """Run a Python program in its own process, with limited time and memory. Its output is
    discarded.
    """
    unsupported_reason = sandbox_unsupported_reason()
    if unsupported_reason is not None:
        return ProgramResult(REFUSED, unsupported_reason)
    return _run(program, seconds, megabytes)


def _run(program: str, seconds: float, megabytes: int) -> ProgramResult:
    secret = secrets.token_hex(16)
    started = time.monotonic()
    try:
        process = subprocess.run(
            sandbox_command(seconds, megabytes),
            input=json.dumps([program, secret]).encode(),
            capture_output=True,
            timeout=seconds + MARGIN,
            env={},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProgramResult(
            TIMED_OUT, f"its process did not end within {seconds + MARGIN:g} seconds"
        )
    late = time.monotonic() - started >= seconds
    report = process.stdout.decode("utf-8", "replace")
    # a fork of the program also reports, so the secret may appear twice
    if process.returncode == 0 and report.startswith(secret):
        return ProgramResult(PASSED, "")
    if late and process.returncode == 128 + signal.SIGKILL:
        return ProgramResult(TIMED_OUT, f"after {seconds:g} seconds")
    if process.returncode == 128 + signal.SIGKILL:
        return ProgramResult(FAILED, "the program was killed, by itself or because memory ran out")
    errors = process.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
    ended = f"the program ended with status {process.returncode} before its last line"
    return ProgramResult(FAILED, report[:DETAIL_CHARACTERS] or errors or ended)


def sandbox_command(seconds: float, megabytes: int) -> list[str]:
    """Return the command that runs `RUNNER` in bubblewrap, within `seconds` and `megabytes`."""
    # a virtual environment's python links to this one, which finds its library by its own path
    python = os.path.realpath(sys.executable)
    library = os.path.realpath(sys.base_prefix)
    # 1. own namespaces: the program shares nothing with this machine
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try"]
    become_nobody: list[str] = []
    if os.geteuid() == 0:
        # Linux does not limit the processes of root, even if root has another id in the namespace
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        become_nobody = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        become_nobody += ["--inh-caps=-all", "--no-new-privs"]
    else:
        command += ["--unshare-user", "--uid", NOBODY, "--gid", NOBODY]
    # 2. the files that the program sees
    for path in SYSTEM_DIRECTORIES:
        command += ["--ro-bind-try", path, path]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    command += _readable(library)
    if not Path(python).is_relative_to(library):
        command += _readable(python)
    command += ["--perms", "0755", "--dir", "/dev"]
    for device in ("/dev/null", "/dev/urandom"):  # neither stores anything
        command += ["--dev-bind", device, device]
    command += ["--perms", "1777", "--size", str(FILE_BYTES), "--tmpfs", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
    # 3. the limits; --nproc=1 keeps the program from starting other processes
    command += become_nobody
    command += ["timeout", "--signal", "KILL", f"{seconds:g}"]
    command += ["prlimit", f"--cpu={math.ceil(seconds)}", f"--as={megabytes << 20}"]
    command += [f"--fsize={FILE_BYTES}", f"--nofile={OPEN_FILES}", "--nproc=1", "--core=0", "--"]
    return [*command, python, "-I", "-S", "-c", RUNNER]


def _readable(path: str) -> list[str]:
    """Return the options that make `path` readable for every user, even inside root's home."""
    if any(Path(path).is_relative_to(directory) for directory in SYSTEM_DIRECTORIES):
        return []
    options = []
    for parent in reversed(Path(path).parents):
        if parent != Path("/"):
            options += ["--perms", "0755", "--dir", str(parent)]
    return [*options, "--ro-bind", path, path]
