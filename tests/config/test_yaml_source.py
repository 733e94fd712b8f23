from pathlib import Path

import pytest

from medusa_train.config.yaml_source import format_path, read_yaml, read_yaml_file
from medusa_train.errors import ConfigError

TEXT = """\
# a comment
base_model: data/tiny

datasets:
  - path: a.jsonl
    type: messages
  - path: b.jsonl
learning_rate: 1e-3
"""


def test_every_key_has_a_line() -> None:
    source = read_yaml(TEXT, "x.yaml")
    assert source.values["datasets"] == [
        {"path": "a.jsonl", "type": "messages"},
        {"path": "b.jsonl"},
    ]
    assert str(source.place(("base_model",))) == "x.yaml:2"
    assert str(source.place(("datasets", 0, "type"))) == "x.yaml:6"
    assert str(source.place(("datasets", 1, "path"))) == "x.yaml:7"
    assert str(source.place(("learning_rate",))) == "x.yaml:8"
    assert str(source.place(("datasets", 1, "type"))) == "x.yaml:7"  # of its parent
    assert str(source.place(("seed",))) == "x.yaml"


def test_duplicates_name_both_lines_at_every_depth() -> None:
    source = read_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n", "x.yaml")
    assert {format_path(problem.path): problem.message for problem in source.problems} == {
        "a": "is set twice, on lines 1 and 3; keep one",
        "b.c": "is set twice; keep one",
    }


def test_names_that_look_like_numbers_are_not_rewritten() -> None:
    values = read_yaml(
        "a: 2024_05_01\nb: 12:30\nc: 0x1F\nd: 0123\ne: -5\nf: 1e-3\ng: 0", "x.yaml"
    ).values
    assert [*values.values()] == ["2024_05_01", "12:30", "0x1F", "0123", -5, "1e-3", 0]


def test_merged_keys_are_overridden_without_a_problem() -> None:
    source = read_yaml("base: &b {x: 1, y: 1}\nmine:\n  <<: *b\n  y: 2\n", "x.yaml")
    assert source.values["mine"] == {"x": 1, "y": 2}
    assert source.problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.yaml: is empty"),
        ("# only a comment\n", "x.yaml: is empty"),
        ("\njust words\n", "x.yaml:2: expected `key: value` lines, found plain text"),
        ("- a\n- b\n", "x.yaml:1: expected `key: value` lines, found a list"),
        ("a: 1\nb: [1, 2\n", "x.yaml:3: not valid YAML"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: not valid YAML"),
        ("a: 1\n--- \nb: 2\n", "x.yaml:2: not valid YAML"),
        ("a: !!python/name:os.system\n", "x.yaml:1: not valid YAML"),
        ("a: *unknown\n", "x.yaml:1: not valid YAML"),
        (
            "a: &a\n  b: *a\n",
            "x.yaml: not valid YAML: nested too deeply, or an alias contains itself",
        ),
        ("? [1, 2]\n: 3\n", "x.yaml:1: keys must be plain names"),
        ("a: !!bool maybe\n", "x.yaml:1: not valid YAML: cannot be read as a value"),
        ("a: 1\nb: \x00\n", "x.yaml:2: not valid YAML: the character #x0000: special characters"),
        ("a: " + "[" * 2000, "x.yaml: not valid YAML: nested too deeply"),
    ],
)
def test_invalid_files_are_reported(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "x.yaml")
    assert str(caught.value).startswith(message)


def test_dates_stay_text() -> None:
    assert read_yaml("a: 2024-13-45\nb: 2024-01-02\n", "x.yaml").values == {
        "a": "2024-13-45",
        "b": "2024-01-02",
    }


def test_a_binary_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"x\.yaml: is not a text file in UTF-8"):
        read_yaml_file(path, "x.yaml")
