"""Programs are really run here, in isolated processes; where that is not permitted, the refusal is
checked.
"""

import os
import platform
import shutil
import subprocess
import sys
from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest

from medusa_train.errors import ConfigError
from medusa_train.evaluation import answer_scores, code_sandbox
from medusa_train.evaluation.answer_scores import require_code_execution, score_text
from medusa_train.evaluation.code_sandbox import Outcome, Sandbox, _run_in, run_program
from medusa_train.evaluation.code_sandbox_script import (
    FAILED,
    PASSED,
    REFUSED,
    TIMED_OUT,
    Job,
    network_access,
)
from medusa_train.evaluation.questions import FunctionTest, Question

TEST = FunctionTest("def f():\n", "f", "def check(candidate):\n    assert candidate() == 1\n")
CODE = Question(1, "humaneval", ("?",), "f:1", expected=TEST)


def obstacle(sandbox: Sandbox) -> str | None:
    """Why a sandbox cannot be used on this machine; None if it can."""
    tried = _run_in(sandbox, "", 10.0, 256)
    return None if tried.passed else tried.detail


@cache
def sandboxes() -> dict[str, Sandbox | str]:
    """Both sandboxes by name, or why one cannot be tried on this machine."""
    tool = shutil.which("bwrap")
    bubblewrap = Sandbox(tool)
    own = Sandbox(None)
    missing = "bubblewrap is not installed"
    return {
        "bubblewrap": (missing if tool is None else obstacle(bubblewrap)) or bubblewrap,
        "namespaces": obstacle(own) or own,
    }


@pytest.fixture(params=["bubblewrap", "namespaces"])
def sandbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Programs run in this one; as root, too, where the second one is refused else."""
    chosen = sandboxes()[request.param]
    if isinstance(chosen, str):
        pytest.skip(f"not permitted on this machine: {chosen}")
    monkeypatch.setattr(code_sandbox, "find_sandbox", lambda: chosen)
    return chosen


isolated = pytest.mark.usefixtures("sandbox")


def namespaces_are_permitted() -> bool:
    """Ask util-linux, so that a fault of ours does not look like a refusal of the system's."""
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    if sys.platform != "linux" or version < (5, 12) or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--map-root-user", "--net", "--mount", "--ipc", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not namespaces_are_permitted(), reason="not permitted on this machine")
def test_where_namespaces_are_permitted_programs_run() -> None:
    assert isinstance(sandboxes()["namespaces"], Sandbox)
    if shutil.which("bwrap") is not None:
        assert isinstance(sandboxes()["bubblewrap"], Sandbox)


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
for number in range(3, 64):
    for text in (b'["passed", "", ""]', b"passed"):
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


def test_a_report_without_the_secret_is_no_pass() -> None:
    job = Job("", 1.0, 256, "s3cret", True)
    report = code_sandbox._outcome(job, b'["passed", "", "guess"]', b"", 0)
    assert report == Outcome(FAILED, "the program forged its report")
    assert code_sandbox._outcome(job, b'["passed", "", "s3cret"]', b"", 0).passed


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
    # of two sandboxes, one has a loopback interface of its own, on which nothing listens
    assert "unreachable" in outcome.detail or "refused" in outcome.detail


@isolated
@pytest.mark.skipif(
    network_access() is None, reason="isolated by the container, whose files it may write"
)
def test_files_can_be_written_in_the_working_directory_only(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    for program in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os; os.unlink({str(tmp_path / 'kept')!r})",
        "import os; os.mkdir('/new')",
        "open('/usr/new', 'w')",
    ):
        outcome = run_program(program)
        assert outcome.status == FAILED
        # in bubblewrap there are no other directories
        assert "Read-only file system" in outcome.detail or "No such file" in outcome.detail
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
def test_no_further_process_can_be_started(sandbox: Sandbox) -> None:
    outcome = run_program("import os; os.fork()")
    if os.getuid() == 0 and sandbox.bubblewrap is None:  # Linux limits other users only
        assert outcome.passed
    else:
        assert outcome.detail.startswith("BlockingIOError")


@isolated
def test_no_device_can_be_made_or_opened(sandbox: Sandbox) -> None:
    made = run_program("import os; os.mknod('disk', 0o60666, os.makedev(7, 0))")
    assert made.status == FAILED
    if sandbox.bubblewrap is not None:
        listed = "import os; assert sorted(os.listdir('/dev')) == ['null', 'urandom']"
        assert run_program(listed) == Outcome(PASSED, "")
        nobody = "import os; assert os.getuid() == os.geteuid() == 65534, os.getuid()"
        assert run_program(nobody) == Outcome(PASSED, "")


@isolated
def test_in_bubblewrap_no_file_of_a_user_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    outcome = run_program(f"open({str(tmp_path / 'secret')!r})")
    assert outcome.passed == (sandbox.bubblewrap is None)


@isolated
def test_a_signal_to_its_process_group_reaches_the_program_alone() -> None:
    assert run_program("import os; os.kill(0, 9)").status in (PASSED, FAILED)


def test_without_namespaces_a_program_runs_only_where_there_is_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = code_sandbox.CHILD.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("NEW_NAMESPACES = "))
    child = tmp_path / "child.py"
    # not a flag that unshare accepts
    child.write_text(text.replace(line, "NEW_NAMESPACES = 1"), encoding="utf-8")
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    choose(monkeypatch, tool=None, user=1000)
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
    assert "apt-get install bubblewrap" in str(caught.value)
    assert "--network none" in str(caught.value)


def choose(monkeypatch: pytest.MonkeyPatch, *, tool: Path | None, user: int) -> None:
    """Let a sandbox be chosen for this user, with this program in place of bubblewrap."""
    find = code_sandbox.find_sandbox.__wrapped__
    monkeypatch.setattr(code_sandbox, "find_sandbox", find)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    real = shutil.which

    def which(name: str) -> str | None:
        if name == "bwrap":
            return None if tool is None else str(tool)
        return real(name)

    monkeypatch.setattr(shutil, "which", which)


def test_root_runs_nothing_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tool=None, user=0)
    assert run_program("").status == REFUSED
    with pytest.raises(ConfigError) as caught:
        require_code_execution(True, [CODE])
    assert "bubblewrap is not installed, and without it no code is run as root" in str(caught.value)
    assert "apt-get install bubblewrap" in str(caught.value)


def test_a_bubblewrap_that_does_not_work_is_named_and_one_that_isolates_nothing_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bwrap"
    tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1")
    tool.chmod(0o755)
    choose(monkeypatch, tool=tool, user=0)
    refusal = run_program("").detail
    assert f"bubblewrap ({tool}) does not work here: " in refusal
    assert "No permissions to create new namespace" in refusal
    if network_access() is None:
        return
    # runs what follows its options, with the network of this machine
    tool.write_text(
        f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec $1 {code_sandbox.CHILD}'
    )
    outcome = run_program(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert outcome.status == REFUSED
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_what_bubblewrap_is_asked_for(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    command = " ".join(code_sandbox._command(Sandbox("/usr/bin/bwrap")))
    for option in ("--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent"):
        assert option in command
    assert ("--unshare-user --uid 65534" in command) == (user != 0)
    assert ("--cap-drop ALL" in command) == (user == 0)
    assert "--remount-ro / " in command
    assert not any(option in command for option in (" --bind ", "--dev /", "--share-net", "/home"))


def test_memory_is_limited_for_all_processes_together() -> None:
    """Where a control group can be had."""
    grow = "import os, time; os.fork(); x = bytearray(96 << 20); time.sleep(1); print('grown')"
    with code_sandbox._memory_limit(128) as limit:
        if not limit:
            pytest.skip("no control group can be had on this machine")
        command = [*limit, sys.executable, "-c", grow]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.count("grown") < 2
    groups = code_sandbox._own_memory_group()
    assert groups is None or not list(groups.glob(f"medusa-code-{os.getpid()}-*"))


def test_systemd_limits_memory_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "systemd-run"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(code_sandbox, "_systemd_run", code_sandbox._systemd_run.__wrapped__)
    with code_sandbox._memory_limit(128) as limit:
        assert limit[0] == str(tool)
        assert {"--scope", "MemoryMax=128M", "MemorySwapMax=0"} < set(limit)
    tool.write_text("#!/bin/sh\nexit 1\n")
    with code_sandbox._memory_limit(128) as limit:
        assert str(tool) not in limit


def test_on_other_systems_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sandbox, "find_sandbox", code_sandbox.find_sandbox.__wrapped__)
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
    outcome = _run_in(Sandbox(None), "", 10.0, 256)
    assert outcome == Outcome(FAILED, "its process did not report: broken")
