"""Programs are really run here, in isolated processes; where that is not permitted, the refusal is
checked.
"""

import os
import platform
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from medusa_train.errors import ConfigError
from medusa_train.evaluation import answer_scores, code_sandbox
from medusa_train.evaluation.answer_scores import require_code_execution, score_text
from medusa_train.evaluation.code_sandbox import (
    FAILED,
    PASSED,
    REFUSED,
    TIMED_OUT,
    Outcome,
    network_access,
    run_program,
)
from medusa_train.evaluation.questions import FunctionTest, Question

TEST = FunctionTest("def f():\n", "f", "def check(candidate):\n    assert candidate() == 1\n")
CODE = Question(1, "humaneval", ("?",), "f:1", expected=TEST)
REFUSAL = None if (probe := run_program("")).status == PASSED else probe
isolated = pytest.mark.skipif(
    REFUSAL is not None, reason=f"not permitted on this machine: {REFUSAL}"
)


def namespaces_are_permitted() -> bool:
    """Ask util-linux, so that a fault of ours does not look like a refusal of the system's."""
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if sys.platform != "linux" or version < (5, 12) or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--map-root-user", "--net", "--mount", "--ipc", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces_are_permitted(), reason="not permitted on this machine")
def test_where_namespaces_are_permitted_programs_run() -> None:
    assert REFUSAL is None


@isolated
@pytest.mark.parametrize(
    ("answer", "correct", "detail"),
    [
        ("```python\ndef f():\n    return 1\n```", True, "passed"),
        ("```python\ndef f():\n    return 2\n```", False, "failed: AssertionError"),
        (
            "```python\ndef f():\n    return one\n```",
            False,
            "failed: NameError: name 'one' is not defined",
        ),
        (
            "```python\ndef f(:\n```",
            False,
            "failed: SyntaxError: invalid syntax (<program>, line 1)",
        ),
    ],
)
def test_code_is_scored_by_running_it(answer: str, correct: bool, detail: str) -> None:
    score = score_text(TEST, answer)
    assert (score.metric, score.correct, score.detail) == ("pass@1", correct, detail)


@isolated
@pytest.mark.parametrize(
    "program", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise KeyboardInterrupt"]
)
def test_a_program_that_ends_before_its_test_does_not_pass(program: str) -> None:
    assert run_program(program).status == FAILED


@isolated
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        (
            "import signal, time\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n"
            "  except OSError: pass\ntime.sleep(60)"
        ),
    ],
)
def test_an_endless_program_is_stopped(program: str) -> None:
    assert run_program(program, seconds=0.5) == Outcome(TIMED_OUT, "after 0.5 seconds")


@isolated
def test_memory_is_limited() -> None:
    assert run_program("x = bytearray(1 << 30)", megabytes=256) == Outcome(FAILED, "MemoryError")
    assert run_program("x = bytearray(1 << 20)", megabytes=256).passed


@isolated
@pytest.mark.parametrize("address", ["192.0.2.1", "127.0.0.1"])
def test_no_connection_can_be_made(address: str) -> None:
    outcome = run_program(
        f"import socket; socket.create_connection(({address!r}, 80), 5)", seconds=8
    )
    assert outcome.status == FAILED
    assert "OSError" in outcome.detail
    assert "unreachable" in outcome.detail


@isolated
@pytest.mark.skipif(
    network_access() is None, reason="isolated by the container, whose files it may write"
)
def test_files_can_be_written_in_the_working_directory_only(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.unlink({str(tmp_path / 'kept')!r})",
    ):
        outcome = run_program(program)
        assert outcome.status == FAILED
        assert "Read-only file system" in outcome.detail
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    inside = "import os\nopen('x', 'w').write('a')\nassert os.listdir() == ['x']\nos.remove('x')"
    assert run_program(inside) == Outcome(PASSED, "")
    outcome = run_program("open('x', 'wb').write(bytes(20 << 20))")
    assert outcome.detail.startswith("OSError: [Errno 27]")


@isolated
def test_a_program_sees_no_environment_no_input_and_no_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run_program(
        "import os, sys; assert 'HF_TOKEN' not in os.environ; assert sys.stdin.read() == ''"
    ).passed
    assert run_program("import medusa_train").detail.startswith("ModuleNotFoundError")


@isolated
@pytest.mark.skipif(
    network_access() is None, reason="a container's processes are not isolated from each other"
)
def test_processes_of_a_program_end_with_it(tmp_path: Path) -> None:
    marker = f"medusa-orphan-{os.getpid()}"
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    os.execv({sys.executable!r}, [{sys.executable!r}, "-c", "import time; time.sleep(60)", {marker!r}])
time.sleep(0.2)
"""
    outcome = run_program(program)
    if os.getuid() == 0:  # Linux limits the processes of other users only
        assert outcome.passed
    else:
        assert outcome.detail.startswith("BlockingIOError")
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(marker.encode() in line for line in lines)


@isolated
def test_a_signal_to_its_process_group_reaches_the_program_alone() -> None:
    assert run_program("import os; os.kill(0, 9)").status in (PASSED, TIMED_OUT)


def test_without_namespaces_a_program_runs_only_where_there_is_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = code_sandbox.CHILD.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("NEW_NAMESPACES = "))
    child = tmp_path / "child.py"
    # not a flag that unshare accepts
    child.write_text(text.replace(line, "NEW_NAMESPACES = 1"), encoding="utf-8")
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    if network_access() is None:
        assert run_program("").passed
        return
    outcome = run_program(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    assert (outcome.status, (tmp_path / "ran").exists()) == (REFUSED, False)
    assert "(unshare): Invalid argument" in outcome.detail
    with pytest.raises(ConfigError) as caught:
        require_code_execution(True, [CODE])
    assert str(caught.value).startswith("allow_code_execution: ")
    assert "user, mount, network, process and IPC namespaces" in str(caught.value)
    assert "docker run --network none" in str(caught.value)


def test_on_other_systems_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run_program("").status == REFUSED
    with pytest.raises(ConfigError, match="on Linux only, not on darwin"):
        require_code_execution(True, [CODE])


def test_code_needs_permission_and_numbers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="allow_code_execution=true"):
        require_code_execution(False, [CODE])
    monkeypatch.setattr(
        answer_scores, "run_program", lambda program: pytest.fail("nothing has to be run")
    )
    require_code_execution(False, [Question(2, "gsm8k", ("?",), "f:2", expected=Decimal(4))])


def test_a_process_that_dies_without_a_report_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit('broken')", encoding="utf-8")
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    assert run_program("") == Outcome(FAILED, "its process did not report: broken")
