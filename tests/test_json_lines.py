import json
import sys
from pathlib import Path

import pytest

from medusa_train.errors import DataError
from medusa_train.json_lines import JsonLinesFile, complete_lines
from tests.full_disk import full_disk


def test_records_are_appended_and_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    with JsonLinesFile(path) as file:
        file.append({"id": 1, "text": "h\u00e9\u2028"})
        file.append({"id": 2, "text": "x" * 100_000})
        file.append({"id": 3, "text": "\ud800"})
    path.write_bytes(path.read_bytes()[:-1])
    assert [json.loads(line)["id"] for line in complete_lines(path)] == [1, 2]
    with JsonLinesFile(path, fsync_every=1) as file:
        file.append({"id": 4})
    lines = list(complete_lines(path))
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 4]
    assert "h\u00e9\u2028".encode() in lines[0]


@pytest.mark.parametrize("content", [b"", b"torn", b"torn" * 40_000])
def test_a_file_without_a_complete_line_is_emptied(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    JsonLinesFile(path).close()
    assert path.read_bytes() == b""


def test_records_are_pending_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = JsonLinesFile(path)
    with full_disk(7):
        for number in range(2):
            with pytest.raises(OSError, match="File too large"):
                file.append({"number": number})
    assert file.pending_lines == 2
    file.append({"number": 2})
    assert file.pending_lines == 0
    file.close()
    assert [json.loads(line)["number"] for line in complete_lines(path)] == [0, 1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
def test_an_exclusive_file_refuses_a_second_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with (
        JsonLinesFile(path, exclusive=True),
        pytest.raises(DataError, match="another process is writing"),
    ):
        JsonLinesFile(path, exclusive=True)
    JsonLinesFile(path, exclusive=True).close()
