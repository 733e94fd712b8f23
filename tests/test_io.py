import errno
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from medusa_train.io import (
    installed_version,
    replace_file,
    replace_text,
    write_failure,
)
from tests.full_disk import full_disk


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_reported_with_the_bytes_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> object:
        asked.append(path)
        return type("Usage", (), {"free": 1536})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    directory = tmp_path / "run" / "checkpoints"
    text = write_failure("step 2", directory, error, 3 * 2**20)
    reason = text.removeprefix(f"could not write step 2 to {directory}: ")
    assert reason.startswith(("No space", "File too large", "Error while serializing"))
    assert reason.endswith("(3.0 MiB needed, 1.5 KiB free)")
    assert asked == [tmp_path]  # the nearest directory that exists
    assert write_failure("step 2", tmp_path, error).endswith("(1.5 KiB free)")


def test_another_failure_does_not_mention_bytes(tmp_path: Path) -> None:
    text = write_failure("a", tmp_path, PermissionError(errno.EACCES, "Permission denied"), 10)
    assert text == f"could not write a to {tmp_path}: Permission denied"


def test_a_text_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_the_file_that_a_full_disk_cannot_take_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with full_disk(after=10), pytest.raises(OSError, match="too large") as caught:
        replace_text(path, "x" * 100)
    assert caught.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_with_a_message_of_its_own_keeps_it(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        raise OSError("the archive is damaged")

    with pytest.raises(OSError, match="the archive is damaged"):
        replace_file(tmp_path / "weights", write)


def test_ctrl_c_leaves_no_temporary_file(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "weights", write)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert installed_version("a-package-of-nobody") == "not installed"
