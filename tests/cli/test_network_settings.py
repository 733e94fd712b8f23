"""Settings of the network that cannot be used: one error that names the variable, in every command
that needs a network, and none in the others.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from medusa_train.cli import evaluate, selfdistill, train
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.hub import hub_is_unreachable
from tests.fake_server import serving

URL = "https://example.invalid/v1"
TINY = str(PROJECT_ROOT / "data" / "tiny")
TO_SERVERS = {
    "selfdistill": (selfdistill.app, "--prompts", "p.jsonl", "--model", "m", "--server-url", URL),
    "server_url": (evaluate.app, "--bench", "tiny", "--server-url", URL),
    "against": (evaluate.app, "--bench", "tiny", "--server-url", URL, "--against", f"{URL}2"),
    "judge": (
        evaluate.app,
        *("--bench", "tiny", "--base-model", TINY, "output_dir=judged"),
        *("--judge-base-url", URL, "--judge-model", "j"),
    ),
}
TO_THE_HUB = {
    "bench": (evaluate.app, "--bench", "mtbench", "--base-model", TINY),
    "bench at a URL": (evaluate.app, "--bench", "specbench", "--base-model", TINY),
    "base_model": (evaluate.app, "--bench", "tiny", "--base-model", "owner/x", "output_dir=e"),
    "draft": (evaluate.app, "--bench", "tiny", "--model", "owner/heads"),
    "prompts": (selfdistill.app, "--prompts", "owner/x", "--model", TINY),
    "named prompts": (selfdistill.app, "--prompts", "sharegpt", "--model", TINY),
    "training": (train.app, "base_model=owner/x", "datasets=[{path: chats.jsonl}]"),
}
BROKEN = [
    ("ALL_PROXY", "socks5://me:secretword@127.0.0.1:9"),
    ("all_proxy", "socks://127.0.0.1:9"),
    ("HTTPS_PROXY", "http://me:secretword@127.0.0.1:port"),
    ("SSL_CERT_FILE", "/nowhere/certs.pem"),
]


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with prompts and chats, and an environment in which the hub seems to be reachable."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "a", "turns": ["hi"]}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "socksio", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("ALL_PROXY", "all_proxy", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # resolves names itself
    hub_is_unreachable.cache_clear()
    yield tmp_path
    hub_is_unreachable.cache_clear()


@pytest.mark.parametrize(("variable", "value"), BROKEN, ids=[value for _, value in BROKEN])
@pytest.mark.parametrize("name", [*TO_SERVERS, *TO_THE_HUB])
def test_a_setting_that_cannot_be_used_is_one_error_that_names_it(
    online: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: str, value: str
) -> None:
    if variable.lower() == "all_proxy" and name in TO_SERVERS:
        monkeypatch.delenv("HTTPS_PROXY")  # it would come first
    monkeypatch.setenv(variable, value)
    app, *words = {**TO_SERVERS, **TO_THE_HUB}[name]
    assert isinstance(app, typer.Typer)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2, result.output
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: environment variable {variable}: ")
    assert "secretword" not in result.output + result.stderr


def test_what_needs_no_network_minds_no_setting(
    online: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:port")
    monkeypatch.setenv("NO_PROXY", "::1/128")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certs.pem")
    with serving() as server:
        words = ["--prompts", "p.jsonl", "--model", "m", "--server-url", server.url]
        result = CliRunner().invoke(selfdistill.app, [*words, "output=o.jsonl"])
    assert result.exit_code == 0, result.output
    words = ["--prompts", "p.jsonl", "--model", TINY, "output=l.jsonl", "max_new_tokens=4"]
    result = CliRunner().invoke(selfdistill.app, [*words, "drop_truncated=false"])
    assert result.exit_code == 0, result.output
