"""No key of a user is in anything that a command prints or writes, whoever repeats it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from medusa_train.cli import evaluate, export, selfdistill, train
from tests.evaluation.tiny_model import write_run, write_target_model
from tests.fake_server import FakeServer, Reply, completion, error, serving, stream
from tests.server_bench.servers import write_questions
from tests.server_bench.test_serve import Vllm

#: With characters that JSON, HTML and addresses escape.
SERVER_KEY = 'sk-Planted&1"<server>\\7%'
HUB_KEY = "hf_PlantedHubToken0123456789"
WANDB_KEY = "PlantedWandb0123456789"
PASSWORD = "PlantedPassw0rd"
WRITTEN = "PlantedInTheYaml0123"
KEYS = (SERVER_KEY, HUB_KEY, WANDB_KEY, PASSWORD, WRITTEN)
#: What is left of a key that was cut, escaped, wrapped or colored.
TRACE = re.compile("Planted|1234567")

PROMPTS = [{"id": f"s{n}", "turns": [f"what is {n} + {n}"]} for n in range(3)]
ASK = ["--seed", "prompts.jsonl", "--model", "m", "retry_seconds=0"]
TRAIN = [
    *(
        "base_model=backbone",
        "datasets=[{path: chats.jsonl}]",
        "output_dir=trained",
        "bf16=false",
    ),
    *("medusa_num_heads=1", "max_steps=1", "sequence_len=64", "calibration_tokens=60"),
]
EVAL = ["--bench", "few.jsonl", "dtype=float32", "max_new_tokens=4", "warmup=0", "exactness=false"]
EVAL += ["generate=false", "prompt_lookup=false"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target model, a run, prompts, chats and questions."""
    home = tmp_path_factory.mktemp("keys")
    write_run(home / "run", write_target_model(home / "backbone"))
    write_questions(home / "few.jsonl", 2)
    lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    (home / "prompts.jsonl").write_text(lines)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello you"}]
    (home / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (home / "plain.yaml").write_text(yaml.safe_dump({"base_model": "m"}))
    return home


@pytest.fixture
def at_work(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("OPENAI_API_KEY", SERVER_KEY)
    monkeypatch.setenv("HF_TOKEN", HUB_KEY)
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return workplace


def files(home: Path) -> Iterator[Path]:
    return (path for path in home.rglob("*") if path.is_file() and path.name != "planted.yaml")


def check(home: Path, *printed: str) -> None:
    """Fail if a trace of a key was printed, or is in a file or a file's name."""
    for text in printed:
        assert TRACE.search(re.sub(r"\x1b\[[\d;]*m|\s", "", text)) is None, text
    for path in files(home):
        assert TRACE.search(path.name) is None, path
        content = path.read_bytes().decode("utf-8", "replace")
        found = TRACE.search(content)
        assert found is None, f"{path}: {content[max(0, found.start() - 60) :][:200]}"


def run(home: Path, app: typer.Typer, *words: str) -> Result:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    check(home, result.output, result.stdout, result.stderr)
    return result


Echo = Callable[[dict[str, Any], str], Reply]

#: Ways of a server to repeat the key of a request in place of an answer.
ERRORS: dict[str, Echo] = {
    "refused": lambda body, key: error(400, f"no access with {key}"),
    "forbidden": lambda body, key: error(401, f"{'x' * 295}{key}"),
    "failed": lambda body, key: (500, {}, f"<p>{key}</p>".encode()),
    "a page": lambda body, key: (200, {}, key.encode()),
    "reason": lambda body, key: (200, {}, json.dumps(completion(body, key)).encode()),
    "an error in the stream": lambda body, key: event({"error": {"message": f"bad key {key}"}}),
    "no JSON in the stream": lambda body, key: event(f"{'x' * 70}{key}"),
    "no text in the stream": lambda body, key: event({"choices": [{"delta": key}]}),
}


def event(content: object) -> Reply:
    line = content if isinstance(content, str) else json.dumps(content)
    return 200, {"content_type": "text/event-stream"}, f"data: {line}\n\n".encode()


def repeating(server: FakeServer, echo: Echo) -> None:
    """Let a server reply by `echo`, with the key that it is sent."""

    def script(number: int, body: dict[str, Any]) -> Reply:
        key = str(server.authorization[number]).removeprefix("Bearer ")
        return echo(body, key)

    server.script = script
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    server.others["/v1/models"] = lambda body: (200, {}, models)


def answer(body: dict[str, Any], key: str) -> Reply:
    """An answer that holds the key."""
    text = f"your key is {key} 7"
    if body.get("stream"):
        return stream(body, text)
    return 200, {}, json.dumps(completion(body, "stop", text)).encode()


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_servers(at_work: Path, name: str) -> None:
    with serving() as server:
        repeating(server, ERRORS[name])
        asked = run(at_work, selfdistill.app, *ASK, "--server-url", server.url, "output=x.jsonl")
        measured = run(
            at_work,
            evaluate.app,
            *("--server-url", server.url, "concurrency=1", "--bench", "few.jsonl", "warmup=0"),
            *("retry_seconds=0", "output_dir=served-errors"),
        )
    assert len(server.authorization) > 1
    assert set(server.authorization) == {f"Bearer {SERVER_KEY}"}
    assert "***" in asked.output + measured.output
    assert (asked.exit_code, measured.exit_code) == (1, 1)


def test_answers_of_servers(at_work: Path) -> None:
    with serving() as server:
        repeating(server, answer)
        run(at_work, selfdistill.app, *ASK, "--server-url", server.url, "output=echo.jsonl")
        line = json.loads((at_work / "echo.jsonl").read_text().splitlines()[0])
        assert line["messages"][1]["content"] == "your key is *** 7"
        options = ["concurrency=1", "max_new_tokens=8", "--output-dir", "served"]
        options += ["--bench", "few.jsonl", "warmup=0"]
        run(at_work, evaluate.app, "--server-url", server.url, *options)
        judge = ["--judge-base-url", server.url, "--judge-model", "m", "--output-dir", "judged"]
        result = run(at_work, evaluate.app, "--model", "run", *EVAL, *judge)
    assert result.exit_code == 0, result.output
    (judgment,) = (at_work / "judged").rglob("*_single.jsonl")
    assert "your key is ***" in judgment.read_text()
    with serving() as server:
        repeating(server, ERRORS["refused"])
        refuse = server.script  # all but the first request, by which the judge is checked
        server.script = lambda number, body: refuse(number, body) if number else None
        judge = ["--judge-base-url", server.url, "--judge-model", "m", "--output-dir", "unjudged"]
        run(at_work, evaluate.app, "--model", "run", *EVAL, *judge)
    assert "no access with ***" in (at_work / "unjudged" / "report.json").read_text()
    with serving() as server:
        repeating(server, ERRORS["refused"])
        judge = ["--judge-base-url", server.url, "--judge-model", "m", "--output-dir", "refused"]
        refused = run(at_work, evaluate.app, "--model", "run", *EVAL, *judge)
    assert refused.exit_code == 1
    assert "no access with ***" in refused.output


def test_servers_that_are_started(at_work: Path, tmp_path: Path) -> None:
    vllm = Vllm(tmp_path, "refuse")
    # a server that prints its environment
    vllm.python.write_text(vllm.python.read_text().replace("exec ", "env\nexec "))
    code = "from medusa_train.cli.evaluate import app; app()"
    words = ["--serve", "--model", "run", "--bench", "few.jsonl", "warmup=0", "concurrency=1"]
    result = subprocess.run(
        [sys.executable, "-c", code, *words, "--output-dir", "started"],
        cwd=at_work,
        env=vllm.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    check(at_work, result.stdout, result.stderr)
    assert any("***" in path.read_text() for path in (at_work / "started").rglob("*.log"))


def test_training_and_exports(at_work: Path) -> None:
    planted = {"base_model": "backbone", "hub_token": WRITTEN, "wandb_project": "p"}
    (at_work / "planted.yaml").write_text(yaml.safe_dump(planted))
    for option in ("--print-config", "--inspect", "--doctor"):
        run(at_work, train.app, *TRAIN, option)
        run(at_work, train.app, "planted.yaml", *TRAIN, option)
    result = run(at_work, train.app, *TRAIN)
    assert result.exit_code == 0, result.output
    for target in ("vllm", "tgi"):
        assert run(at_work, export.app, "trained", "--to", target).exit_code == 0
    run(at_work, evaluate.app, "--model", "trained", "--calibrate", *EVAL, "calibration_tokens=100")


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (train.app, TRAIN),
        (selfdistill.app, ["--seed", "prompts.jsonl"]),
        (evaluate.app, ["--bench", "few.jsonl"]),
        (export.app, ["run"]),
    ],
)
def test_keys_in_a_configuration(at_work: Path, app: typer.Typer, words: list[str]) -> None:
    (at_work / "planted.yaml").write_text(
        f"api_key: {WRITTEN}\nservers: {{token: [{WRITTEN}]}}\nlimit: x\n"
    )
    result = run(at_work, app, "planted.yaml", *words)
    assert result.exit_code == 2
    assert "api_key: unknown key" in result.output
    run(at_work, app, *words, f"openai_api_key={WRITTEN}")
    run(at_work, app, *words, f'serve_args=["--api-key", "{WRITTEN}"]')
    run(at_work, app, *words, f"serve_args=[--hf-token={WRITTEN}]")
    run(at_work, app, *words, f"api_key_env={WRITTEN}")
    run(at_work, app, *words, f"api_key_env=sk-{WRITTEN}")
    run(at_work, app, *words, f"base_model=https://me:{PASSWORD}@127.0.0.1:9/model")
    run(at_work, app, *words, f"output_dir=https://{PASSWORD}@127.0.0.1:9/model")


@pytest.mark.parametrize("app", [selfdistill.app, evaluate.app])
@pytest.mark.parametrize("words", [["--api-key", WRITTEN], [f"--api-key={WRITTEN}"]])
def test_a_key_in_an_unknown_option_is_not_repeated_by_its_error(
    at_work: Path, app: typer.Typer, words: list[str]
) -> None:
    result = run(at_work, app, *words)
    assert result.exit_code == 2
    assert "--api-key: no such option; did you mean api_key_env=***?" in result.output


ADDRESSES = [
    f"http://me:{PASSWORD}@127.0.0.1:9/v1",
    f"http://{PASSWORD}@127.0.0.1:9/v1",
    f"http://me:{PASSWORD}/x@127.0.0.1:9/v1",
    f"http://me:a@{PASSWORD}@127.0.0.1:9/v1",
    f"http://127.0.0.1:9/v1?api_key={PASSWORD}",
    f"http://127.0.0.1:9/v1?k={PASSWORD}&x=1",
    f"http://127.0.0.1:9/v1#{PASSWORD}",
    f"me:{PASSWORD}@127.0.0.1:9/v1",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_with_a_password_are_refused_before_anything_is_printed(
    at_work: Path, address: str
) -> None:
    commands = [
        (selfdistill.app, [*ASK, "--server-url", address]),
        (selfdistill.app, [*ASK, f"server_url=[http://h/v1, '{address}']"]),
        (evaluate.app, ["--server-url", address]),
        (evaluate.app, ["--server-url", "http://h/v1", "--against", address]),
        (evaluate.app, ["--judge-base-url", address, "--judge-model", "m"]),
    ]
    for app, words in commands:
        result = run(at_work, app, *words)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "http://localhost:8000/v1" in result.stderr or "password" in result.stderr


@pytest.mark.parametrize("key", ["sk-Planted 0123456789", "sk-Planted\n0123456789", "Planted\x07x"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    at_work: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with serving() as server:
        for app, words in (
            (selfdistill.app, [*ASK, "output=odd.jsonl"]),
            (evaluate.app, ["--bench", "few.jsonl"]),
        ):
            result = run(at_work, app, *words, "--server-url", server.url)
            assert result.exit_code == 2
            assert "white space or a control character" in result.output
    assert server.connections == 0


def test_a_traceback_is_masked(at_work: Path) -> None:
    with serving() as server:
        repeating(server, ERRORS["forbidden"])
        code = "from medusa_train.cli.selfdistill import app; app()"
        result = subprocess.run(
            [sys.executable, "-c", code, *ASK, "--server-url", server.url, "output=t.jsonl"],
            env={**os.environ, "MEDUSA_DEBUG": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert "Traceback" in result.stderr
    assert "***" in result.stderr
    check(at_work, result.stdout, result.stderr)


BUG = """
import os
import typer
from medusa_train.cli.common import run_command
app = typer.Typer(pretty_exceptions_enable=False)
@app.command()
@run_command
def fails():
    raise RuntimeError(os.environ["OPENAI_API_KEY"])
app()
"""


def test_the_traceback_of_a_bug_is_masked(at_work: Path) -> None:
    result = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True)
    assert "Traceback" in result.stderr
    assert "RuntimeError: ***" in result.stderr
    check(at_work, result.stdout, result.stderr)


def test_only_masking_places_print_and_write() -> None:
    """Consoles come from cli/common.py, and text files from io.py."""
    package = Path(train.__file__).parents[1]
    unmasked = re.compile(
        r"[^\w]Console\((?!quiet=True)|\.write_text\(|json\.dump\(|open\([^)]*[\"'][wax]t?[\"']"
    )
    found = {
        f"{path.relative_to(package).as_posix()}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if unmasked.search(line)
    }
    allowed = (
        "config/docs.py: ",  # the project's own pages
        "console_streams.py: sys.std",  # /dev/null
        "training/deepspeed_strategy.py: with open(os.devnull",
        "cli/common.py: class MaskingConsole(Console)",
    )
    assert [line for line in sorted(found) if not line.startswith(allowed)] == []
