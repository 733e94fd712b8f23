"""What is said when the disk takes no more, and files that are old or new, never in between."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError

from medusa_train.io import replace_text, write_failure


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EFBIG, "File too large"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_what_is_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> object:
        asked.append(path)
        return type("Usage", (), {"free": 1536})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    text = write_failure(error, tmp_path / "run" / "checkpoints", 3 * 2**20)
    assert text.endswith("(3.0 MiB are needed, 1.5 KiB are free there)")
    assert text.startswith(("No space", "File too large", "Error while serializing"))
    assert asked == [tmp_path]  # the nearest directory that is there
    assert write_failure(error, tmp_path).endswith("(1.5 KiB are free there)")


def test_another_failure_speaks_of_no_bytes(tmp_path: Path) -> None:
    assert write_failure(PermissionError(errno.EACCES, "Permission denied"), tmp_path, 10) == "Permission denied"


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
