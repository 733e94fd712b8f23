import errno
import io
import os
import subprocess
import sys

import pytest

from medusa_train import console_streams as module
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.console_streams import ConsoleStream, console_streams, failed_streams, printed_all


class Failing(io.StringIO):
    """Raises `error` for every write while it is set."""

    error: int | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return super().write(text)


def test_a_full_disk_is_tried_again_and_the_first_failure_is_remembered() -> None:
    target = Failing()
    stream = ConsoleStream(target, "stderr")
    print("before", file=stream)
    target.error = errno.ENOSPC
    print("lost", file=stream)
    target.error = None
    print("after", file=stream)
    assert target.getvalue() == "before\nafter\n"
    assert stream.describe_failure() == "stderr: No space left on device"


@pytest.mark.parametrize("number", [errno.EIO, errno.EPIPE, errno.EBADF])
def test_what_is_gone_stays_gone(number: int) -> None:
    target = Failing()
    stream = ConsoleStream(target, "stdout")
    target.error = number
    print("lost", file=stream)
    target.error = None
    print("also", file=stream)
    stream.flush()
    assert target.getvalue() == ""
    assert stream.describe_failure() == f"stdout: {os.strerror(number)}"


def test_other_errors_are_raised() -> None:
    target = io.StringIO()
    target.close()
    with pytest.raises(ValueError, match="closed file"):
        print("x", file=ConsoleStream(target, "stdout"))


def test_the_streams_are_those_of_before_again(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Failing()
    monkeypatch.setattr(sys, "stdout", target)
    assert failed_streams() == []
    with console_streams():
        print("seen")
        assert printed_all() == 0
        target.error = errno.ENOSPC
        print("lost")
        assert failed_streams() == ["stdout: No space left on device"]
        assert printed_all() == 1
        target.error = None
    assert sys.stdout is target
    assert target.getvalue() == "seen\n"


def test_a_bar_that_stands_before_the_stream_hides_no_failure() -> None:
    from rich.console import Console
    from rich.file_proxy import FileProxy

    stream = ConsoleStream(Failing(), "stdout")
    assert module._console_stream(FileProxy(Console(file=io.StringIO()), stream)) is stream  # type: ignore[arg-type]


def program(words: str, **options: object) -> subprocess.CompletedProcess[str]:
    code = f"from medusa_train.cli.train import app\napp({words.split()!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PYTHONPATH": str(PROJECT_ROOT)},
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_text_that_cannot_be_printed_is_a_failure_of_a_command_that_only_prints() -> None:
    with open("/dev/full", "w") as full:
        done = program("configs/tiny_m1.yaml --print-config", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == (
        "stdout: No space left on device; what was printed there is incomplete\n"
    )


@pytest.mark.parametrize("words", ["--help", "--version"])
def test_a_help_text_that_cannot_be_printed_ends_with_one_line(words: str) -> None:
    with open("/dev/full", "w") as full:
        done = program(words, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, "error: stdout: No space left on device\n")


def test_descriptors_that_were_closed_are_opened_on_nothing() -> None:
    """A checkpoint would get their number, and libraries would print into it."""
    code = (
        "import os\nfrom medusa_train.console_streams import console_streams\n"
        "with console_streams():\n    print('x')\n    assert os.open('.', os.O_RDONLY) > 2\n"
        "    assert os.readlink('/proc/self/fd/1') == os.devnull"
    )
    command = f'exec {sys.executable} -c "{code}" >&- 2>&- <&-'
    assert subprocess.run(command, shell=True, cwd=PROJECT_ROOT, check=False).returncode == 0
