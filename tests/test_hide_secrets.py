"""What counts as a key, and that no half of one is left."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from medusa_train import hide_secrets
from medusa_train.cli.common import MaskingConsole
from medusa_train.errors import ConfigError, DataError
from medusa_train.io import mask_file, replace_text
from medusa_train.json_lines import json_line

KEY = "sk-1234-abcd-5678-efgh"


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    hide_secrets.forget_and_read_environment()
    yield
    hide_secrets.forget_and_read_environment()


@pytest.mark.parametrize(
    ("name", "value", "is_masked"),
    [
        ("OPENAI_API_KEY", KEY, True),
        ("HF_TOKEN", "hf_abcdefgh", True),
        ("AWS_SECRET_ACCESS_KEY", "ABCdef123+/", True),
        ("DB_PASSWORD", "correct-horse", True),
        ("EOS_TOKEN", "<|im_end|>", False),
        ("MAX_TOKEN", "ab-12345678", False),
        ("OPENAI_API_KEY", "EMPTY", False),
        ("OPENAI_API_KEY", "placeholder", False),
        ("OPENAI_API_KEY", "not-needed", False),
        ("OPENAI_API_KEY", "1234567890", False),
        ("HF_TOKEN", "/run/secrets/token-1", False),
        ("HOSTNAME", "some-machine-1", False),
    ],
)
def test_which_values_of_the_environment_are_keys(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_masked: bool
) -> None:
    monkeypatch.setenv(name, value)
    hide_secrets.forget_and_read_environment()
    assert hide_secrets.mask(f"a {value} b") == ("a *** b" if is_masked else f"a {value} b")


def test_passwords_in_addresses_and_keys_of_known_shape() -> None:
    text = "see https://me:pw@host/x?a=b, http://h/@b and hf_" + "x" * 34
    assert hide_secrets.mask(text) == "see https://***@host/x?a=b, http://h/@b and ***"
    # a file may hold addresses of other people
    assert hide_secrets.mask_keys(text) == text


def test_an_address_of_the_environment_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass/word-1@proxy:3128/?token=abc-12345")
    hide_secrets.forget_and_read_environment()
    assert hide_secrets.mask_keys("proxy, pass/word-1, abc-12345, me") == "proxy, ***, ***, me"


def test_a_text_is_masked_before_it_is_cut_or_wrapped() -> None:
    hide_secrets.remember(KEY)
    assert hide_secrets.excerpt(f"x\n {KEY} y", 5) == "x ***"
    table = Table("name", "value")
    table.add_row("a", Text(f"the key {KEY} is long", style="red"))
    table.add_row("b", f"the key {KEY} is long")
    stream = io.StringIO()
    console = MaskingConsole(width=24, file=stream, force_terminal=True)
    for text in (table, f"key {KEY} and more", Text(KEY), f"[1, '{KEY}']"):
        console.print(text)
    assert "***" in stream.getvalue()
    for part in ("1234", "abcd", "5678", "efgh"):
        assert part not in stream.getvalue()


def test_a_configuration_is_masked_and_keeps_its_form() -> None:
    hide_secrets.remember(KEY)
    config = {"a": [f"--x={KEY}", 3], "b": {"c": "http://me:pw@h", "d": None}, "e": True}
    assert hide_secrets.mask_values(config) == {
        "a": ["--x=***", 3],
        "b": {"c": "http://***@h", "d": None},
        "e": True,
    }


def test_files_and_errors_are_masked(tmp_path: Path) -> None:
    hide_secrets.remember('a"key<with>1')
    assert json_line({"text": 'say a"key<with>1 now'}) == b'{"text": "say *** now"}\n'
    replace_text(tmp_path / "a.html", "<p>a&quot;key&lt;with&gt;1</p>")
    assert (tmp_path / "a.html").read_text() == "<p>***</p>"
    assert str(DataError('bad a"key<with>1')) == "bad ***"
    error = ConfigError(['x: a"key<with>1', "y"])
    assert "key" not in str(error)
    log = tmp_path / "log"
    log.write_bytes(b'\xff a"key<with>1\n')
    mask_file(log)
    assert log.read_bytes() == b"\xff ***\n"
