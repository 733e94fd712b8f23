import gzip
import json
from pathlib import Path

import pytest

from medusa_train.data.record_files import read_file
from medusa_train.errors import DataError
from medusa_train.selfdistill.prompts import read_prompts

TURNS = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl"])
def test_gzip(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, gzip.compress(b'{"a": 1}\n\n{"a": 2}\n'))
    records = list(read_file(path))
    assert [(record.source, record.value) for record in records] == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:3", {"a": 2}),
    ]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_refused_as_a_whole(encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", ('\ufeff{"a": 1}\n' * 2).encode(encoding))
    with pytest.raises(
        DataError, match=rf"d\.jsonl: {encoding[:6].upper()} text; convert it: iconv"
    ):
        list(read_file(path))


@pytest.mark.parametrize("kind", ["lines", "array"])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, kind: str) -> None:
    """JSON readers keep the last one."""
    turns = json.dumps(TURNS)
    record = f'{{"messages": {turns}, "messages": {turns}}}'
    nested = f'{{"messages": {turns[:-2]}, "content": "B"}}]}}'
    path = tmp_path / "chats.json"
    lines = [record, nested]
    path.write_text(f"[{record}]" if kind == "array" else "\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"the key '(messages|content)' occurs twice in an object"):
        read_prompts(path)
