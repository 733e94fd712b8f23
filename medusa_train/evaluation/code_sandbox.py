"""Run Python programs that a model wrote in processes without network, with limits on time, memory and files.

What is isolated: the network, other processes, and writing files (except to a temporary directory that lives in
memory). What is not: the program can read every file that the user can read, and reach services of this machine that
listen on a Unix socket file. Use a container or a virtual machine for programs that may be malicious.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from medusa_train.config.constraints import CODE_BENCH
from medusa_train.errors import ConfigError
from medusa_train.evaluation.questions import FunctionTest, Question
from medusa_train.evaluation.sandbox_child import FAILED, PASSED, REFUSED, TIMED_OUT

CHILD = Path(__file__).with_name("sandbox_child.py")
#: Seconds beyond a program's own in which its process has to start, and to report.
MARGIN = 20.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: (
        str  # PASSED, FAILED (exception, exit() or crash), TIMED_OUT, or REFUSED (the network can't be cut off here)
    )
    detail: str  # the exception, or what is missing

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end."""
        return self.status == PASSED


def run_program(program: str, seconds: float = 10.0, megabytes: int = 1024) -> Outcome:
    """Run a Python program in its own isolated process with limited time and address space; its output is discarded."""
    if sys.platform != "linux":
        return Outcome(REFUSED, f"processes can be isolated on Linux only, not on {sys.platform}")
    job = json.dumps({"program": program, "seconds": seconds, "megabytes": megabytes})
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
            return Outcome(TIMED_OUT, f"its process did not report within {seconds + MARGIN:g} seconds")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.communicate()
    try:
        result = json.loads(output)
        return Outcome(result["outcome"], result["detail"])
    except (ValueError, KeyError, TypeError):
        reason = errors.decode("utf-8", "replace").strip().split("\n")[-1]
        return Outcome(FAILED, f"its process did not report: {reason or f'exit status {process.returncode}'}")


def require_code_execution(allowed: bool, questions: Sequence[Question]) -> None:
    """Check that code in the answers may be run (`allow_code_execution`) and isolated, if questions are scored by it.

    Raises:
        ConfigError: it may not, or it can't; the message says what is missing.
    """
    if not any(isinstance(question.expected, FunctionTest) for question in questions):
        return
    if not allowed:
        raise ConfigError(f"allow_code_execution: {CODE_BENCH}")
    outcome = run_program("import decimal, heapq, typing")
    if not outcome.passed:
        raise ConfigError(
            f"allow_code_execution: the code that the model writes cannot be isolated on this machine: "
            f"{outcome.detail}.\nRun medusa-eval in a container without network (docker run --network none ...), on "
            "a Linux machine that permits user namespaces, or with another bench."
        )
