"""Run Python programs that a model wrote in processes without network, with limits on time, memory
and files.

What is isolated: the network, other processes, and writing files (except to a temporary directory
that lives in memory). What is not: the program can read every file that the user can read, and
reach services of this machine that listen on a Unix socket file. Use a container or a virtual
machine for programs that may be malicious.

`run_program` runs this file as a script, with `python -I -S`. It needs the standard library only:
nothing of this package may be imported by a process whose program is not trusted. The script reads
`_run`'s arguments from stdin as JSON, isolates itself and forks; the fork gives up its privileges
and runs the program. The first process stays outside the fork's process namespace, stops it when
its time is over, and reports to stdout.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: The file that is run as a script.
CHILD = Path(__file__)
#: Seconds beyond a program's own in which its process has to start, and to report.
MARGIN = 20.0

PASSED, FAILED, TIMED_OUT, REFUSED = "passed", "failed", "timed out", "refused"

#: Flags of unshare(2): new user, mount, network, process and IPC namespaces.
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000
#: Flags of mount(2), and those of mount_setattr(2), whose number is the same on every architecture.
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 0x1
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION = 0x20080522
SIOCGIFFLAGS, IFF_UP = 0x8913, 0x1
#: User id inside the namespaces: any but 0, so that nothing there is root.
NOBODY = 65534

FILE_BYTES = 16 << 20  # of one file, and of the temporary directory
OPEN_FILES = 64
DETAIL_CHARACTERS = 200
#: Exit status of a program that ran to its end; one that calls exit() itself does not pass.
PASSED_STATUS = 77

#: A public address that belongs to nobody (TEST-NET-1); a datagram socket is connected to it
# without sending anything.
PROBE_ADDRESS = ("192.0.2.1", 9)


class Outcome(NamedTuple):
    """How a program ended."""

    # PASSED, FAILED, TIMED_OUT, or REFUSED: not run, since the network cannot be cut off here
    status: str
    detail: str  # the exception, or what is missing

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == PASSED


def run_program(program: str, seconds: float = 10.0, megabytes: int = 1024) -> Outcome:
    """Run a Python program in its own isolated process with limited time and address space; its
    output is discarded.
    """
    if sys.platform != "linux":
        return Outcome(REFUSED, f"processes can be isolated on Linux only, not on {sys.platform}")
    job = json.dumps([program, seconds, megabytes])
    with tempfile.TemporaryDirectory(prefix="medusa-code-") as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env={},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(job.encode(), timeout=seconds + MARGIN)
        except subprocess.TimeoutExpired:
            return Outcome(
                TIMED_OUT, f"its process did not report within {seconds + MARGIN:g} seconds"
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.communicate()
    try:
        return Outcome(*json.loads(output))
    except (ValueError, TypeError):
        reason = errors.decode("utf-8", "replace").strip().split("\n")[-1]
        return Outcome(
            FAILED, f"its process did not report: {reason or f'exit status {process.returncode}'}"
        )


# The script


def main() -> None:
    """Read a job from stdin, run it, and write its outcome to stdout."""
    outcome = _run(*json.load(sys.stdin))
    json.dump([outcome.status, outcome.detail[:DETAIL_CHARACTERS]], sys.stdout)


def _run(program: str, seconds: float, megabytes: int) -> Outcome:
    """Run `program`; REFUSED without running it where the network cannot be cut off."""
    libc = ctypes.CDLL(None, use_errno=True)
    had_network = network_access() is not None
    try:
        isolate(libc, os.getcwd())
    except OSError as error:
        if had_network:  # without one, this is a container made for such programs
            return Outcome(REFUSED, str(error))
    if (access := network_access()) is not None:
        return Outcome(REFUSED, access)

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            restrict(libc, seconds, megabytes)
            _execute(program, writer)
        finally:
            os._exit(1)  # never back into this function
    os.close(writer)
    late = False

    def stop(*_: object) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)  # and with it all processes of its namespace

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    status = os.waitpid(child, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.set_blocking(reader, False)
    try:
        detail = os.read(reader, 4 * DETAIL_CHARACTERS).decode("utf-8", "replace")
    except BlockingIOError:
        detail = ""
    code = os.waitstatus_to_exitcode(status)
    if late or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(TIMED_OUT, f"after {seconds:g} seconds")
    if code == PASSED_STATUS:
        return Outcome(PASSED, "")
    return Outcome(FAILED, detail or f"the program ended with status {code}")


def isolate(libc: ctypes.CDLL, directory: str) -> None:
    """Move this process into namespaces without network, with a read-only file system except for
    `directory`.

    Args:
        directory: becomes an empty file system in memory, and the working directory.

    Raises:
        OSError: the system does not permit one of the steps; the message names it.
    """
    user, group = os.getuid(), os.getgid()
    _check(
        libc.unshare(NEW_NAMESPACES),
        "new user, mount, network, process and IPC namespaces (unshare)",
    )
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts (mount)")
    attributes = struct.pack("=4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    made = libc.syscall(
        MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _check(made, "a read-only file system (mount_setattr, Linux 5.12)")
    options = f"size={FILE_BYTES},mode=700".encode()
    made = libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    _check(made, "a file system in memory (mount)")
    os.chdir(directory)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def network_access() -> str | None:
    """Return what connects this process to a network: an interface that is up, or a route; None if
    nothing does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode())
            (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)
            if name != "lo" and flags & IFF_UP:
                return f"network interface {name} is up"
        try:
            probe.connect(PROBE_ADDRESS)
        except OSError:
            return None
    return "there is a route to the internet"


def restrict(libc: ctypes.CDLL, seconds: float, megabytes: int) -> None:
    """Give up all capabilities, and limit time, memory, files and processes; the process dies with
    its parent.

    Linux does not enforce the limit on processes for root; ending the process ends those that it
    started.
    """
    os.setsid()  # a signal to its process group must not reach the parent
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges (prctl)")
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _check(libc.capset(header, struct.pack("=6I", *[0] * 6)), "no capabilities (capset)")
    cpu = math.ceil(seconds)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def _execute(program: str, writer: int) -> None:
    """Run `program` and end the process: with PASSED_STATUS if it raises nothing, else the
    exception to `writer`.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    names: dict[str, object] = {}  # not "__main__": an answer may end in a call that this guards
    try:
        exec(compile(program, "<program>", "exec"), names)
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt as well: only the end of the program passes
        names.clear()
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        os.write(writer, text[:DETAIL_CHARACTERS].encode("utf-8", "replace"))
        os._exit(1)
    os._exit(PASSED_STATUS)


if __name__ == "__main__":
    main()
