"""The server engine against a real server: `transformers serve` on a small random model, on
loopback.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from medusa_train.cli.selfdistill import app
from tests.evaluation.tiny_model import write_target_model

MISSING = [
    name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"transformers serve needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server_url(home: Path) -> Iterator[str]:
    write_target_model(home / "backbone")
    settings = json.loads((home / "backbone" / "generation_config.json").read_text())
    # the server would apply it, and answer otherwise than greedy decoding
    settings.pop("repetition_penalty", None)
    (home / "backbone" / "generation_config.json").write_text(json.dumps(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "transformers.cli.transformers",
        "serve",
        "backbone",
        "--host",
        "127.0.0.1",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server, home / "server.log")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.kill()
            server.wait(timeout=30)


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")


def records(path: Path) -> dict[str, dict]:
    return {
        record["id"]: record
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    }


def test_its_greedy_answers_are_those_of_the_local_engine(
    home: Path, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    seeds = [
        {"id": f"s{n}", "turns": [f"question {n}", "and more?"][: n % 2 + 1]} for n in range(6)
    ]
    (home / "seeds.jsonl").write_text(
        "".join(json.dumps(seed) + "\n" for seed in seeds), encoding="utf-8"
    )
    common = ["--seed", "seeds.jsonl", "--model", "backbone", "temperature=0", "max_new_tokens=16"]
    common += ["drop_truncated=false"]
    served = CliRunner().invoke(
        app,
        [
            *common,
            "--server-url",
            server_url,
            "--output",
            "served.jsonl",
            "concurrency=3",
            "retry_seconds=60",
        ],
    )
    assert served.exit_code == 0, served.output + (home / "server.log").read_text()[-3000:]
    local = CliRunner().invoke(app, [*common, "dtype=float32", "--output", "local.jsonl"])
    assert local.exit_code == 0, local.output
    ours, theirs = records(home / "local.jsonl"), records(home / "served.jsonl")
    assert ours.keys() == theirs.keys() == {seed["id"] for seed in seeds}
    for name, record in theirs.items():
        # The server takes special tokens out of the text as we do; a random model writes some.
        messages = [
            {key: value for key, value in m.items() if key != "token_ids"}
            for m in ours[name]["messages"]
        ]
        assert record["messages"] == messages, name
        assert record["finish_reasons"] == ours[name]["finish_reasons"]
        assert record["token_counts"]["completion"] == ours[name]["token_counts"]["completion"]
    settings = json.loads((home / "served.settings.json").read_text())
    assert settings["engine"] == "openai"
    assert server_url not in json.dumps(settings)
