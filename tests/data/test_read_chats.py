import gzip
import json
from pathlib import Path

import pytest

from medusa_train.errors import DataError
from tests.chat_files import read_conversations

GOOD = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_jsonl_names_every_bad_line(tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    lines = [good, "{broken", "", '{"text": 1}', good]  # blank lines are skipped
    path = write(tmp_path / "d.jsonl", "\n".join(lines) + "\n\n")
    with pytest.raises(DataError) as caught:
        read_conversations(path)
    message = str(caught.value)
    assert f"{path}: 2 invalid records" in message
    assert f"{path}:2: not valid JSON" in message
    assert f"{path}:4: unknown record format" in message
    assert "skip_bad_records: true" in message

    with pytest.raises(DataError, match=r"many.jsonl:5: .*\n.*and 4 more"):
        read_conversations(write(tmp_path / "many.jsonl", "x\n" * 9))

    result = read_conversations(path, skip_bad=True)
    assert [c.source for c in result.conversations] == [f"{path}:1", f"{path}:5"]
    assert [s.split(": ")[0] for s in result.report.skipped] == [f"{path}:{n}" for n in (2, 4)]


def test_records_of_a_json_array_are_numbered(tmp_path: Path) -> None:
    records = [GOOD, {"conversations": []}, GOOD]
    path = write(tmp_path / "d.json", json.dumps(records, indent=2))
    with pytest.raises(DataError, match=r"d\.json:record 2: 'conversations' is an empty"):
        read_conversations(path)
    result = read_conversations(path, skip_bad=True)
    assert len(result.conversations) == 2
    assert result.conversations[0].source == f"{path}:record 1"
    assert len(result.report.skipped) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[\n{"a": 1},\n{"b" 2}]', r"not valid JSON: .* \(line 3\)"),
        ('[\n{"a": 1}\n{"b": 2}]', r"not valid JSON: Expecting ',' delimiter \(line 3\)"),
        ('[\n{"a": 1}', "not valid JSON"),
        ('[{"a": 1},\n', "not valid JSON"),
        ("[\n]\nx", r"not valid JSON: Extra data \(line 3\)"),
        ("[\n", "not valid JSON"),
        ('[{"a": 1},\n' + "[" * 100_000, "not valid JSON: nested too deeply"),
        ('[{"a": 1},\n' + "9" * 5000 + "]", "not valid JSON: a number has thousands of digits"),
    ],
)
def test_a_broken_array_is_refused_even_when_skipping(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        read_conversations(write(tmp_path / "d.json", text), skip_bad=True)


def test_a_list_on_the_first_line_is_a_bad_record_and_no_array(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", f'["q", "a"]\n{json.dumps(GOOD)}\n')
    with pytest.raises(
        DataError,
        match=r"1 invalid record\n  .*d\.jsonl:1: a record must be a JSON object, .* a list",
    ):
        read_conversations(path)
    assert [c.source for c in read_conversations(path, skip_bad=True).conversations] == [
        f"{path}:2"
    ]
    assert (
        len(
            read_conversations(
                write(tmp_path / "d.json", f" [{json.dumps(GOOD)}] \n\n")
            ).conversations
        )
        == 1
    )


@pytest.mark.parametrize("skip_bad", [True, False])
def test_one_object_over_several_lines_is_named_as_such(tmp_path: Path, skip_bad: bool) -> None:
    path = write(tmp_path / "d.jsonl", json.dumps(GOOD, indent=2) + "\n")
    with pytest.raises(DataError) as caught:
        read_conversations(path, skip_bad=skip_bad)
    assert str(caught.value) == (
        f"{path}: the file is one JSON object over several lines; "
        "one object per line, or an array of objects, is expected"
    )
    path = write(tmp_path / "commas.jsonl", f"{json.dumps(GOOD)},\n{json.dumps(GOOD)}\n")
    with pytest.raises(
        DataError, match=r"1 invalid record\n  .*commas\.jsonl:1: not valid JSON: Extra data"
    ):
        read_conversations(path)


@pytest.mark.parametrize("text", ["", "\n\n", "[]"])
def test_a_file_without_records_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl: no conversation to read: no records"):
        read_conversations(write(tmp_path / "d.jsonl", text))
    with pytest.raises(
        DataError, match=r"all 2 records are invalid; the first: .*d.jsonl:1: not valid JSON"
    ):
        read_conversations(write(tmp_path / "d.jsonl", "x\ny"), skip_bad=True)


def test_what_cannot_be_read_is_located(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        read_conversations(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        read_conversations(tmp_path)
    good = json.dumps(GOOD).encode()
    with pytest.raises(DataError, match=r"d\.jsonl:2: not UTF-8"):
        read_conversations(write(tmp_path / "d.jsonl", good + b"\n\xff\n"))
    with pytest.raises(DataError, match=r"d\.json: not UTF-8 text \(byte 3\)"):
        read_conversations(write(tmp_path / "d.json", b"[\n\xff]"))
    content = bytearray(gzip.compress(b'{"a": 1}\n' * 50))
    content[12] ^= 0xFF
    with pytest.raises(DataError, match=r"d\.jsonl\.gz: cannot be read"):
        read_conversations(write(tmp_path / "d.jsonl.gz", bytes(content)))


def test_byte_order_mark_line_ends_and_line_separators(tmp_path: Path) -> None:
    line = json.dumps(
        {"conversations": [{"from": "human", "value": "a\u2028b"}]}, ensure_ascii=False
    ).encode()
    path = write(tmp_path / "d.jsonl", b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n")
    assert [c.messages[0].content for c in read_conversations(path).conversations] == [
        "a\u2028b"
    ] * 2
