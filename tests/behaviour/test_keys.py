"""No key is in anything that a command prints or writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.behaviour.world import (
    QUICK,
    Ran,
    command,
    evaluate,
    read_lines,
    selfdistill,
    train,
    training_keys,
    write_lines,
)
from tests.fake_server import completion, error, serving

#: With characters that JSON, HTML and addresses escape.
KEY = r"sk-Planted&1<server>\7%"
TOKEN = "hf_PlantedHubToken0123456789"
PASSWORD = "PlantedPassw0rd"
TRACES = ("Planted", "PlantedHub", "Passw0rd")


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def written(where: Path) -> Iterator[tuple[Path, str]]:
    for path in where.rglob("*"):
        if path.is_file() and "given" not in path.name:
            yield path, path.read_bytes().decode("utf-8", "replace")


def check(shown: Ran, where: Path) -> Ran:
    """Fail if a part of a key was printed or is in a file."""
    for trace in TRACES:
        assert trace not in shown.text.replace(" ", ""), shown.text
        for path, content in written(where):
            assert trace not in content, path
            assert trace not in path.name
    return shown


ECHOES: dict[str, Any] = {
    "refused": lambda body: error(400, f"no access with {KEY}"),
    "cut off": lambda body: error(401, "x" * 295 + KEY),
    "a page": lambda body: (500, {}, f"<p>{KEY}</p>".encode()),
    "no JSON": lambda body: (200, {}, KEY.encode()),
    "a reason": lambda body: (200, {}, json.dumps(completion(body, KEY)).encode()),
    "an answer": lambda body: (
        200,
        {},
        json.dumps(completion(body, text=f"your key is {KEY} 7")).encode(),
    ),
}


@pytest.mark.parametrize("name", ECHOES)
def test_servers_that_repeat_a_key(name: str, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "given.jsonl", [{"prompt": "one"}])
    with serving(lambda number, body: ECHOES[name](body)) as server:
        words = ["--prompts", given, "--model", "m", "--server-url", server.url]
        keys = {"retry_seconds": 0, "output": tmp_path / "o.jsonl"}
        shown = check(selfdistill(*words, **keys), tmp_path)
        assert set(server.authorization) == {f"Bearer {KEY}"}
    if name == "an answer":
        (record,) = read_lines(tmp_path / "o.jsonl")
        assert record["messages"][1]["content"] == "your key is *** 7"
    else:
        assert shown.code == 1
        assert "***" in shown.text or name == "no JSON"


def test_keys_in_configurations(tmp_path: Path) -> None:
    given = tmp_path / "given.yaml"
    for text in (
        f"base_model: m\ndatasets: [{{path: a}}]\napi_key: {json.dumps(KEY)}\n",
        f"base_model: m\ndatasets: [{{path: a, token: {TOKEN}}}]\n",
        f"base_model: http://me:{PASSWORD}@host/x\ndatasets: [{{path: a}}]\n",
    ):
        given.write_text(text)
        check(train(given), tmp_path).fails(2)
    check(train("base_model=m", "datasets=[{path: a}]", f"hf_token={TOKEN}"), tmp_path).fails(2)
    check(selfdistill(f"server_url=http://me:{PASSWORD}@host/v1", "base_model=m"), tmp_path).fails(
        2
    )
    check(selfdistill(f"server_url=http://h/v1?key={PASSWORD}", "base_model=m"), tmp_path).fails(2)
    check(evaluate("serve=true", f"serve_args=[--api-key, {PASSWORD}]"), tmp_path).fails(2)
    check(selfdistill(f"api_key_env={PASSWORD}-x", "base_model=m"), tmp_path).fails(2)
    shown = train(
        "base_model=m", "datasets=[{path: a}]", f"output_dir=runs/{TOKEN}", "--print-config"
    )
    assert "***" in check(shown, tmp_path).ok().out


def test_keys_in_runs_reports_and_exports(
    model: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a user's own data, names and command hold one."""
    records = read_lines(chats)
    records[0][f"column {TOKEN}"] = 1
    given = write_lines(tmp_path / "given.jsonl", records)
    keys = training_keys(model, given, tmp_path / "run", val_set_size=0.2, wandb_name=TOKEN)
    check(train(**keys), tmp_path).ok().says("***")
    questions = [{"question_id": 1, "category": TOKEN, "turns": [f"what is {KEY}?"]}]
    bench = write_lines(tmp_path / "given2.jsonl", questions)
    words = ["--bench", bench, "--model", tmp_path / "run"]
    check(evaluate(*words, **QUICK), tmp_path).ok()
    (answers,) = (tmp_path / "run" / "eval").glob("*/answers.jsonl")
    assert "***" in answers.read_text()
    check(command("export", tmp_path / "run", "--to", "vllm"), tmp_path).ok()


def test_short_values_and_plain_words_are_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "EMPTY")
    monkeypatch.setenv("OTHER_TOKEN", "medusa")
    shown = train("base_model=EMPTY", "datasets=[{path: medusa}]", "--print-config").ok()
    assert "EMPTY" in shown.out
    assert "medusa" in shown.out
