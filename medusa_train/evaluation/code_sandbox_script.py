"""Judge one Python program that a model wrote. Started as a script by code_sandbox.py.

It needs the standard library only: nothing of this package may be imported by a process whose
program is not trusted. It reads a `Job` from stdin as JSON, isolates itself unless bubblewrap did
so, and forks. The fork gives up its privileges and runs the program. The first process stops it
when its time is over, and reports status, detail and the job's secret to stdout as JSON.

The secret is what a pass is made of: the fork writes it to a pipe after the last line of the
program, and whoever started the script compares it. A program that calls `exit()` or `os._exit()`,
or that writes a report of its own, does not know it.
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
import sys
from typing import NamedTuple, NoReturn

PASSED, FAILED, TIMED_OUT, REFUSED = "passed", "failed", "timed out", "refused"

#: Flags of unshare(2): new user, mount, network, process and IPC namespaces.
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000
#: Flags of mount(2), and those of mount_setattr(2), whose number is the same on every architecture.
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 0x1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITY_VERSION = 0x20080522
SIOCGIFFLAGS, IFF_UP = 0x8913, 0x1
#: User and group id of a program: any but 0, so that it is not root.
NOBODY = 65534

FILE_BYTES = 16 << 20  # of one file, and of the temporary directory
OPEN_FILES = 64
DETAIL_CHARACTERS = 200
#: Exit status of a fork that could not be restricted, and did not run the program.
UNRESTRICTED_STATUS = 79

#: A public address that belongs to nobody (TEST-NET-1); a datagram socket is connected to it
# without sending anything.
PROBE_ADDRESS = ("192.0.2.1", 9)


class Job(NamedTuple):
    """A program, its limits, and what proves that it ran to its end."""

    program: str
    seconds: float
    megabytes: int
    secret: str
    # by bubblewrap; else this process isolates itself
    is_isolated: bool


def main() -> None:
    """Read a job from stdin, run it, and write its report to stdout."""
    job = Job(*json.load(sys.stdin))
    status, detail = _run(job)
    proof = job.secret if status == PASSED else ""
    json.dump([status, detail[:DETAIL_CHARACTERS], proof], sys.stdout)


def _run(job: Job) -> tuple[str, str]:
    """Return status and detail of a program; REFUSED without running it where the network cannot
    be cut off.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # 1. isolate
    if not job.is_isolated:
        had_network = network_access() is not None
        try:
            isolate(libc, os.getcwd())
        except OSError as error:
            if had_network:  # without one, this is a container made for such programs
                return REFUSED, str(error)
    access = network_access()
    if access is not None:
        return REFUSED, access
    # a program of the same user can neither trace this process nor open its files
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    # 2. run the program in a fork
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_restricted(libc, job, writer)
    os.close(writer)

    # 3. wait, and stop it when its time is over
    late = False

    def stop(*_: object) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)  # with it end all processes of its namespace

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, job.seconds)
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)

    # 4. judge by what the fork wrote
    os.set_blocking(reader, False)
    try:
        written = os.read(reader, 4 * DETAIL_CHARACTERS).decode("utf-8", "replace")
    except BlockingIOError:  # a process that the program started still holds the pipe
        written = ""
    code = os.waitstatus_to_exitcode(status)
    if late or code == -signal.SIGXCPU:
        return TIMED_OUT, f"after {job.seconds:g} seconds"
    # a fork of the program, where it may have one, runs past the last line as well
    if code == 0 and written.startswith(job.secret):
        return PASSED, ""
    if code == UNRESTRICTED_STATUS and written:
        return REFUSED, written
    if code == -signal.SIGKILL:
        return FAILED, "the program was killed, by itself or because memory ran out"
    return FAILED, written or f"the program ended with status {code} before its last line"


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
    size = ctypes.c_size_t(len(attributes))
    made = libc.syscall(MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, size)
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
    """Give up root and all capabilities, and limit time, memory, files and processes; the process
    dies with its parent.
    """
    os.setsid()  # a signal to its process group must not reach the parent
    # Linux enforces no limit of processes for root: the user is dropped before limits are set
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges (prctl)")
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _check(libc.capset(header, struct.pack("=6I", *[0] * 6)), "no capabilities (capset)")
    for limit, value in (
        (resource.RLIMIT_CPU, math.ceil(seconds)),
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


def _run_restricted(libc: ctypes.CDLL, job: Job, writer: int) -> NoReturn:
    """Restrict this process, run the program in it, and end it; the pipe `writer` gets the verdict."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        restrict(libc, job.seconds, job.megabytes)
    except OSError as error:
        os.write(writer, str(error).encode("utf-8", "replace"))
        os._exit(UNRESTRICTED_STATUS)
    try:
        _execute(job.program, writer, job.secret)
    finally:
        os._exit(1)  # never back into the caller


def _execute(program: str, writer: int, secret: str) -> NoReturn:
    """Run `program` and end the process; write `secret` to `writer` if it raises nothing, else the
    exception.
    """
    names: dict[str, object] = {}  # not "__main__": an answer may end in a call that this guards
    try:
        exec(compile(program, "<program>", "exec"), names)
    except BaseException as error:  # SystemExit and KeyboardInterrupt as well
        names.clear()
        text = type(error).__name__
        if str(error):
            text += f": {error}"
        os.write(writer, text[:DETAIL_CHARACTERS].encode("utf-8", "replace"))
        os._exit(1)
    os.write(writer, secret.encode())
    os._exit(0)


if __name__ == "__main__":
    main()
